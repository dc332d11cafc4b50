"""Contributions of heads, source tokens and target tokens to an output."""
