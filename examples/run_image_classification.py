#!/usr/bin/env python
r"""Train, fine-tune, compress and prune classifiers of images: ViT, DeiT, DINOv2.

    python examples/run_image_classification.py --model_name_or_path facebook/deit-small-patch16-224 \
        --train_dir images/train --validation_dir images/validation --ignore_mismatched_sizes \
        --collaborative --dim_shared_query_key 192 --swap between --output_dir out
    python examples/run_image_classification.py --demo

With several processes: `accelerate launch examples/run_image_classification.py ...`. Its work is that of the command
`collab-heads images`.
"""

import sys

from collab_heads.base.extras import exit_without

if __name__ == "__main__":
    exit_without("train", "run_image_classification.py")  # said before the imports below fail

from collab_heads.command.training import IMAGES
from collab_heads.errors import CollabHeadsError

main, parse, load_data = IMAGES.main, IMAGES.parse, IMAGES.load_data

if __name__ == "__main__":
    try:
        main()
    except CollabHeadsError as problem:
        sys.exit(f"run_image_classification.py: {problem}")
