"""The files of a run: its output folder, with a lock and a record, and its checkpoints."""
