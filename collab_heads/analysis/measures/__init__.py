"""Numbers per head, from forward passes over data."""
