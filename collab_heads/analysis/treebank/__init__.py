"""Sentences with gold dependencies, and the alignment of their words to tokens."""
