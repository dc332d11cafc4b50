"""Export models to the engines that serve them, and check what was written in these engines."""
