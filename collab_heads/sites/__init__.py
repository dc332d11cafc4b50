"""Sites of attention, their states, and the record of all states in a config."""
