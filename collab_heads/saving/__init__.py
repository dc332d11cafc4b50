"""Save a changed model, and load it again with `from_pretrained`."""
