"""Distil a changed model from its original, without labels."""
