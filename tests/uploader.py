"""A process that uploads a changed model to the Hub that HF_ENDPOINT names; run as a script by `test_hub.py`."""

import sys
from argparse import Namespace

from known_heads import word_pieces
from model_runs import swap

from collab_heads import fold_heads, model_card, swap_to_gated
from collab_heads.training.options.hub import push
from families import FAMILIES

METRICS = {"eval_accuracy": 0.5}


def main(folder: str) -> None:
    """Upload in the ways there are, each to a repository of its own."""
    model = FAMILIES["bert"].build()
    report = swap(model, "shared", 20)
    model.push_to_hub("pushed")
    model.save_pretrained(f"{folder}/saved", push_to_hub=True, repo_id="saved")
    model.push_to_hub("owned")  # it has a card of its owner's
    model_card(model, report, name="me/carded").push_to_hub("me/pushed")
    model.push_to_hub("pushed")
    flags = Namespace(push_to_hub=True, hub_model_id="run", output_dir=folder, hub_token=None)
    push(flags, model, word_pieces(), METRICS)
    folded = FAMILIES["bert"].build()
    swap_to_gated(folded)
    fold_heads(folded)
    folded.push_to_hub("folded")


if __name__ == "__main__":
    main(sys.argv[1])
