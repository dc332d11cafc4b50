"""Examples: read, encoded, put into batches, measured."""
