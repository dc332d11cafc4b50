"""A site of attention, its state, and the record of all states in a config."""
