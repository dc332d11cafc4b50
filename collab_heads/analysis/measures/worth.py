"""Measure what heads give to the output of their layer and of the model, without labels and gradients."""

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.analysis.measures.flow import Flow
from collab_heads.analysis.measures.passes import Observer, excluded_tokens, observe
from collab_heads.analysis.measures.results import cell, spread
from collab_heads.analysis.measures.rollout import Following, Rollout
from collab_heads.analysis.measures.statistics import RunningMean
from collab_heads.analysis.measures.vectors import OF_STREAM, Vectors
from collab_heads.base.arguments import checking_arguments
from collab_heads.base.checks import check_choice, check_seed
from collab_heads.base.extras import check_extra
from collab_heads.base.progress import one_bar
from collab_heads.base.report import Cell, Report
from collab_heads.contract.registry import get_adapter
from collab_heads.errors import ArgumentError, CalibrationError, NonFiniteError
from collab_heads.model.open_layers import OpenLayers
from collab_heads.model.refusals import check_wrapper
from collab_heads.running.batches import each_batch
from collab_heads.running.residual_readers import find_readers
from collab_heads.sites.site import AttentionSite

WorthMeasure = Literal["value_norm", "context_norm", "value_zeroing", "contribution", "rollout", "flow"]
WORTH: tuple[WorthMeasure, ...] = get_args(WorthMeasure)
ON_REQUEST = ("flow",)  # which takes tens of times as long as the others
OF_REPORT: tuple[WorthMeasure, ...] = ("value_norm", "value_zeroing", "contribution")  # what `analyze_heads` shows
QUICK = tuple(name for name in WORTH if name not in ON_REQUEST)


@dataclass(frozen=True, eq=False)
class HeadWorth(Report):
    """The result of `head_worth`; tensors are float64 on the CPU.

    Attributes:
        sites: the sites that have heads, in model order.
        excluded: ids of the tokens that did not count as queries.
        values: measure -> path -> [H]. Measures of the stream are missing for sites that run more than once in a pass
            (ALBERT).
    """

    sites: tuple[AttentionSite, ...]
    excluded: tuple[int, ...]
    values: Mapping[str, Mapping[str, Tensor]]

    def columns(self) -> dict[str, Cell]:
        columns: dict[str, Cell] = {"site": "{.path}", "role": "{.role}", "heads": "{.heads_in_words}"}
        for name, values in self.values.items():
            columns[name.replace("_", " ")] = partial(cell, spread, values)
        return columns

    def closing(self) -> str:
        return "means over query tokens, and the range over heads"


@checking_arguments
@one_bar("head_worth", (("finding readers", 0.1), ("measuring vectors", 1)))
def head_worth(
    model: PreTrainedModel,
    batches: Iterable[Mapping],
    *,
    measures: WorthMeasure | Iterable[WorthMeasure] = QUICK,
    exclude: Iterable[int] | None = None,
    seed: int = 0,
) -> HeadWorth:
    """Measure what every head gives to its layer and to the output, in one pass without labels and gradients.

    Values are means over the query tokens that count. A page of the documentation ("What predicts the worth of a
    head?") compares the measures with what is lost without each head.

    Examples:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4))
        >>> batches = [{"input_ids": torch.arange(200).view(8, 25)} for _ in range(4)]  # (batch, tokens) each
        >>> worth = head_worth(model, batches, exclude=[])
        >>> worth.values["contribution"]["encoder.layer.0.attention.self"].shape  # (H,)
        torch.Size([4])

    Args:
        model: a supported transformers model, original or changed; it runs in evaluation mode without gradients and is
            left as it was.
        batches: input dicts as the model takes them; any iterable, read once. Encoder-decoders need labels or decoder
            inputs.
        measures: "value_norm": the norms of the weighted values that a head adds up, projected by W_O
            (Kobayashi et al. 2020). "context_norm": the same without the token itself and the first token.
            "value_zeroing": how far the residual stream turns, 1 - cosine, if the values of the head are zeroed
            (after Mohebbi et al. 2023). "contribution": the head's share in the residual stream by distances in L1
            (ALTI, Ferrando et al. 2022). "rollout": how far attention rollout moves if the map of the head is left out
            of its layer's mean (after Abnar and Zuidema 2020). "flow": the same of attention flow, on request only: it
            takes tens of times as long as a pass and needs scipy.
        exclude: ids of tokens that do not count as queries, as `head_statistics` takes them.
        seed: of the draw of one output token per sentence, from which the flow is measured.

    Returns:
        The worth of every head by each measure; `print` it.

    Raises:
        ArgumentError: on an unknown measure, or if `exclude` holds anything but token ids.
        CalibrationError: if there are no batches, the model cannot take one (the message holds its index), or no token
            counted at a site.
        MissingPackageError: on "flow" without scipy.
        NonFiniteError: if a value is NaN or inf; the message names the first such site.
        UnsupportedModelError: if there is no adapter for the model, it is wrapped, or it gives no attention weights.

    Source: Kobayashi et al. 2020, arXiv:2004.10102; Mohebbi et al. 2023, arXiv:2301.12971; Ferrando et al. 2022,
        arXiv:2203.04212; Abnar and Zuidema 2020, arXiv:2005.00928.
    """
    check_wrapper(model)
    names = check_worth(measures)
    check_seed(seed)
    if "flow" in names:
        check_extra("train", "attention flows", ["scipy"])
    return worth_of(model, batches, names, exclude=exclude, seed=seed)


def worth_of(
    model: PreTrainedModel,
    batches: Iterable[Mapping],
    names: Sequence[str],
    *,
    exclude: Iterable[int] | None = None,
    seed: int = 0,
) -> HeadWorth:
    """Measure what every head gives, as `head_worth` does, by measures that were checked."""
    layers, excluded = OpenLayers.of(model, get_adapter(model)), excluded_tokens(model, exclude)
    sites = layers.with_heads
    if not sites:
        return HeadWorth((), excluded, {name: {} for name in names})
    again = Peeked(batches)
    readers = find_readers(model, sites, again.first) if set(names) & OF_STREAM.keys() else []
    vectors = Vectors(names, sites, readers)
    followers: dict[str, Following] = {"rollout": Rollout(model), "flow": Flow(model, seed)}
    followers = {name: each for name, each in followers.items() if name in names}
    observers: list[Observer] = [vectors, *followers.values()]
    with ExitStack() as stack:
        stack.enter_context(vectors.listening(model))
        for follower in followers.values():
            stack.callback(model.register_forward_hook(follower.finish).remove)
        observe(model, again, observers, exclude=excluded, what="measuring vectors")
    means = vectors.results() | {name: follower.means for name, follower in followers.items()}
    read = {reader.site.path for reader in readers}
    values = {
        name: {
            site.path: checked_mean(means[name].get(site.path), name, site.path)
            for site in sites
            if name not in OF_STREAM or site.path in read
        }
        for name in names
    }
    return HeadWorth(tuple(site.site for site in sites), excluded, values)


def check_worth(measures: str | Iterable[str]) -> tuple[str, ...]:
    """Return the measures in the order of `WORTH`; raise ArgumentError if there are none or one is unknown."""
    names = [measures] if isinstance(measures, str) else list(measures)
    for name in names:
        check_choice("measure", name, WORTH)
    if not names:
        raise ArgumentError(f"measures is empty: name some of {', '.join(WORTH)}")
    return tuple(name for name in WORTH if name in names)


def checked_mean(mean: RunningMean | None, measure: str, path: str) -> Tensor:
    if mean is None or not mean.count:
        raise CalibrationError(f"{path} saw no query token that counts: every one was padding or an excluded id")
    if not torch.isfinite(mean.total).all():
        raise NonFiniteError(f"{path}: the {measure} of its heads is NaN or inf; look at its weights and inputs")
    return mean.mean()


class Peeked(Iterable[Mapping]):
    """Batches of which the first is looked at before they are read, once.

    Args:
        batches: any iterable; `each_batch` checks them.

    Attributes:
        first: the first batch.
    """

    def __init__(self, batches: Iterable[Mapping]):
        self.length = operator.length_hint(batches) if isinstance(batches, Iterable) else 0
        self.rest = each_batch(batches)
        self.first = next(self.rest)

    def __length_hint__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Mapping]:
        first, self.first = self.first, {}
        yield first
        del first
        yield from self.rest
