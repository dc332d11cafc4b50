"""Says where the command went that was once `python -m collab_heads.analysis`."""

import sys

sys.exit("collab_heads: the command is now `python -m collab_heads analyze MODEL --data FILE`")
