"""Sentences with gold dependencies, and which pieces their words are made of."""
