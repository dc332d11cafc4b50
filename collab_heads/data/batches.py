"""Assign examples to optimizer steps, by the seed and the epoch alone, and collate pairs into batches.

So a resumed run sees the same steps as one that was not interrupted, and any number of processes can share a step.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from collab_heads.contract.registry import is_lone_decoder
from collab_heads.errors import ArgumentError

Step = list[list[int]]  # micro-batches of indices of examples
POOL = 20  # steps whose examples are sorted by length together


def shuffled_steps(
    num_examples: int, batch_size: int, batches: int, seed: int, epoch: int, lengths: Sequence[int] | None = None
) -> list[Step]:
    """Shuffle the examples of one epoch into optimizer steps.

    Args:
        num_examples: size of the training set.
        batch_size: of a micro-batch on one process.
        batches: micro-batches per step: processes times accumulation.
        seed: of the order.
        epoch: counted from 0; every epoch has an order of its own.
        lengths: of the examples, to put examples of like length into one step: less padding, a little less random.

    Returns:
        Steps of `batches` micro-batches; one can be smaller. Every example occurs once.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order, size = torch.randperm(num_examples, generator=generator).tolist(), batch_size * batches
    if lengths is None:
        return [chunked(chunk, batch_size) for chunk in chunked(order, size)]
    order = [i for pool in chunked(order, POOL * size) for i in sorted(pool, key=lambda i: -lengths[i])]
    steps = [chunked(chunk, batch_size) for chunk in chunked(order, size)]
    return [steps[i] for i in torch.randperm(len(steps), generator=generator).tolist()]


def token_steps(
    lengths: Sequence[int], max_tokens: int, batches: int, seed: int, epoch: int, *, pool: int = 100
) -> list[Step]:
    """Shuffle the examples of one epoch into steps with up to `max_tokens` tokens a micro-batch, with padding.

    Args:
        lengths: of the examples: the longer of source and target.
        max_tokens: of a micro-batch on one process; an example that is longer is a micro-batch of its own.
        batches: micro-batches per step: processes times accumulation.
        seed: of the order.
        epoch: counted from 0; every epoch has an order of its own.
        pool: micro-batches' worth of examples that are sorted by length together.

    Returns:
        Steps of `batches` micro-batches; the last can have fewer. Every example occurs once.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    mean = max(1, sum(lengths) // max(1, len(lengths)))
    filled = []
    for part in chunked(order, max(1, pool * max_tokens // mean)):
        batch: list[int] = []
        for index in sorted(part, key=lambda i: -lengths[i]):  # the first of a batch is its longest
            if batch and (len(batch) + 1) * lengths[batch[0]] > max_tokens:
                filled.append(batch)
                batch = []
            batch.append(index)
        filled.append(batch)
    shuffled = [filled[i] for i in torch.randperm(len(filled), generator=generator).tolist()]
    return chunked(shuffled, batches)


def share_of_process(step: Step, rank: int, processes: int) -> Step:
    """Return the micro-batches of a step for one process: as many as for every other, the last perhaps empty."""
    rounds = math.ceil(len(step) / processes)
    share = step[rank::processes]
    return share + [[]] * (rounds - len(share))


def longest_first(lengths: Sequence[int], batch_size: int) -> Step:
    """Return batches for evaluation: similar lengths together, the longest first, so that memory fails early."""
    return chunked(sorted(range(len(lengths)), key=lambda i: -lengths[i]), batch_size)


def chunked(items: Sequence, size: int) -> list:
    return [items[start : start + size] for start in range(0, len(items), size)]


IGNORED = -100  # labels that do not count


def check_room(flag: str, most: int, tokenizer: PreTrainedTokenizerBase, pairs: bool = False) -> None:
    """Raise ArgumentError if a number of tokens leaves no room for text beside the special tokens.

    Args:
        flag: sets the number.
        most: tokens of a sentence, or pair.
        tokenizer: adds the special tokens.
        pairs: whether it takes two texts together.
    """
    special = tokenizer.num_special_tokens_to_add(pair=pairs)
    if most <= special:
        raise ArgumentError(
            f"{flag}: {most} tokens leave no room for text, the {type(tokenizer).__name__} adds {special} of its own"
        )


def with_padding(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer, or a copy that pads as a model expects.

    Decoders that classify look for the last token that is not their `config.pad_token_id`, whatever the mask says. A
    tokenizer without a padding token pads with that, too, or else with the end token, masked out.

    Args:
        tokenizer: any tokenizer.
        config: that of the model.

    Raises:
        ArgumentError: if there is nothing to pad with.
    """
    known, padding = padding_of(config), tokenizer.pad_token
    if known is not None and 0 <= known < len(tokenizer) and (padding is None or is_lone_decoder(config)):
        padding = tokenizer.convert_ids_to_tokens(known)
    padding = padding or tokenizer.eos_token
    if padding is None:
        raise ArgumentError(
            f"the {type(tokenizer).__name__} has no padding token and no end token, so batches cannot be made: set its "
            "pad_token"
        )
    if padding != tokenizer.pad_token:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.pad_token = padding
    return tokenizer


def with_tokens(columns: Mapping[str, list], tokenizer: PreTrainedTokenizerBase) -> dict[str, list]:
    """Return encoded texts in which one without tokens is the padding token: models cannot read none.

    Tokenizers that add no tokens of their own, such as GPT-2's, make none of an empty text.

    Args:
        columns: `input_ids` and so on, a list of numbers for each text.
        tokenizer: has a padding token, see `with_padding`.
    """
    alone = {"input_ids": [tokenizer.pad_token_id], "attention_mask": [1]}
    return {name: [row or alone.get(name, [0]) for row in rows] for name, rows in columns.items()}


ALIGNED = 8  # products in half precision are quickest where sizes are multiples of it


def padding_multiple(precision: str, longest: int, limit: int | None) -> int:
    """Return what lengths are rounded up to: in half precision 8, unless the model has too few positions; else 1.

    Args:
        precision: that of Accelerate: "no", "fp16", "bf16".
        longest: tokens that an example may have.
        limit: positions of the model; None without a limit.
    """
    padded = math.ceil(longest / ALIGNED) * ALIGNED
    return ALIGNED if precision != "no" and (limit is None or padded <= limit) else 1


def padding_of(config: PretrainedConfig) -> int | None:
    """Return the padding token that the config of a model names, None where it names none."""
    return getattr(config.get_text_config(decoder=True), "pad_token_id", None)


def tokenize(
    pairs: Mapping[str, Sequence[str]],
    tokenizer: PreTrainedTokenizerBase,
    prefix: str,
    max_source: int,
    max_target: int,
) -> dict[str, list[list[int]]]:
    """Tokenize pairs.

    Args:
        pairs: "source" and "target" -> sentences.
        tokenizer: with its languages set, where it has any.
        prefix: put before every source sentence (T5).
        max_source: the longest input, in tokens.
        max_target: the longest output, in tokens.

    Returns:
        `input_ids` and `labels`, truncated to their limits.
    """
    inputs = tokenizer([prefix + line for line in pairs["source"]], truncation=True, max_length=max_source)
    labels = tokenizer(text_target=list(pairs["target"]), truncation=True, max_length=max_target)
    return {"input_ids": inputs["input_ids"], "labels": labels["input_ids"]}


@dataclass(frozen=True)
class Collate:
    """Collator that pads pairs into a batch; decoder inputs are the labels shifted right, as the model does it.

    Attributes:
        model: makes the decoder inputs.
        pad: id of the padding token.
        multiple: lengths are rounded up to a multiple of it.
        lengths: least lengths of inputs and of labels; 0 for that of the longest in a batch.
    """

    model: PreTrainedModel
    pad: int
    multiple: int = 1
    lengths: tuple[int, int] = (0, 0)

    def __call__(self, pairs: Sequence[Mapping]) -> dict[str, Tensor]:
        """Return input_ids and attention_mask [B, S]; with labels, also decoder_input_ids and labels [B, T]."""
        ids = self.padded([pair["input_ids"] for pair in pairs], self.pad, self.lengths[0])
        lengths = torch.tensor([len(pair["input_ids"]) for pair in pairs])
        batch = {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}
        if "labels" in pairs[0]:
            labels = self.padded([pair["labels"] for pair in pairs], IGNORED, self.lengths[1])
            batch |= {"decoder_input_ids": shifted(self.model, labels), "labels": labels}
        return batch

    def padded(self, rows: Sequence[Sequence[int]], value: int, least: int = 0) -> Tensor:
        """Return rows of token ids as one tensor, padded with `value`; its width is a multiple of `multiple`."""
        width = math.ceil(max(least, *map(len, rows)) / self.multiple) * self.multiple
        return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])


def shifted(model: PreTrainedModel, labels: Tensor) -> Tensor:
    """Return the decoder's inputs [B, T]: the labels shifted right, as the model itself does it."""
    by_the_model = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if by_the_model is not None:
        return by_the_model(labels=labels)
    first, pad = model.config.decoder_start_token_id, model.config.pad_token_id  # as M2M100 does in its forward
    inputs = torch.cat([torch.full_like(labels[:, :1], first), labels[:, :-1]], dim=1)
    return inputs.masked_fill(inputs == IGNORED, pad)
