"""Trim a vocabulary: keep the tokens that texts use, in the tokenizer, the embeddings and the output layer."""
