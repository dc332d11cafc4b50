"""Statistics of heads over a data set: confidence, entropy, distance, attention sinks and similarity."""

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
    """Return the weights of the later query tokens on the first token of the sequence: [N, H].

    Heads with nothing to look for attend to it: it is an attention sink.

    Source: Xiao, Tian, Chen, Han, Lewis 2023, arXiv:2309.17453, who introduced the name.
    """
    first, later = first_and_later(site, attention, batch)
    index = first[:, None, None, None].expand(*attention.weights.shape[:3], 1)
    weights = attention.weights.gather(-1, index).squeeze(-1)  # (B, H, T)
    return batch.counted(site, weights.mT)[batch.counted(site, later)]


def first_and_later(site: AttentionSite, attention: Attention, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return where the sequences of a batch begin, and which of their tokens come later.

    Returns:
        The index of the first token that is not padding, [B], and whether a token comes after it, [B, T] bool.
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
    return batch.counted(site, attention.largest[0].mT)


def entropy(site: AttentionSite, attention: Attention, batch: Batch) -> Tensor:
    return batch.counted(site, torch.special.entr(attention.weights).sum(-1).mT)


def attention_distance(site: AttentionSite, attention: Attention, batch: Batch) -> Tensor:
    """Return the distance in tokens from every query token to its keys, averaged by its weights: [N, H]."""
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
    """Return the cosine between the outputs of any two heads, 0 if one is zero: [N, H, d_v] -> [N, H, H]."""
    directions = F.normalize(outputs, dim=-1)
    return directions @ directions.mT


def l2(outputs: Tensor) -> Tensor:
    """Return the Euclidean distance between the outputs of any two heads: [N, H, d_v] -> [N, H, H]."""
    return torch.cdist(outputs, outputs, compute_mode="donot_use_mm_for_euclid_dist")


# numbers of the query tokens that count, [N, H]; of `first_token`, only of those after the first
OF_WEIGHTS = {
    "confidence": confidence,
    "entropy": entropy,
    "attention_distance": attention_distance,
    "first_token": first_token,
}
OF_OUTPUTS = {"cosine": cosine, "l2": l2}


class RunningMean:
    """A running mean of values, such as those of query tokens, in float64.

    Attributes:
        count: number of values.
        total: the sum of the values.
    """

    def __init__(self):
        self.count, self.total = 0, torch.zeros((), dtype=torch.float64)

    def add(self, values: Tensor) -> None:
        self.count += len(values)
        self.total = self.total.to(values.device) + values.sum(0)

    def mean(self) -> Tensor:
        return (self.total / self.count).cpu()


class Statistics(Observer):
    """An observer that averages measures over query tokens."""

    def __init__(self, measures: Measure | Iterable[Measure] = MEASURES):
        self.measures = check_measures(measures)
        self.of_weights = [name for name in self.measures if name in OF_WEIGHTS]
        self.of_outputs = [name for name in self.measures if name in OF_OUTPUTS]
        self.weights, self.outputs = bool(self.of_weights), bool(self.of_outputs)

    def begin(self, sites: Sequence[AttentionSite]) -> None:
        self.sites = tuple(sites)
        self.means = {(site.path, name): RunningMean() for site in sites for name in self.measures if has(site, name)}

    def see_weights(self, site: AttentionSite, attention: Attention, batch: Batch) -> None:
        for measure in self.of_weights:
            if (mean := self.means.get((site.path, measure))) is not None:
                mean.add(float64(OF_WEIGHTS[measure](site, attention, batch)))

    def see_outputs(self, site: AttentionSite, outputs: Tensor, batch: Batch) -> None:
        counted = float64(batch.counted(site, outputs))  # (N, H, d_v)
        for measure in self.of_outputs:
            self.means[site.path, measure].add(OF_OUTPUTS[measure](counted))

    def results(self, model: PreTrainedModel, adapter: AttentionAdapter, excluded: tuple[int, ...]) -> HeadStatistics:
        """Return the statistics."""
        sites = self.sites
        tokens = {site.path: 0 for site in sites}
        for (path, _), mean in self.means.items():
            tokens[path] = max(tokens[path], mean.count)
        check_means(self.means, tokens, excluded)
        values: dict[str, dict[str, Tensor]] = {name: {} for name in self.measures}
        for (path, name), mean in self.means.items():
            if mean.count:  # `first_token` has none if every sequence is a single token
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

    Every query token counts the same, in any batch, unless it is padding or ends a sentence. Decoders are measured as
    in training: on their inputs or, shifted right, their labels. A module that serves several layers (ALBERT) is
    measured over all of them together. Measures of attention weights need the eager attention backend, see `recording`.

    Examples:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4))
        >>> batches = [{"input_ids": torch.arange(200).view(8, 25)} for _ in range(4)]  # (batch, tokens) each
        >>> statistics = head_statistics(model, batches, exclude=[])
        >>> statistics.confidence["encoder.layer.0.attention.self"].shape  # (H,): mean largest attention weight
        torch.Size([4])

    Args:
        model: a supported transformers model; it runs in evaluation mode without gradients and is left as it was.
        batches: input dicts as the model takes them; any iterable, read once. Encoder-decoders need labels or decoder
            inputs.
        measures: "confidence": the mean of the largest attention weight of a query token. "entropy": the mean entropy
            of its weights, in nats. "attention_distance": the mean distance in tokens to what it attends to; with two
            sentences, their positions are compared. "first_token": the mean weight on the first token of the sequence,
            over the tokens after it, in self-attention; a head with much of it is a sink, which looks nowhere.
            "cosine", "l2": the mean cosine and Euclidean distance between the outputs of two heads of a site, before
            gates and alphas.
        exclude: ids of tokens that do not count as queries, instead of `eos_token_id` and `sep_token_id` of the config
            and the generation config. BERT's config names none: pass `[tokenizer.sep_token_id]`. The first token of a
            decoder always counts.

    Returns:
        The statistics of every site that has heads; `print` it.

    Raises:
        ArgumentError: on an unknown measure, or if `exclude` holds anything but token ids.
        CalibrationError: if there are no batches, the model cannot take one (the message holds its index), a mask does
            not fit, or no token counted at a site.
        NonFiniteError: if a statistic is NaN or inf; the message names the first such site.
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
    return measure != "first_token" or site.role != "dec-enc"


def check_means(
    means: Mapping[tuple[str, str], RunningMean], tokens: Mapping[str, int], excluded: tuple[int, ...]
) -> None:
    for (path, measure), mean in means.items():
        if not tokens[path]:
            raise CalibrationError(
                f"{path} saw no query token that counts: every one was padding or one of the excluded ids "
                f"{list(excluded)}, or no batch reached the site"
            )
        if not torch.isfinite(mean.total).all():
            raise NonFiniteError(f"{path}: the {measure} of its heads is NaN or inf; look at its weights and inputs")


def check_measures(measures: str | Iterable[str]) -> tuple[str, ...]:
    """Return the measures in the order of `MEASURES`; raise ArgumentError if there are none or one is unknown."""
    names = [measures] if isinstance(measures, str) else list(measures)
    for name in names:
        check_choice("measure", name, MEASURES)
    if not names:
        raise ArgumentError(f"measures is empty: name some of {', '.join(MEASURES)}")
    return tuple(name for name in MEASURES if name in names)
