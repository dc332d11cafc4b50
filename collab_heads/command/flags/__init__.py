"""The flags of each command; light: see `collab_heads.first_look`."""
