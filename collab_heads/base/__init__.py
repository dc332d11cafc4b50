"""Ground: checks, tables and progress bars, optional packages, numbers."""
