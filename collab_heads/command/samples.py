"""The sentences that a command fits to, drawn from the texts."""

import random
from argparse import Namespace
from collections.abc import Mapping

from collab_heads.command.batches import batches_of, fitting
from collab_heads.command.models import Loaded
from collab_heads.command.texts import read_data
from collab_heads.training.data.parallel import Pairs


def calibration(args: Namespace, loaded: Loaded, texts: Pairs | None = None) -> list[Mapping] | None:
    """Batches of `--samples` sentences of `--data`; None without data.

    Args:
        args: the flags.
        loaded: the model and its tokenizer.
        texts: what `--data` holds, if that has been read.
    """
    if args.data is None:
        return None
    chosen = sampled(args, loaded, read_data(args) if texts is None else texts, args.samples)
    return list(batches_of(args, loaded.model, loaded.tokenizer, chosen))


def sampled(args: Namespace, loaded: Loaded, texts: Pairs, most: int) -> Pairs:
    """So many of the sentences, without those that are too long."""
    model, tokenizer = loaded.model, loaded.tokenizer
    return fitting(args, model, tokenizer, drawn(texts, most, args.seed))


def drawn(texts: Pairs, most: int, seed: int) -> Pairs:
    """So many of the sentences, drawn by a seed, in their order."""
    size = len(texts["source"])
    chosen = sorted(random.Random(seed).sample(range(size), min(most, size)))
    return {side: [lines[i] for i in chosen] for side, lines in texts.items()}
