"""Opening and running a model: its batches and masks, backends, what must not be changed, what transformers calls."""
