#!/usr/bin/env python
r"""Train, compress and prune translation models: Marian, BART, mBART, M2M100, T5.

    python run_translation.py --model_name_or_path Helsinki-NLP/opus-mt-de-en --train_file train.de train.en \
        --validation_file dev.de dev.en --target_heads enc-self=12,dec-self=12,dec-enc=12 --output_dir out
    python run_translation.py --demo

With several processes: `accelerate launch run_translation.py ...`. Its work is that of the command
`collab-heads translate`.
"""

import sys

from collab_heads.base.extras import exit_without

if __name__ == "__main__":
    exit_without("train", "run_translation.py")  # said before the imports below fail

from collab_heads.command.training import TRANSLATION
from collab_heads.errors import CollabHeadsError

main, parse, load_data = TRANSLATION.main, TRANSLATION.parse, TRANSLATION.load_data

if __name__ == "__main__":
    try:
        main()
    except CollabHeadsError as problem:
        sys.exit(f"run_translation.py: {problem}")
