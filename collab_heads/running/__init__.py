"""Run a model on batches, and read what goes through it and comes out."""
