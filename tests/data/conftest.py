from training_fixtures import bert, bilingual, files, fresh_accelerate, marian, parse  # noqa: F401
