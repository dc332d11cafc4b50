"""A run of a script, from loading to the results."""
