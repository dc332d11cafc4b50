"""Score models on a task of the user's."""
