"""What heads, source tokens and target tokens contribute to an output."""
