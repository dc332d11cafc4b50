"""Compress attention under one budget and without labels: heads, query/key widths and value widths."""
