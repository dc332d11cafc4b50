"""The first token of a sequence, which heads look at that have nothing to look for: an attention sink."""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.analysis.measures.passes import Attention, Batch, Observer, excluded_tokens, observe
from collab_heads.analysis.measures.results import MEASURES, HeadStatistics, Measure
from collab_heads.base.arguments import checking_arguments
from collab_heads.base.checks import check_choice
from collab_heads.base.numerics import float64
from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.contract.registry import get_adapter
from collab_heads.errors import ArgumentError, CalibrationError, NonFiniteError
from collab_heads.heads.alpha import mixed_sites
from collab_heads.model.refusals import check_wrapper
from collab_heads.sites.site import AttentionSite


def first_token(site: AttentionSite, attention: Attention, batch: Batch) -> Tensor:
    """How much the query tokens after the first look at it: [N, H].

    Source: Xiao, Tian, Chen, Han, Lewis 2023, arXiv:2309.17453, who named it.
    """
    first, later = first_and_later(site, attention, batch)
    index = first[:, None, None, None].expand(*attention.weights.shape[:3], 1)
    weights = attention.weights.gather(-1, index).squeeze(-1)  # (B, H, T)
    return batch.counted(site, weights.mT)[batch.counted(site, later)]


def first_and_later(site: AttentionSite, attention: Attention, batch: Batch) -> tuple[Tensor, Tensor]:
    """Where the sequences of a batch begin, and which of their tokens come later.

    Args:
        site: of self-attention.
        attention: its weights.
        batch: the batch under way.

    Returns:
        The index of the first token that is no padding, [B], and whether a token comes after it, [B, T] bool.
    """
    weights = attention.weights
    size, _, length, _ = weights.shape
    mask = batch.keys(site)
    if mask is None:
        first = torch.zeros(size, dtype=torch.long, device=weights.device)
    else:
        first = mask.to(weights.device).int().argmax(1)
    return first, torch.arange(length, device=weights.device) > first[:, None]


def confidence(site: AttentionSite, attention: Attention, batch: Batch) -> Tensor:
    """The largest weight of every query token: [N, H]."""
    return batch.counted(site, attention.largest[0].mT)


def entropy(site: AttentionSite, attention: Attention, batch: Batch) -> Tensor:
    """The entropy of the weights of every query token, in nats: [N, H]."""
    return batch.counted(site, torch.special.entr(attention.weights).sum(-1).mT)


def attention_distance(site: AttentionSite, attention: Attention, batch: Batch) -> Tensor:
    """How many tokens away a query token looks, on average by its weights: [N, H]."""
    weights = attention.weights
    queries, keys = (
        torch.arange(length, device=weights.device)[None] for length in weights.shape[-2:]
    )  # (1, T), (1, S)
    if (mask := batch.unpadded_queries(site)) is not None:
        queries = mask.cumsum(1) - 1  # padding on the left has no position
    if (mask := batch.keys(site)) is not None:
        keys = mask.cumsum(1) - 1
    apart = (queries[:, :, None] - keys[:, None]).abs()  # (B or 1, T, S)
    return batch.counted(site, (weights * apart.to(weights.dtype)[:, None]).sum(-1).mT)


def cosine(outputs: Tensor) -> Tensor:
    """The cosine between the outputs of any two heads; 0 where one of them is zero: [N, H, d_v] -> [N, H, H]."""
    directions = F.normalize(outputs, dim=-1)
    return directions @ directions.mT


def l2(outputs: Tensor) -> Tensor:
    """The Euclidean distance between the outputs of any two heads: [N, H, d_v] -> [N, H, H]."""
    return torch.cdist(outputs, outputs, compute_mode="donot_use_mm_for_euclid_dist")


# of the query tokens that count, for self-attention those after the first: [N, H]
OF_WEIGHTS = {
    "confidence": confidence,
    "entropy": entropy,
    "attention_distance": attention_distance,
    "first_token": first_token,
}
OF_OUTPUTS = {"cosine": cosine, "l2": l2}


class RunningMean:
    """Of values per query token, in float64.

    Attributes:
        count: tokens seen.
        total: the sum of their values.
    """

    def __init__(self):
        self.count, self.total = 0, torch.zeros((), dtype=torch.float64)

    def add(self, values: Tensor) -> None:
        """Add the values of some tokens: [N, ...]."""
        self.count += len(values)
        self.total = self.total.to(values.device) + values.sum(0)

    def mean(self) -> Tensor:
        """[...], on the CPU."""
        return (self.total / self.count).cpu()


class Statistics(Observer):
    """Means over query tokens of some measures.

    Args:
        measures: their names.

    Raises:
        ArgumentError: on an unknown measure, or none at all.
    """

    def __init__(self, measures: Measure | Iterable[Measure] = MEASURES):
        self.measures = check_measures(measures)
        self.of_weights = [name for name in self.measures if name in OF_WEIGHTS]
        self.of_outputs = [name for name in self.measures if name in OF_OUTPUTS]
        self.weights, self.outputs = bool(self.of_weights), bool(self.of_outputs)

    def begin(self, sites: Sequence[AttentionSite]) -> None:
        """Begin at zero."""
        self.sites = tuple(sites)
        self.means = {(site.path, name): RunningMean() for site in sites for name in self.measures if has(site, name)}

    def see_weights(self, site: AttentionSite, attention: Attention, batch: Batch) -> None:
        """Add a batch."""
        for measure in self.of_weights:
            if (mean := self.means.get((site.path, measure))) is not None:
                mean.add(float64(OF_WEIGHTS[measure](site, attention, batch)))

    def see_outputs(self, site: AttentionSite, outputs: Tensor, batch: Batch) -> None:
        """Add a batch."""
        counted = float64(batch.counted(site, outputs))  # (N, H, d_v)
        for measure in self.of_outputs:
            self.means[site.path, measure].add(OF_OUTPUTS[measure](counted))

    def results(self, model: PreTrainedModel, adapter: AttentionAdapter, excluded: tuple[int, ...]) -> HeadStatistics:
        """What was measured.

        Raises:
            CalibrationError: if no token counted at a site.
            NonFiniteError: if a statistic is NaN or inf; the first such site is named.
        """
        sites = self.sites
        tokens = {site.path: 0 for site in sites}
        for (path, _), mean in self.means.items():
            tokens[path] = max(tokens[path], mean.count)
        check_means(self.means, tokens, excluded)
        values: dict[str, dict[str, Tensor]] = {name: {} for name in self.measures}
        for (path, name), mean in self.means.items():
            if mean.count:  # a lone token has none before it
                values[name][path] = mean.mean()
        alphas = {site.path: each.alpha.detach().to("cpu", torch.float64) for site, each in mixed_sites(model, adapter)}
        return HeadStatistics(sites, self.measures, excluded, tokens, alphas=alphas, **values)


@checking_arguments
def head_statistics(
    model: PreTrainedModel,
    batches: Iterable[Mapping],
    *,
    measures: Measure | Iterable[Measure] = MEASURES,
    exclude: Iterable[int] | None = None,
) -> HeadStatistics:
    """Measure every head over a data set, in one pass; memory does not grow with the number of batches.

    Every query token counts alike, in whatever batch it is, unless it is padding or ends a sentence. Decoders are
    measured as they train: on their inputs or, shifted right, their labels. A module that serves several layers
    (ALBERT) is measured over all of them together. Measures of attention weights need the eager attention backend, see
    `recording`.

    Args:
        model: a supported transformers model; it runs in evaluation mode without gradients and is left as it was.
        batches: input dicts as the model takes them; any iterable, read once. Encoder-decoders need labels or decoder
            inputs.
        measures: "confidence": the mean of the largest attention weight of a query token. "entropy": of its weights, in
            nats. "attention_distance": how many tokens away it looks, positions in both sentences compared where they
            are two. "first_token": how much it looks at the first token of the sequence, of the tokens after it, in
            self-attention: a head with much of it is a sink, which looks nowhere. "cosine", "l2": the mean cosine and
            Euclidean distance between the outputs of two heads of a site, before gates and alphas.
        exclude: ids of tokens that do not count as queries, instead of `eos_token_id` and `sep_token_id` of the config
            and the generation config. BERT's config names none: give `[tokenizer.sep_token_id]`. The first token of a
            decoder always counts.

    Returns:
        The statistics of every site that has heads; `print` it.

    Raises:
        ArgumentError: on an unknown measure, or if `exclude` holds anything but token ids.
        CalibrationError: if there are no batches, the model cannot take one (its index is named), a mask does not fit,
            or no token counted at a site.
        NonFiniteError: if a statistic is NaN or inf; the first such site is named.
        UnsupportedModelError: if there is no adapter for the model, it is wrapped, or it gives no attention weights.

    Source: confidence: Voita et al. 2019, arXiv:1905.09418, section 4; cosine and distance: Azov and Landau 2020
        (MHR-NLP-Transformers).
    """
    check_wrapper(model)
    adapter, statistics = get_adapter(model), Statistics(measures)
    excluded = excluded_tokens(model, exclude)
    observe(model, batches, [statistics], exclude=excluded)
    return statistics.results(model, adapter, excluded)


def has(site: AttentionSite, measure: str) -> bool:
    """Whether a measure says anything of a site."""
    return measure != "first_token" or site.role != "dec-enc"


def check_means(
    means: Mapping[tuple[str, str], RunningMean], tokens: Mapping[str, int], excluded: tuple[int, ...]
) -> None:
    """Raise CalibrationError for a site that counted no token, NonFiniteError for one with NaN or inf."""
    for (path, measure), mean in means.items():
        if not tokens[path]:
            raise CalibrationError(
                f"{path} saw no query token that counts: every one was padding or one of the excluded ids "
                f"{list(excluded)}, or no batch reached the site"
            )
        if not torch.isfinite(mean.total).all():
            raise NonFiniteError(f"{path}: the {measure} of its heads is NaN or inf; look at its weights and inputs")


def check_measures(measures: str | Iterable[str]) -> tuple[str, ...]:
    """The measures in the order of `MEASURES`; an ArgumentError if there are none or one is unknown."""
    names = [measures] if isinstance(measures, str) else list(measures)
    for name in names:
        check_choice("measure", name, MEASURES)
    if not names:
        raise ArgumentError(f"measures is empty: name some of {', '.join(MEASURES)}")
    return tuple(name for name in MEASURES if name in names)
