"""Compress layers under one budget and without labels: heads, widths of queries, keys and values, and neurons."""
