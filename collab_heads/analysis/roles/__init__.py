"""Roles of heads: positional, rare-token and syntactic heads."""
