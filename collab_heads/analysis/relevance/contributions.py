"""The contributions of all tokens of a portion of a batch, sentence by sentence, without padding."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from collab_heads.analysis.measures.passes import check_exclude, end_tokens
from collab_heads.analysis.relevance.backward import explain_batches, leaf
from collab_heads.analysis.relevance.contribution_results import TokenContributions
from collab_heads.analysis.relevance.prefixes import with_prefixes
from collab_heads.analysis.relevance.sentence_contributions import (
    SentenceContributions,
    TokenRelevance,
    of_sentence,
    relevance_of_tokens,
)
from collab_heads.analysis.relevance.sides import Sides, sides_of
from collab_heads.base.arguments import checking_arguments
from collab_heads.base.option_values import PrefixKind
from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.contract.registry import get_adapter
from collab_heads.errors import CalibrationError, NonFiniteError, UnsupportedModelError
from collab_heads.model.batches import num_rows
from collab_heads.model.offloading import opening_model
from collab_heads.model.portions import portions
from collab_heads.model.refusals import check_wrapper


@dataclass(frozen=True)
class Portion:
    """What a model was given, and what it made of it.

    Attributes:
        model: the model.
        sides: what its output is made of.
        inputs: the portion of a batch.
        outputs: what the model returned.
        states: name of a stack -> what enters it, [B, S, D].
        last: what enters the language modelling head, [B, T, D], if that is known.
    """

    model: PreTrainedModel
    sides: Sides
    inputs: Mapping
    outputs: ModelOutput
    states: Mapping[str, Tensor]
    last: Tensor | None

    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of the tokens of all stacks: which are of the first side, which are no padding, their ids or -1: [B, C]."""
        first, used, ids = [], [], []
        masks, texts = self.sides.tokens(self.model, self.inputs), self.sides.ids(self.model, self.inputs)
        for name, is_first in self.sides.first_side(self.inputs).items():
            shape = self.states[name].shape[:2]
            mask, text = masks[name], texts[name]
            first.append(is_first.cpu().expand(shape))
            used.append((torch.ones(shape, dtype=torch.bool) if mask is None else mask.cpu()).expand(shape))
            known = text is not None and text.shape == shape
            ids.append(text.cpu() if known and text is not None else torch.full(shape, -1))
        return torch.cat(first, 1), torch.cat(used, 1), torch.cat(ids, 1)


def sentences_of(portion: Portion, exclude: tuple[int, ...], keep_relevance: bool) -> list[SentenceContributions]:
    """What the tokens of every sentence contribute, in the order of the rows.

    Raises:
        NonFiniteError: if a share is NaN or inf.
    """
    values, counted = portion.sides.explained(portion.model, portion.outputs, portion.inputs, exclude)
    counted = counted.cpu()
    positions = counted.any(0).nonzero().flatten()
    states = [portion.states[name] for name in portion.sides.roles]
    relevance = relevance_of_tokens(values, positions.tolist(), states, portion.last)
    first, used, ids = portion.columns()
    used[:, -counted.shape[1] :] &= counted.flip(1).cumsum(1).flip(1) > 0  # what comes after the last is never read
    said = first_choices(portion.outputs)
    sentences = []
    for row, mask in enumerate(counted[:, positions]):  # the n-th token that counts is at position n
        mine = relevance[row, mask][:, used[row]]
        if not torch.isfinite(mine).all() or bool((mine.abs().sum(-1) == 0).any()):
            raise NonFiniteError(
                f"a contribution to what {type(portion.model).__name__} says is NaN or inf; look at its weights"
            )
        is_source = first[row, used[row]]
        sentence = of_sentence(mine, is_source)
        if keep_relevance:
            mine_ids = ids[row, used[row]]
            kept = TokenRelevance(
                source=mine[:, is_source],
                target=mine[:, ~is_source],
                source_ids=known_ids(mine_ids[is_source]),
                target_ids=known_ids(mine_ids[~is_source]),
                said=() if said is None else tuple(said[row, positions[mask]].tolist()),
            )
            sentence = replace(sentence, relevance=kept)
        sentences.append(sentence)
    return sentences


def first_choices(outputs: ModelOutput) -> Tensor | None:
    """The ids of the largest logits, [B, T]; None for a model without."""
    logits = getattr(outputs, "logits", None)
    return None if logits is None or logits.ndim != 3 else logits.argmax(-1).cpu()


def known_ids(ids: Tensor) -> tuple[int, ...]:
    """Ids of tokens; empty where there are none."""
    return tuple(ids.tolist()) if len(ids) and bool((ids >= 0).all()) else ()


ROW = "row of the batch"  # beside the inputs, while a batch is cut into portions


@checking_arguments
@opening_model
def token_contributions(
    model: PreTrainedModel,
    batches: Iterable[Mapping],
    *,
    prefixes: PrefixKind = "reference",
    exclude: Iterable[int] | None = None,
    num_beams: int = 1,
    seed: int = 0,
    keep_relevance: bool = False,
) -> TokenContributions:
    """Measure how much of each generated token comes from the source, or the prompt, and how much from what was said.

    The top-1 logit at a position is explained by conservative relevance propagation to what enters the first layers:
    token and position embeddings. A token's contribution is its |relevance|, divided by that of all source tokens and
    the target tokens up to this position, the start token included; that of the source is the sum over its tokens. A
    backward pass per position: give some hundred sentences. Four numbers a token are kept of each.

    The target prefix is that of the labels or decoder inputs, `prefixes="reference"`. With "own" it is the model's own
    translation, as when it is used; with "random" that of another sentence, which has nothing to do with the source: a
    model that then turns from the source is prone to go on with whatever was said (exposure bias).

    A decoder alone has a prompt and its continuation instead. They are told apart by the labels: the tokens of the
    continuation, -100 where the prompt is, and padding; a text of several turns may alternate. The first token of a
    continuation has nothing but the prompt, a share of 1. Prefixes of its own are its continuations of the prompts, up
    to the first label, of the length of the given ones at most.

    Args:
        model: a supported encoder-decoder, or a decoder without cross-attention; it runs in evaluation mode and is left
            as it was.
        batches: input dicts as the model takes them, with labels or decoder inputs; any iterable, read once.
        prefixes: what the decoder has read: "reference", "own" or "random". For "own" of an encoder-decoder, batches
            need no labels; for "random" they must hold two sentences or more.
        exclude: ids of decoder inputs after which no token is predicted, instead of `eos_token_id` and `sep_token_id`
            of the config and the generation config. For a decoder alone the labels say it all.
        num_beams: with which a model finds its own prefixes.
        seed: of the drawing of random prefixes.
        keep_relevance: also keep the relevance of every token to every generated token, of every sentence.

    Returns:
        Shares, entropies and influence, as means by position, counted from 0, the first generated token, and of every
        sentence; `print` them.

    Raises:
        ArgumentError: if an argument is none of those that it can be, or for a model without logits or last hidden
            states.
        CalibrationError: if there are no batches, the model cannot take one (its index is named), a mask does not fit,
            no position counted, a stack was not run, or labels of a decoder alone do not mark its prompt.
        NonFiniteError: if a share is NaN or inf.
        UnsupportedModelError: if there is no adapter for the model, it is wrapped, or generates nothing.

    Source: Voita, Sennrich, Titov 2021, arXiv:2010.10907, which propagates positive contributions only (the alpha-beta
        rule); here the rules are the conservative ones, of either sign, and absolute values are compared.
    """
    check_wrapper(model)
    adapter = get_adapter(model)
    excluded = end_tokens(model) if exclude is None else check_exclude(exclude)
    sides = sides_of(model, adapter)
    if sides is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} is no encoder-decoder, and no decoder without cross-attention: only those have a "
            "source and a target, or a prompt and its continuation, to compare"
        )
    chosen = with_prefixes(model, sides, batches, prefixes, num_beams=num_beams, seed=seed)
    found: dict[tuple[int, int], SentenceContributions] = {}  # batch, row -> what was found
    order = RowOrder(model.config.is_encoder_decoder)
    states: dict[str, Tensor] = {}  # of the portion under way: what enters each stack
    last: list[Tensor] = []  # and what enters the language modelling head

    def see(inputs: Mapping, outputs: ModelOutput) -> None:
        if missing := next((name for name in sides.roles if name not in states), None):
            raise CalibrationError(f"the stack of the {missing} was not run: give its tokens, not its outputs")
        portion = Portion(model, sides, inputs, outputs, states, last[-1] if last else None)
        measured = sentences_of(portion, excluded, keep_relevance)
        found.update(zip(order.places(len(measured)), measured, strict=True))
        states.clear()
        last.clear()

    handles = listen(model, adapter, sides, states, last)
    try:
        explain_batches(model, adapter, chosen, see, cut=order.cut)
    finally:
        for handle in handles:
            handle.remove()
    sentences = tuple(found[place] for place in sorted(found))
    if not any(len(sentence.source) for sentence in sentences):
        raise CalibrationError(
            f"no position counted: every one was padding or one of the excluded ids {list(excluded)}"
        )
    return TokenContributions(sentences, excluded, sides.names, prefixes)


class RowOrder:
    """Cuts batches into portions of like length, without padding, and remembers which sentences they hold.

    Args:
        is_encoder_decoder: whether labels are what a decoder reads.
    """

    def __init__(self, is_encoder_decoder: bool):
        self.is_encoder_decoder = is_encoder_decoder
        self.batch, self.rows = -1, None

    def cut(self, batch: Mapping) -> Iterator[Mapping]:
        """The portions of a batch; a batch of anything but tensors with a row per sentence stays whole."""
        self.batch += 1
        count = num_rows(batch)
        numbered = batch if count is None else {**batch, ROW: torch.arange(count)}
        for portion in portions(numbered, self.is_encoder_decoder):
            rows = portion.get(ROW)
            self.rows = None if rows is None else rows.tolist()
            yield {name: value for name, value in portion.items() if name != ROW}

    def places(self, count: int) -> list[tuple[int, int]]:
        """Batch and row of every sentence of the portion under way."""
        return [(self.batch, row) for row in (range(count) if self.rows is None else self.rows)]


def listen(
    model: PreTrainedModel, adapter: AttentionAdapter, sides: Sides, states: dict[str, Tensor], last: list[Tensor]
) -> list:
    """Hooks that begin graphs at the first layers, and note what enters the language modelling head; see `see`."""

    def begin(name: str):
        def hook(layer, inputs, named):
            if inputs:
                states[name] = leaf(inputs[0])
                return (states[name], *inputs[1:]), named
            states[name] = leaf(named["hidden_states"])
            return inputs, {**named, "hidden_states": states[name]}

        return hook

    layers = {name: first_layer(model, adapter, role) for name, role in sides.roles.items()}
    handles = [layer.register_forward_pre_hook(begin(name), with_kwargs=True) for name, layer in layers.items()]
    head = model.get_output_embeddings()
    if head is not None:
        handles.append(head.register_forward_pre_hook(lambda module, inputs: last.append(inputs[0])))
    return handles


def first_layer(model: PreTrainedModel, adapter: AttentionAdapter, role: str) -> nn.Module:
    """The first layer of the stack whose self-attention has a role."""
    first = min((site for site in adapter.sites(model) if site.role == role), key=lambda site: site.layer)
    match = re.match(r".*?\.\d+(?=\.)", first.path)  # up to the number of the layer
    if match is None:
        raise UnsupportedModelError(f"{first.path} has no number of a layer in it: the layer cannot be found")
    return model.base_model.get_submodule(match[0])
