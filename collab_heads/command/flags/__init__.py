"""The flags of each command; light: see `collab_heads.base.command_start`."""
