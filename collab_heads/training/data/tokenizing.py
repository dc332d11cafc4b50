"""Tokenizing by several processes."""

import multiprocessing
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from collab_heads.bars import progress_bar
from collab_heads.training.data.batches import chunked
from collab_heads.training.data.collate import tokenize

PORTION = 1000  # pairs that a process takes at a time


def tokenized_by(
    processes: int, pairs: Mapping[str, list[str]], tokenizer: PreTrainedTokenizerBase, settings: tuple, name: str
) -> Dataset:
    """Tokenize pairs as `tokenize` does, in their order.

    The processes are started afresh: one that is forked after torch has used threads can wait for them forever.

    Args:
        processes: how many.
        pairs: "source" and "target" -> sentences.
        tokenizer: with its languages set, where it has any.
        settings: what else `tokenize` takes.
        name: of the split, for the progress bar.
    """
    sides = {side: chunked(sentences, PORTION) for side, sentences in pairs.items()}
    portions = [dict(zip(sides, rows, strict=True)) for rows in zip(*sides.values(), strict=True)]
    prefix, max_source, max_target = settings
    work = partial(tokenize, tokenizer=tokenizer, prefix=prefix, max_source=max_source, max_target=max_target)
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        made = list(progress_bar(pool.map(work, portions), desc=f"tokenizing {name}", total=len(portions), leave=False))
    return Dataset.from_dict({column: [row for part in made for row in part[column]] for column in made[0]})
