"""Fine-tuning for the command-line scripts: the training loop, the runs and the files they write."""
