"""Exchange the places of heads, by a schedule or by their scores."""
