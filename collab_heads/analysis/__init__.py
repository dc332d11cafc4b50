"""Analyze heads: what they attend to, how confident they are, how similar they are."""
