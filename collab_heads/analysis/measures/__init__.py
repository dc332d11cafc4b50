"""Measures per head, from forward passes over data."""
