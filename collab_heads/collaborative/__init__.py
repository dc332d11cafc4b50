"""Collaborative attention: heads share one query/key projection."""
