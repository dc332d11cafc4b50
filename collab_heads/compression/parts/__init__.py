"""The parts of a site that can become smaller: one class, one file and one entry in `table.PARTS` each."""
