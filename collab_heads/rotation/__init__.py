"""Heads change places: by a schedule, or by how strong they are."""
