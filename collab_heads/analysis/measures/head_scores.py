"""A number per head: what heads are ranked by, and what is watched of them in a training; several in one pass."""

from collections.abc import Iterable, Mapping

from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.analysis.measures.map_scores import OF_MAPS, MapScores
from collab_heads.analysis.measures.passes import Observer, excluded_tokens, observe
from collab_heads.analysis.measures.results import Measure, mean_distance
from collab_heads.analysis.measures.statistics import Statistics
from collab_heads.attention_adapter import AttentionAdapter
from collab_heads.checks import check_choice
from collab_heads.model.refusals import check_wrapper
from collab_heads.registry import get_adapter
from collab_heads.words import METRIC_WORDS, Metric

OF_TOKENS: dict[str, Measure] = {"confidence": "confidence", "output_distance": "l2"}  # -> of `head_statistics`
SAME: dict[str, str] = {"l2": "output_distance", "pairwise": "map_distance"}  # its first name here; the source's


def head_scores(
    model: PreTrainedModel,
    batches: Iterable[Mapping],
    metrics: Iterable[Metric],
    adapter: type[AttentionAdapter] | AttentionAdapter | None = None,
    *,
    exclude: Iterable[int] | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Score every head by some metrics, in one pass.

    Args:
        model: a supported transformers model; it runs in evaluation mode without gradients and is left as it was.
        batches: input dicts as the model takes them, read once.
        metrics: "confidence": the mean over query tokens t of max_s A[t, s], the largest attention weight.
            "output_distance" (or "l2"): the mean over query tokens, and the other heads of the site, of ‖z_h - z_j‖,
            z the outputs. Means over sentences, see `map_scores`: "map_distance" (or "pairwise"), ‖A_h - A_j‖ of whole
            attention maps; "base", max_ts A[t, s]; "wasserstein", of the weights of a query from equal ones.
        adapter: the family's adapter, as class or instance; None looks it up by model type.
        exclude: ids of tokens that do not count, as `head_statistics` takes them; maps are measured whole.

    Returns:
        metric -> path -> [H], float64 on the CPU, of every site that has heads.

    Raises:
        ArgumentError: on an unknown metric.
        CollabHeadsError: whatever `head_statistics` and `map_scores` refuse.

    Source: Azov and Landau 2020 (MHR-NLP-Transformers); confidence: Voita et al. 2019, arXiv:1905.09418.
    """
    measured = {metric: SAME.get(metric, metric) for metric in metrics}
    for metric in measured:
        check_choice("metric", metric, METRIC_WORDS)
    check_wrapper(model)
    adapter = get_adapter(model, adapter)
    of_tokens = [OF_TOKENS[name] for name in measured.values() if name in OF_TOKENS]
    statistics = Statistics(of_tokens) if of_tokens else None
    maps = {name: MapScores(name) for name in measured.values() if name in OF_MAPS}
    excluded = () if statistics is None else excluded_tokens(model, exclude)
    observers: list[Observer] = [*maps.values(), *([] if statistics is None else [statistics])]
    observe(model, batches, observers, adapter, exclude=excluded)
    found = {name: scores.results() for name, scores in maps.items()}
    if statistics is not None:
        results = statistics.results(model, adapter, excluded)
        found["confidence"] = dict(results.confidence)
        found["output_distance"] = {path: mean_distance(each) for path, each in results.l2.items()}
    return {metric: found[name] for metric, name in measured.items()}
