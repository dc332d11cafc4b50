"""Heads change places: by a schedule, or by their scores."""
