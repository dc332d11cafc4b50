"""plan: what every budget would cost in quality, before anything is changed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import torch
from transformers import PreTrainedModel

from collab_heads.arguments import checking_arguments
from collab_heads.attention_adapter import AttentionAdapter
from collab_heads.checks import check_choice
from collab_heads.collaborative.fit import FitOptions
from collab_heads.collaborative.kinds import FITS, check_kind
from collab_heads.compression.choices import PARTS, Part
from collab_heads.compression.compression_plan import CompressionPlan
from collab_heads.compression.evidence import gather
from collab_heads.compression.latency import Latencies
from collab_heads.compression.measures import COUNTED, MEASURES, Measure
from collab_heads.errors import ArgumentError
from collab_heads.model.batches import each_batch
from collab_heads.model.examples import without_unread_labels
from collab_heads.model.offloading import changing_attention
from collab_heads.model.refusals import check_wrapper
from collab_heads.model.translations import with_translations
from collab_heads.registry import get_adapter
from collab_heads.state import QueryKeyKind


@checking_arguments
@torch.inference_mode(False)  # what is seen now is learned from in `compress`
@changing_attention
def plan(
    model: PreTrainedModel,
    batches: Iterable[Mapping],
    *,
    of: Measure = "parameters",
    adapter: type[AttentionAdapter] | AttentionAdapter | None = None,
    sites: str | Iterable[str] | None = None,
    parts: Part | Iterable[Part] = PARTS,
    mixing: QueryKeyKind = "per_head",
    refine_steps: int = 120,
    seed: int = 0,
) -> CompressionPlan:
    """Find out what every budget would cost in quality; the model is not changed.

    Per site it measures how the error of the site rises with fewer heads, narrower queries and keys, and narrower
    values (each fitted in closed form to seven eighths of the examples, and measured on the others), and how much an
    error there moves the model's output. A budget is then spent where it costs least.

    Args:
        model: a supported transformers model, original, or with heads removed, collaborative or narrowed already: what
            is left is compressed further.
        batches: input dicts as the model takes them, without labels (128 to 512 sentences are enough). What a decoder
            reads may be given, as decoder inputs or labels; else the model translates its inputs itself, greedily.
        of: what budgets are of: "parameters" of attention's four projections, "operations" (multiplications in its
            products of matrices on the batches, as torch computes them: with padding, and in a decoder for all target
            tokens at once), "cache" (elements per token; sources and targets count by their lengths in the batches), or
            "time" (seconds on this machine, measured for the first batch as it is).
        adapter: the family's adapter, as class or instance; None looks it up by model type.
        sites: roles or paths of what may change; None for all.
        parts: what may become smaller: some of "heads" (their number), "query_key" and "values" (their widths).
        mixing: the kind of narrower query/key projections, see `swap_to_collaborative`. "shared" makes the most of
            parameters and cache, and is slow.
        refine_steps: Adam steps that fit each narrower query/key projection in the end, to what its site put out.
        seed: of the order of the inputs in the refinement.

    Raises:
        UnsupportedModelError: if there is no adapter for the model, it is wrapped, its output cannot be compared, or
            `parts` names nothing that can become smaller in its family.
        ArgumentError: on an unknown role, path, measure, part or mixing, a number that cannot be, or a measure of which
            the sites have nothing.
        CalibrationError: if the batches are empty or too few, or the model cannot take them.
        NonFiniteError: if weights, inputs or outputs contain NaN or inf.
        SwapError: if a site has gates or alphas, or cannot be changed safely.
    """
    started = time.perf_counter()
    check_choice("measure", of, MEASURES)
    parts = (parts,) if isinstance(parts, str) else tuple(parts)
    for part in parts:
        check_choice("part", part, PARTS)
    if not parts:
        raise ArgumentError(f"parts is empty: name some of {', '.join(PARTS)}")
    check_kind(mixing)
    check_wrapper(model)
    adapter = get_adapter(model, adapter, "values")
    get_adapter(model, adapter, "prune")
    if set(parts) == {"query_key"}:  # elsewhere they stay where they cannot become narrower
        get_adapter(model, adapter, FITS[mixing].capability)
    options = FitOptions(refine_steps=refine_steps, seed=seed)
    listed = enumerate(without_unread_labels(model, batch) for batch in each_batch(batches))
    batches = [batch for _, batch in with_translations(model, list(listed))]
    evidence = gather(model, adapter, batches, sites, mixing, parts, options)
    shapes = {path: curves.shape for path, curves in evidence.curves.items()}
    cost = COUNTED[of] if of in COUNTED else Latencies(model, evidence.sites, shapes, batches[0])
    made = CompressionPlan(evidence, of, cost)
    made.seconds = time.perf_counter() - started
    return made
