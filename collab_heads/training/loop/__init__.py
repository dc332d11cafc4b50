"""The training loop: optimizer steps, evaluations, checkpoints and exact resuming."""
