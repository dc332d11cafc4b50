"""The command line: `python -m collab_heads`."""
