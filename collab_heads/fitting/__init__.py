"""Fits of smaller parts to what the stock ones put out: queries and keys, values, heads, neurons."""
