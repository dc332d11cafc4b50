"""The command line: `collab-heads`, `python -m collab_heads`."""
