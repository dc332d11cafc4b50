"""What heads do: what they attend to, how sure they are, how alike."""
