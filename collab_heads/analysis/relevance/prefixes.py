"""The prefixes that a decoder reads: the reference, the model's own text, or that of another sentence."""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.analysis.relevance.sides import IGNORED, PromptAndContinuation, Sides
from collab_heads.base.checks import check_choice, check_count, check_seed
from collab_heads.base.option_values import PREFIX_KINDS, PrefixKind
from collab_heads.errors import ArgumentError, CalibrationError, CollabHeadsError, UnsupportedModelError
from collab_heads.running.batches import check_modalities, each_batch, evaluating, num_rows
from collab_heads.running.translations import generate, translate

OF_DECODER = ("labels", "decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds")
Text = tuple[list[int], list[int]]  # a prompt and its continuation
Change = Callable[[Mapping], Mapping]


def with_prefixes(
    model: PreTrainedModel,
    sides: Sides,
    batches: Iterable[Mapping],
    kind: PrefixKind,
    *,
    num_beams: int = 1,
    seed: int = 0,
) -> Iterable[Mapping]:
    """Return batches whose decoder reads prefixes of a kind; one batch is held at a time.

    Args:
        model: the model; it generates its own prefixes in evaluation mode, without sampling.
        sides: the sides of the model.
        batches: as `token_contributions` takes them; for "own" of an encoder-decoder the source alone is enough.
        kind: "reference": unchanged. "own": what the model generates from the source or the prompt. "random": those of
            another sentence of the batch, each used once; a batch of one takes one from the batch before it.
        num_beams: number of beams for "own".
        seed: seed for "random".
    """
    check_choice("prefixes", kind, PREFIX_KINDS)
    check_count("num_beams", num_beams, least=1)
    check_seed(seed)
    alone = isinstance(sides, PromptAndContinuation)
    if kind == "own":
        if not model.can_generate():
            raise UnsupportedModelError(f"{type(model).__name__} generates nothing, so it has no prefixes of its own")
        change = own_of(model, num_beams, alone)
    else:
        change = RandomPrefixes(seed, alone) if kind == "random" else lambda batch: batch
    return Changed(model, batches, change)


def check_prefixes(prefixes: PrefixKind | Sequence[PrefixKind]) -> tuple[PrefixKind, ...]:
    """Return the requested kinds of prefixes, one or several, each once."""
    kinds = (prefixes,) if isinstance(prefixes, str) else tuple(dict.fromkeys(prefixes))
    for kind in kinds:
        check_choice("prefixes", kind, PREFIX_KINDS)
    if not kinds:
        raise ArgumentError(f"prefixes is empty: name some of {', '.join(PREFIX_KINDS)}")
    return kinds


class Changed:
    """Batches that are changed when they are read; an error while doing so names the batch's index."""

    def __init__(self, model: PreTrainedModel, batches: Iterable[Mapping], change: Change):
        self.model, self.batches, self.change = model, batches, change

    def __length_hint__(self) -> int:
        return operator.length_hint(self.batches)

    def __iter__(self) -> Iterator[Mapping]:
        for index, batch in enumerate(each_batch(self.batches)):
            try:
                check_modalities(self.model, batch)
                changed = self.change(batch)
            except CollabHeadsError:
                raise
            except Exception as error:  # whatever the model raises about its inputs
                raise CalibrationError(
                    f"{type(self.model).__name__} cannot generate from batch {index}: {error}"
                ) from error
            yield changed


def own_of(model: PreTrainedModel, num_beams: int, alone: bool) -> Change:
    def own(batch: Mapping) -> Mapping:
        with evaluating(model):
            if alone:
                return continued(model, batch, num_beams)
            source = {name: value for name, value in batch.items() if name not in OF_DECODER}
            return source | translate(model, source, num_beams)

    return own


class RandomPrefixes:
    """A change that gives every sentence the target of another one, or every prompt another continuation."""

    def __init__(self, seed: int, alone: bool):
        self.generator, self.alone = torch.Generator().manual_seed(seed), alone
        self.before: Mapping | None = None

    def __call__(self, batch: Mapping) -> Mapping:
        """Return a batch with the targets in another order, in which none keeps its own."""
        count = num_rows(batch)
        if count is None:
            raise ArgumentError("random prefixes need batches of tensors with a row per sentence")
        if count == 1 and self.before is None:
            raise ArgumentError("random prefixes are those of other sentences: give batches of two or more")
        cycle = torch.randperm(count, generator=self.generator)
        others = torch.empty_like(cycle)
        others[cycle] = cycle.roll(1)  # a single cycle through all rows
        lender, self.before = (batch, batch) if count > 1 or self.before is None else (self.before, batch)
        if self.alone:
            prompts, lent = texts_of(batch), texts_of(lender)
            return batch_of([(prompts[row][0], lent[other][1]) for row, other in enumerate(others.tolist())])
        lent_tensors = {name: lender[name] for name in OF_DECODER if isinstance(lender.get(name), Tensor)}
        return {**batch, **{name: each[others.to(each.device)] for name, each in lent_tensors.items()}}


def texts_of(batch: Mapping) -> list[Text]:
    """Return prompts (up to the first label) and continuations (up to the last), without padding."""
    texts = []
    if batch.get("labels") is None:
        raise CalibrationError(f"a decoder needs labels that say where a prompt ends: {IGNORED} for its tokens")
    mask = batch.get("attention_mask")
    used = torch.ones_like(batch["labels"], dtype=torch.bool) if mask is None else mask.bool()
    for ids, labels, is_token in zip(batch["input_ids"], batch["labels"], used, strict=True):
        labelled = (labels != IGNORED).nonzero().flatten().tolist()
        if not labelled or not is_token[: labelled[0]].any():
            raise CalibrationError(f"a sentence has no prompt, or no continuation: labels are {IGNORED} for prompts")
        first, last = labelled[0], labelled[-1] + 1
        prompt = ids[:first][is_token[:first]].tolist()
        texts.append((prompt, ids[first:last].tolist()))
    return texts


def batch_of(texts: list[Text]) -> dict[str, Tensor]:
    """Return prompts with continuations, as a decoder reads them, padded on the right."""
    length = max(len(prompt) + len(more) for prompt, more in texts)
    rows: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for prompt, more in texts:
        missing = length - len(prompt) - len(more)
        rows["input_ids"].append([*prompt, *more, *[0] * missing])  # which id stands there does not matter
        rows["attention_mask"].append([1] * (length - missing) + [0] * missing)
        rows["labels"].append([*[IGNORED] * len(prompt), *more, *[IGNORED] * missing])
    return {name: torch.tensor(values) for name, values in rows.items()}


def continued(model: PreTrainedModel, batch: Mapping, num_beams: int) -> dict[str, Tensor]:
    """Return every prompt with what the model generates, at most as long as the given continuation."""
    texts = []
    for prompt, more in texts_of(batch):
        read = torch.tensor([prompt])
        inputs = {"input_ids": read, "attention_mask": torch.ones_like(read)}
        settings = {"num_beams": num_beams, "num_return_sequences": 1, "do_sample": False, "pad_token_id": 0}
        ids = generate(model, inputs, max_new_tokens=len(more), **settings)
        texts.append((prompt, ids[0, len(prompt) :].tolist()))  # a row alone has nothing after its end
    return batch_of(texts)
