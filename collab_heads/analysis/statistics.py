"""Measure heads on data: how sure they are, how alike their outputs are."""

from collections.abc import Iterable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from collab_heads.analysis.queries import check_exclude, end_tokens, query_masks
from collab_heads.analysis.recording import recording
from collab_heads.analysis.results import MEASURES, HeadStatistics
from collab_heads.collaborative.calibrate import run_batches
from collab_heads.collaborative.decompose import float64
from collab_heads.collaborative.masks import MASKS
from collab_heads.errors import ArgumentError, CalibrationError, NonFiniteError
from collab_heads.heads.alpha import mixed_sites
from collab_heads.refusals import check_wrapper
from collab_heads.registry import AttentionAdapter, get_adapter
from collab_heads.sites import AttentionSite, check_choice

logger = logging.get_logger("transformers.collab_heads")


def cosine(outputs: Tensor) -> Tensor:
    """The cosine between the outputs of any two heads; 0 where one of them is zero: [N, H, d_v] -> [N, H, H]."""
    directions = F.normalize(outputs, dim=-1)
    return directions @ directions.mT


def l2(outputs: Tensor) -> Tensor:
    """The Euclidean distance between the outputs of any two heads: [N, H, d_v] -> [N, H, H]."""
    return torch.cdist(outputs, outputs, compute_mode="donot_use_mm_for_euclid_dist")


OF_OUTPUTS = {"cosine": cosine, "l2": l2}


class RunningMean:
    """Of values per query token, in float64.

    Attributes:
        count: tokens seen.
        total: the sum of their values.
    """

    def __init__(self):
        self.count, self.total = 0, 0.0

    def add(self, values: Tensor) -> None:
        """Add the values of some tokens: [N, ...]."""
        self.count += len(values)
        self.total = self.total + values.sum(0)

    def mean(self) -> Tensor:
        """[...], on the CPU."""
        return (self.total / self.count).cpu()


def head_statistics(
    model: PreTrainedModel,
    batches: Iterable[Mapping],
    adapter: type[AttentionAdapter] | AttentionAdapter | None = None,
    *,
    measures: Iterable[str] = MEASURES,
    exclude: Iterable[int] | None = None,
) -> HeadStatistics:
    """Measure every head over a data set, in one pass; memory does not grow with the number of batches.

    Every query token counts alike, in whatever batch it is, unless it is padding or ends a sentence. Decoders are
    measured as they train: on their inputs or, shifted right, their labels. A module that serves several layers
    (ALBERT) is measured over all of them together. Confidence needs the eager attention backend, see `recording`.

    Args:
        model: a supported transformers model; it runs in evaluation mode without gradients and is left as it was.
        batches: input dicts as the model takes them; any iterable, read once. Encoder-decoders need labels or decoder
            inputs.
        adapter: the family's adapter, as class or instance; None looks it up by model type.
        measures: "confidence": the mean of the largest attention weight of a query token. "cosine", "l2": the mean
            cosine and Euclidean distance between the outputs of two heads of a site, before gates and alphas.
        exclude: ids of tokens that do not count as queries, instead of `eos_token_id` and `sep_token_id` of the config
            and the generation config. BERT's config names none: give `[tokenizer.sep_token_id]`. The first token of a
            decoder always counts.

    Returns:
        The statistics of every site that has heads; `print` it.

    Raises:
        ArgumentError: on an unknown measure, or ids that are none.
        CalibrationError: if there are no batches, the model cannot take one (its index is named), a mask does not fit,
            or no token counted at a site.
        NonFiniteError: if a statistic is NaN or inf; the first such site is named.
        UnsupportedModelError: if there is no adapter for the model, it is wrapped, or it gives no attention weights.

    Source: confidence: Voita et al. 2019, arXiv:1905.09418, section 4; cosine and distance: Azov and Landau 2020
        (MHR-NLP-Transformers).
    """
    check_wrapper(model)
    adapter, measures = get_adapter(model, adapter), check_measures(measures)
    excluded = end_tokens(model) if exclude is None else check_exclude(exclude)
    if not excluded and exclude is None and model.main_input_name == "input_ids":
        logger.warning_once(
            f"the config of this {type(model).__name__} names no end-of-sentence token, so ends of sentences count in "
            "head statistics: pass exclude=[tokenizer.sep_token_id], or exclude=[] if that is right"
        )
    sites = adapter.sites_with_heads(model)
    means = {(site.path, measure): RunningMean() for site in sites for measure in measures}
    masks: dict[str, Tensor | None] = {}

    def see_weights(site: AttentionSite, weights: Tensor) -> None:
        largest = weights.amax(-1).mT  # (B, H, T, S) -> (B, T, H): over the keys, for every query token
        means[site.path, "confidence"].add(float64(counted_tokens(site, largest, masks)))

    def see_outputs(site: AttentionSite, outputs: Tensor) -> None:
        counted = float64(counted_tokens(site, outputs, masks))  # (N, H, d_v)
        for measure in of_outputs:
            means[site.path, measure].add(OF_OUTPUTS[measure](counted))

    of_outputs = [measure for measure in measures if measure in OF_OUTPUTS]
    if sites:
        with recording(
            model,
            adapter,
            weights=see_weights if "confidence" in measures else None,
            outputs=see_outputs if of_outputs else None,
        ):
            run_batches(model, batches, masks, "measuring heads", partial(query_masks, exclude=excluded))
    check_means(means, excluded)
    found = {measure: {site.path: means[site.path, measure].mean() for site in sites} for measure in measures}
    alphas = {site.path: mixing.alpha.detach().to("cpu", torch.float64) for site, mixing in mixed_sites(model, adapter)}
    tokens = {site.path: means[site.path, measures[0]].count for site in sites}
    return HeadStatistics(tuple(sites), measures, excluded, tokens, alphas=alphas, **found)


def counted_tokens(site: AttentionSite, tensor: Tensor, masks: Mapping[str, Tensor | None]) -> Tensor:
    """What a site computes for the query tokens that count: [B, T, ...] -> [N, ...]."""
    side = MASKS[site.role][0]
    mask = masks.get(side)
    if mask is None:
        return tensor.flatten(0, 1)
    if mask.shape != tensor.shape[:2]:
        raise CalibrationError(
            f"{site.path}: the {side} mask {tuple(mask.shape)} does not fit its query tokens {tuple(tensor.shape[:2])};"
            " give attention masks of shape (batch, tokens)"
        )
    return tensor[mask.to(tensor.device)]


def check_means(means: Mapping[tuple[str, str], RunningMean], excluded: tuple[int, ...]) -> None:
    """Raise CalibrationError for a site that counted no token, NonFiniteError for one with NaN or inf."""
    for (path, measure), mean in means.items():
        if not mean.count:
            raise CalibrationError(
                f"{path} saw no query token that counts: every one was padding or one of the excluded ids "
                f"{list(excluded)}, or no batch reached the site"
            )
        if not torch.isfinite(mean.total).all():
            raise NonFiniteError(f"{path}: the {measure} of its heads is NaN or inf; look at its weights and inputs")


def check_measures(measures: Iterable[str]) -> tuple[str, ...]:
    """The measures in their own order, or an ArgumentError if there are none or one is unknown."""
    names = [measures] if isinstance(measures, str) else list(measures)
    for name in names:
        check_choice("measure", name, MEASURES)
    if not names:
        raise ArgumentError(f"measures is empty: name some of {', '.join(MEASURES)}")
    return tuple(name for name in MEASURES if name in names)
