"""What the command-line scripts share."""
