"""`token_contributions`: how much each token that a model reads contributes to each token that it generates."""

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
from collab_heads.model.refusals import check_wrapper
from collab_heads.running.batches import num_rows
from collab_heads.running.portions import portions


@dataclass(frozen=True)
class Portion:
    """A portion of a batch, with what the model computed from it.

    Attributes:
        model: the model.
        sides: the two sides of its output.
        inputs: the portion of a batch.
        outputs: what the model returned.
        states: name of a stack -> its input, [B, S, D].
        last: the input of the language modelling head, [B, T, D], if known.
    """

    model: PreTrainedModel
    sides: Sides
    inputs: Mapping
    outputs: ModelOutput
    states: Mapping[str, Tensor]
    last: Tensor | None

    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return which tokens of all stacks are of the first side, which are not padding, and ids or -1: [B, C]."""
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
    """Return the contributions of the tokens of every sentence, in the order of the rows."""
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
    logits = getattr(outputs, "logits", None)
    return None if logits is None or logits.ndim != 3 else logits.argmax(-1).cpu()


def known_ids(ids: Tensor) -> tuple[int, ...]:
    return tuple(ids.tolist()) if len(ids) and bool((ids >= 0).all()) else ()


ROW = "row of the batch"  # key of the row numbers, beside the inputs while a batch is cut into portions


@checking_arguments
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
    """Measure how much of each generated token comes from the source or prompt, and how much from the target prefix.

    The top-1 logit at a position is explained by conservative relevance propagation to the inputs of the first layers,
    token and position embeddings. A token's contribution is its |relevance|, divided by that of all source tokens and
    the target tokens up to this position, the start token included. The contribution of the source is the sum over its
    tokens. This takes a backward pass per position: a few hundred sentences will do. Three numbers per generated token
    and one per source token are kept.

    With `prefixes="reference"` the target prefix is that of the labels or decoder inputs. With "own" it is the model's
    own translation, as in use. With "random" it is that of another sentence, which is unrelated to the source: a model
    that then turns away from the source tends to continue any prefix (exposure bias).

    A decoder alone has a prompt and its continuation instead. The labels tell them apart: the tokens of the
    continuation, and -100 for the prompt and for padding; a text of several turns may alternate. The first token of a
    continuation comes from the prompt alone, with a share of 1. The model's own prefixes are its continuations of the
    prompts (the tokens before the first label), at most as long as the given ones.

    Examples:
        >>> import torch
        >>> from transformers import MarianConfig, MarianMTModel
        >>> ids = {"vocab_size": 100, "pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1}
        >>> model = MarianMTModel(MarianConfig(d_model=32, encoder_layers=2, decoder_layers=2, **ids))
        >>> batches = [{"input_ids": torch.arange(2, 22).view(2, 10), "labels": torch.arange(2, 14).view(2, 6)}]
        >>> contributions = token_contributions(model, batches)
        >>> contributions.source.shape  # (target tokens,): the share of the source in each, the mean over sentences
        torch.Size([6])

    Args:
        model: a supported encoder-decoder, or a decoder without cross-attention; it runs in evaluation mode and is left
            as it was.
        batches: input dicts as the model takes them, with labels or decoder inputs; any iterable, read once.
        prefixes: what the decoder reads: "reference", "own" or "random". With "own", batches for an encoder-decoder
            need no labels. With "random", the first batch must hold two sentences or more.
        exclude: ids of decoder inputs after which no token is predicted, instead of `eos_token_id` and `sep_token_id`
            of the config and the generation config. For a decoder alone only the labels count.
        num_beams: number of beams with which a model generates its own prefixes.
        seed: seed of the random prefixes.
        keep_relevance: also keep the relevance of every token to every generated token, of every sentence.

    Returns:
        Shares, entropies and influence of every sentence, and their means by position, counted from 0 for the first
        generated token; `print` them.

    Raises:
        ArgumentError: if an argument has an impossible value, or the model returns neither logits nor last hidden
            states.
        CalibrationError: if there are no batches, the model cannot take one (the message holds its index), a mask does
            not fit, no position counted, a stack was not run, or the labels of a decoder alone do not mark its prompt.
        NonFiniteError: if a share is NaN or inf.
        UnsupportedModelError: if there is no adapter for the model, it is wrapped, or it generates nothing.

    Source: Voita, Sennrich, Titov 2021, arXiv:2010.10907, which propagates positive contributions only (the alpha-beta
        rule); here the rules are the conservative ones, of either sign, and absolute values are compared.
    """
    check_wrapper(model)
    adapter = get_adapter(model)
    excluded = end_tokens(model) if exclude is None else check_exclude(exclude)
    sides = sides_of(model, adapter)
    if sides is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} is not an encoder-decoder, and no decoder without cross-attention: only those "
            "have a source and a target, or a prompt and its continuation, to compare"
        )
    chosen = with_prefixes(model, sides, batches, prefixes, num_beams=num_beams, seed=seed)
    found: dict[tuple[int, int], SentenceContributions] = {}  # batch, row -> what was found
    order = RowOrder(model.config.is_encoder_decoder)
    states: dict[str, Tensor] = {}  # of the current portion: the input of each stack
    last: list[Tensor] = []  # and the input of the language modelling head

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
        explain_batches(model, adapter, chosen, see, "measuring contributions", cut=order.cut)
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
    """The order of sentences while batches are cut into portions of similar length, without padding."""

    def __init__(self, is_encoder_decoder: bool):
        self.is_encoder_decoder = is_encoder_decoder
        self.batch, self.rows = -1, None

    def cut(self, batch: Mapping) -> Iterator[Mapping]:
        """Yield the portions of a batch; one that holds anything but tensors with a row per sentence stays whole."""
        self.batch += 1
        count = num_rows(batch)
        numbered = batch if count is None else {**batch, ROW: torch.arange(count)}
        for portion in portions(numbered, self.is_encoder_decoder):
            rows = portion.get(ROW)
            self.rows = None if rows is None else rows.tolist()
            yield {name: value for name, value in portion.items() if name != ROW}

    def places(self, count: int) -> list[tuple[int, int]]:
        return [(self.batch, row) for row in (range(count) if self.rows is None else self.rows)]


def listen(
    model: PreTrainedModel, adapter: AttentionAdapter, sides: Sides, states: dict[str, Tensor], last: list[Tensor]
) -> list:
    """Register hooks that begin graphs at the first layers and record the input of the language modelling head."""

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
    """Return the first layer of the stack whose self-attention has a role."""
    first = min((site for site in adapter.sites(model) if site.role == role), key=lambda site: site.layer)
    match = re.match(r".*?\.\d+(?=\.)", first.path)  # up to the number of the layer
    if match is None:
        raise UnsupportedModelError(f"{first.path} has no number of a layer in it: the layer cannot be found")
    return model.base_model.get_submodule(match[0])
