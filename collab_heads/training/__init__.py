"""What the command-line scripts share, and the demo."""
