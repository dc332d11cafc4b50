#!/usr/bin/env python
r"""Fine-tune a Transformer on a GLUE task, or on classification files of your own, with collaborative attention.

    python run_glue.py --model_name_or_path bert-base-uncased --task_name mrpc --collaborative \
        --dim_shared_query_key 256 --swap between --output_dir out
    python run_glue.py --demo

With several processes: `accelerate launch run_glue.py ...`. Its work is that of the command `collab-heads glue`.
"""

import sys

from collab_heads.base.extras import exit_without

if __name__ == "__main__":
    exit_without("train", "run_glue.py")  # said before the imports below fail

from collab_heads.command.training import GLUE
from collab_heads.errors import CollabHeadsError

main, parse, load_data = GLUE.main, GLUE.parse, GLUE.load_data

if __name__ == "__main__":
    try:
        main()
    except CollabHeadsError as problem:
        sys.exit(f"run_glue.py: {problem}")
