"""Whether a model looks at the source, or the prompt, or at what it has said: contributions to each generated token."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from collab_heads.analysis.measures.queries import check_exclude, end_tokens
from collab_heads.analysis.relevance.backward import explain_batches, leaf
from collab_heads.analysis.relevance.sides import SourceAndTarget, sides_of
from collab_heads.attention_adapter import AttentionAdapter
from collab_heads.errors import CalibrationError, NonFiniteError, UnsupportedModelError
from collab_heads.model.offloading import opening_model
from collab_heads.model.refusals import check_wrapper
from collab_heads.registry import get_adapter
from collab_heads.text import text_table


@dataclass(frozen=True, eq=False)
class TokenContributions:
    """What `token_contributions` measured.

    Attributes:
        source: [P], the mean share of the source at every position, float64 on the CPU; the rest is the target prefix.
            Of a decoder alone, it is that of the prompt; the rest is its continuation.
        counts: [P], how many sentences have such a position.
        excluded: ids of the tokens that did not count as positions.
        sentences: the shares of every sentence, position by position, if they were to be kept.
        names: what the share is of, and the rest: "source" and "target prefix", or "prompt" and "continuation".
    """

    source: Tensor
    counts: Tensor
    excluded: tuple[int, ...]
    sentences: tuple[tuple[float, ...], ...] = field(default=())
    names: tuple[str, str] = SourceAndTarget.names

    @property
    def mean(self) -> float:
        """The share of the source, of all generated tokens."""
        return float((self.source * self.counts).sum() / self.counts.sum())

    def to_dict(self) -> dict:
        """All numbers, ready for JSON."""
        return {
            "mean": self.mean,
            "source": self.source.tolist(),
            "counts": self.counts.tolist(),
            "excluded": list(self.excluded),
            "sentences": [list(each) for each in self.sentences],
            "names": list(self.names),
        }

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, TokenContributions) else NotImplemented

    def __str__(self) -> str:
        numbers = enumerate(zip(self.source.tolist(), self.counts.tolist(), strict=True))
        rows = [[str(position), str(count), f"{share:.3f}", f"{1 - share:.3f}"] for position, (share, count) in numbers]
        last = f"the {self.names[0]} gives {self.mean:.3f} of all {int(self.counts.sum())} tokens"
        return text_table(["position", "sentences", *self.names], rows, last)


class MeanByPosition:
    """Sums over sentences of unequal length.

    Attributes:
        total: [P], of as many positions as the longest sentence had.
        counts: [P], sentences that have such a position.
        rows: the sentences, if they are kept.
    """

    def __init__(self, keep: bool):
        self.keep = keep
        self.rows: list[tuple[float, ...]] = []
        self.total, self.counts = torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.long)

    def add(self, row: Tensor) -> None:
        """Add a sentence: [p]."""
        if missing := max(0, len(row) - len(self.counts)):
            self.total = torch.cat([self.total, self.total.new_zeros(missing)])
            self.counts = torch.cat([self.counts, self.counts.new_zeros(missing)])
        self.total[: len(row)] += row
        self.counts[: len(row)] += 1
        if self.keep:
            self.rows.append(tuple(row.tolist()))


@opening_model
def token_contributions(
    model: PreTrainedModel,
    batches: Iterable[Mapping],
    adapter: type[AttentionAdapter] | AttentionAdapter | None = None,
    *,
    exclude: Iterable[int] | None = None,
    keep_sentences: bool = False,
) -> TokenContributions:
    """Measure how much of each generated token comes from the source, or the prompt, and how much from what was said.

    The top-1 logit at a position is explained by conservative relevance propagation to what enters the first layers:
    token and position embeddings. The share of the source is the sum over its tokens of |relevance|, divided by that
    over source tokens and the target tokens up to this position, the start token included. A backward pass per
    position: give some hundred sentences. Memory does not grow with their number.

    The target prefix is that of the labels or decoder inputs. For a model's own translation, give it as decoder inputs:

        ids = model.generate(**batch)
        token_contributions(model, [{**batch, "decoder_input_ids": ids[:, :-1]}])

    A decoder alone has a prompt and its continuation instead. They are told apart by the labels: the tokens of the
    continuation, -100 where the prompt is, and padding; a text of several turns may alternate. The first token of a
    continuation has nothing but the prompt, a share of 1. For what a model itself makes of a prompt:

        ids = model.generate(**prompt)  # without padding, and with one prompt or prompts padded on the left
        labels = ids.clone()
        labels[:, : prompt["input_ids"].shape[1]] = -100
        token_contributions(model, [{"input_ids": ids, "labels": labels}])

    Args:
        model: a supported encoder-decoder, or a decoder without cross-attention; it runs in evaluation mode and is left
            as it was.
        batches: input dicts as the model takes them, with labels or decoder inputs; any iterable, read once.
        adapter: the family's adapter, as class or instance; None looks it up by model type.
        exclude: ids of decoder inputs after which no token is predicted, instead of `eos_token_id` and `sep_token_id`
            of the config and the generation config. For a decoder alone the labels say it all.
        keep_sentences: also return the shares of every sentence.

    Returns:
        Mean shares by position, counted from 0, the first generated token; `print` them.

    Raises:
        ArgumentError: if `exclude` holds anything but token ids, or for a model without logits or last hidden states.
        CalibrationError: if there are no batches, the model cannot take one (its index is named), a mask does not fit,
            no position counted, a stack was not run, or labels of a decoder alone do not mark its prompt.
        NonFiniteError: if a share is NaN or inf.
        UnsupportedModelError: if there is no adapter for the model, it is wrapped, or generates nothing.

    Source: Voita, Sennrich, Titov 2021, arXiv:2010.10907, which propagates positive contributions only (the alpha-beta
        rule); here the rules are the conservative ones, of either sign, and absolute values are compared.
    """
    check_wrapper(model)
    adapter = get_adapter(model, adapter)
    excluded = end_tokens(model) if exclude is None else check_exclude(exclude)
    sides = sides_of(model, adapter)
    if sides is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} is no encoder-decoder, and no decoder without cross-attention: only those have a "
            "source and a target, or a prompt and its continuation, to compare"
        )
    layers = {name: first_layer(model, adapter, role) for name, role in sides.roles.items()}
    states: dict[str, Tensor] = {}  # of the batch under way

    def listen(name: str):
        def hook(layer, inputs, named):
            if inputs:
                states[name] = leaf(inputs[0])
                return (states[name], *inputs[1:]), named
            states[name] = leaf(named["hidden_states"])
            return inputs, {**named, "hidden_states": states[name]}

        return hook

    def see(inputs: Mapping, outputs: ModelOutput) -> None:
        if states.keys() != layers.keys():
            missing = next(name for name in layers if name not in states)
            raise CalibrationError(f"the stack of the {missing} was not run: give its tokens, not its outputs")
        values, counted = sides.explained(model, outputs, inputs, excluded)
        first = sides.first_side(inputs)
        parts = [(states[name], first[name].to(states[name].device)) for name in layers]
        for row, mask in zip(first_shares(values, counted, parts), counted.cpu(), strict=True):
            mean.add(row[mask])  # the n-th token that counts is at position n
        states.clear()

    mean = MeanByPosition(keep_sentences)
    handles = [layer.register_forward_pre_hook(listen(name), with_kwargs=True) for name, layer in layers.items()]
    try:
        explain_batches(model, adapter, batches, see)
    finally:
        for handle in handles:
            handle.remove()
    if not len(mean.counts):
        raise CalibrationError(
            f"no position counted: every one was padding or one of the excluded ids {list(excluded)}"
        )
    if not torch.isfinite(mean.total).all():
        raise NonFiniteError(f"a contribution to what {type(model).__name__} says is NaN or inf; look at its weights")
    return TokenContributions(mean.total / mean.counts, mean.counts, excluded, tuple(mean.rows), sides.names)


def first_shares(values: Tensor, counted: Tensor, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The share of the first side at every position, one backward pass per position.

    Args:
        values: [B, T], what is explained.
        counted: [B, T] bool; elsewhere the share is 0.
        parts: what enters each stack, [B, S, D], and which of it is of the first side: [B, S] bool, or one for all.

    Returns:
        [B, T], float64 on the CPU.
    """
    shares = torch.zeros(values.shape, dtype=torch.float64)
    states = [state for state, _ in parts]
    for position in counted.any(0).nonzero().flatten().tolist():
        # a decoder without heads on the source does not use it
        gradients = torch.autograd.grad(
            values[:, position].sum(), states, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        first = whole = torch.zeros(len(values), dtype=torch.float64)
        for (state, is_first), gradient in zip(parts, gradients, strict=True):
            sizes = (state.detach() * gradient).sum(-1).abs()  # (B, S)
            first = first + (sizes * is_first).cpu().double().sum(-1)
            whole = whole + sizes.cpu().double().sum(-1)
        shares[:, position] = first / whole
    return shares


def first_layer(model: PreTrainedModel, adapter: AttentionAdapter, role: str) -> nn.Module:
    """The first layer of the stack whose self-attention has a role."""
    first = min((site for site in adapter.sites(model) if site.role == role), key=lambda site: site.layer)
    match = re.match(r".*?\.\d+(?=\.)", first.path)  # up to the number of the layer
    if match is None:
        raise UnsupportedModelError(f"{first.path} has no number of a layer in it: the layer cannot be found")
    return model.base_model.get_submodule(match[0])
