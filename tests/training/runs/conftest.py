from training_fixtures import without_sync  # noqa: F401
