"""Read files, and write files and folders that are either complete or absent."""
