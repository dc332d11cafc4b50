"""Calibration: run the model on batches, and keep what fits need: moments of inputs, and calls of attention."""
