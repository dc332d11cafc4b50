"""`python -m collab_heads COMMAND ...`, which is `collab-heads COMMAND ...`."""

import sys

from collab_heads.command import main

if __name__ == "__main__":
    sys.exit(main.main())
