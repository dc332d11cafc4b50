"""`python -m collab_heads analyze MODEL --data FILE`: a report on the heads of a model."""

import sys

from collab_heads.command import main

if __name__ == "__main__":
    sys.exit(main.main())
