"""What a run writes: its output folder, reserved and recorded, and checkpoints."""
