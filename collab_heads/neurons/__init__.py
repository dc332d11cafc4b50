"""Neurons of feed-forward blocks: which of them the others can reconstruct, and their removal."""
