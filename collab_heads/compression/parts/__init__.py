"""What of a site can become smaller: a part is one class, one file, one entry in `table.PARTS`."""
