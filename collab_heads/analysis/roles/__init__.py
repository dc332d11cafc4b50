"""What heads do: positional, rare-token and syntactic heads."""
