"""The flags of the scripts: what they mean, which exclude each other, what they ask of a model."""
