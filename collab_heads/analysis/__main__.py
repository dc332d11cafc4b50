"""`python -m collab_heads.analysis MODEL --data FILE`: a report on the heads of a model."""

import sys

from collab_heads.errors import CollabHeadsError
from collab_heads.training.analysis_command import main

if __name__ == "__main__":
    try:
        main()
    except CollabHeadsError as problem:
        sys.exit(f"collab_heads.analysis: {problem}")
