"""Everything between the concatenated heads and W_O, and head surgery."""
