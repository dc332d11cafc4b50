"""Opening, running, saving and loading models: batches, masks, backends, checks, and hooks into transformers."""
