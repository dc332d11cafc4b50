"""Files that are complete or not there: written, read, and folders of them."""
