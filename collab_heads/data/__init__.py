"""Read, tokenize, batch and score examples: texts, tables, images."""
