"""The training loop: optimizer steps, and an exact way back in."""
