"""compress: the smallest attention that still does the work, under one budget and without labels."""
