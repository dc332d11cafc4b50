from training_fixtures import bert, bilingual, files, fresh_accelerate, marian  # noqa: F401
