"""The demos of the scripts, and the grammars that make their data."""
