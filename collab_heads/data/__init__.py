"""Texts, tables, images and batches: read, tokenized, collated, scored."""
