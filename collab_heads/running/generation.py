"""Let a language model write texts to calibrate with: they hold what it knows, whatever the texts at hand are about.

Random first tokens lead it into many subjects and languages. LLM-QAT (Liu et al., 2023) trains, and Williams et al.
(2024) calibrate, on texts like these.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.base.arguments import checking_arguments
from collab_heads.base.checks import MAX_SIZE, check_count, check_seed
from collab_heads.base.progress import Loop, progress_bar
from collab_heads.contract.registry import get_adapter, is_lone_decoder
from collab_heads.errors import ArgumentError, NonFiniteError, UnsupportedModelError
from collab_heads.layers.attention import CACHE
from collab_heads.model.opened import input_device
from collab_heads.running.batches import evaluating, longest_text

ROWS = 64  # texts that are written at once


@checking_arguments
def generate_batches(
    model: PreTrainedModel, count: int = 64, length: int = 128, *, start: Sequence[int] = (), seed: int = 0
) -> list[dict[str, Tensor]]:
    """Let a language model write texts, as batches to calibrate with.

    A model that is fitted to texts of one kind loses most on others. With texts of its own beside them, it loses far
    less there: pass `[*batches, *generate_batches(model)]` to `compress` or `plan`. Each text begins with a random
    token; the others are drawn from what the model puts out, at temperature 1. Where a text ends, the next one begins.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=100))
        >>> [batch["input_ids"].shape for batch in generate_batches(model, 100, 16)]
        [torch.Size([64, 16]), torch.Size([36, 16])]

    Args:
        model: a supported decoder with a language modelling head, such as Llama or GPT-2.
        count: the number of texts.
        length: tokens of each text, `start` included.
        start: ids of the tokens that every text begins with: those that the tokenizer puts before a text.
        seed: seed of the tokens that are drawn.

    Returns:
        Batches with `input_ids` [at most 64, length] alone, on the processor. All tokens count.

    Raises:
        UnsupportedModelError: if there is no adapter for the model, or it is not a decoder alone with a language
            modelling head.
        ArgumentError: on an impossible number, more tokens than the model can read, or an unknown token in `start`.
        NonFiniteError: if the model puts out NaN or inf.
    """
    get_adapter(model)
    if not (is_lone_decoder(model.config) and model.can_generate()):
        raise UnsupportedModelError(
            f"{type(model).__name__} writes no texts from nothing: give a decoder with a language modelling head, such "
            "as Llama's or GPT-2's; others need texts of yours"
        )
    vocabulary = len(cast(Tensor, model.get_input_embeddings().weight))
    check_count("count", count, 1, MAX_SIZE)
    check_count("length", length, len(start) + 2, longest_text(model) or MAX_SIZE)
    check_seed(seed)
    for token in start:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary:
            raise ArgumentError(
                f"start: {token!r:.40} is not the id of a token: whole numbers from 0 to {vocabulary - 1}"
            )
    generator = torch.Generator().manual_seed(seed)
    begun = torch.cat(
        [torch.tensor([start] * count).long(), torch.randint(vocabulary, (count, 1), generator=generator)], 1
    )
    steps = length - begun.shape[1]
    with evaluating(model), progress_bar(total=-(-count // ROWS) * steps, desc="generating") as bar:
        return [{"input_ids": continued(model, rows, steps, generator, bar)} for rows in begun.split(ROWS)]


def continued(model: PreTrainedModel, texts: Tensor, steps: int, generator: torch.Generator, bar: Loop) -> Tensor:
    """Return texts [B, T] with as many more tokens as there are steps, each drawn by its probability."""
    unread, cache, device = texts, None, input_device(model)
    vocabulary = len(cast(Tensor, model.get_input_embeddings().weight))  # logits may be wider
    for _ in range(steps):
        outputs = model(input_ids=unread.to(device), **{CACHE: cache}, use_cache=True, return_dict=True)
        chances, cache = outputs.logits[:, -1, :vocabulary].float().softmax(-1).cpu(), outputs[CACHE]
        if not chances.isfinite().all():
            raise NonFiniteError(f"{type(model).__name__} puts out NaN or inf after {texts.shape[1]} tokens of its own")
        unread = torch.multinomial(chances, 1, generator=generator)
        texts = torch.cat([texts, unread], 1)
        bar.update()
    return texts
