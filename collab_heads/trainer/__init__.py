"""Heads that are learned, mixed and rotated by a transformers Trainer."""
