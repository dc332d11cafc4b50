"""compress: plan, fit, refine and install smaller layers, within a budget or an error."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import cast

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from collab_heads.base.arguments import checking_arguments
from collab_heads.base.checks import is_number
from collab_heads.base.estimates import work
from collab_heads.base.numerics import keeping_threads
from collab_heads.base.option_values import REFINE_STEPS, SITE_PARTS, Engine, ModelShape, SitePart
from collab_heads.base.progress import one_bar
from collab_heads.compression.budgets import DEFAULT_BUDGET, check_budget, check_reach, check_size
from collab_heads.compression.compression_plan import Choices, CompressionPlan
from collab_heads.compression.latency import timed_again
from collab_heads.compression.measurements import Measurements
from collab_heads.compression.measures import COUNTED, Measure, SiteUse, counted, operations
from collab_heads.compression.options import PlanOptions
from collab_heads.compression.parts.part import install
from collab_heads.compression.parts.shape import UNCHANGED, Choice
from collab_heads.compression.parts.table import parts_of, resized
from collab_heads.compression.plan import COMPRESS, measure, planned, prepared
from collab_heads.compression.probe import Probe
from collab_heads.compression.report import CompressedSite, CompressReport, Cost
from collab_heads.compression.smallest import FittedChoice, scored, smallest_by_error, smallest_by_score
from collab_heads.errors import ArgumentError, CalibrationError
from collab_heads.layers.weight_grid import bits_of, leave_grids
from collab_heads.model.open_layers import OpenLayers
from collab_heads.model.opened import opened
from collab_heads.model.site_size import num_bytes, size_of
from collab_heads.running.batches import each_batch
from collab_heads.sites.state import QueryKeyKind

logger = logging.get_logger("transformers.collab_heads")  # below transformers' own: its verbosity counts


@checking_arguments
@torch.inference_mode(False)  # new parameters are to be trained, in the refinement and after
def compress(
    model: PreTrainedModel,
    batches: Iterable[Mapping] | CompressionPlan,
    budget: float | str | None = None,
    *,
    max_error: float | None = None,
    max_loss: float | None = None,
    evaluate: Callable[[PreTrainedModel], float] | None = None,
    of: Measure = "parameters",
    sites: str | Iterable[str] | None = None,
    parts: SitePart | Iterable[SitePart] = SITE_PARTS,
    kind: QueryKeyKind = "per_head",
    shape: ModelShape | None = None,
    multiple_of: int = 1,
    refine_steps: int = REFINE_STEPS,
    seed: int = 0,
    bits: int | Iterable[int] | None = None,
    table_bits: int | Iterable[int] | None = None,
    engine: Engine = "torch",
    measurements: str | Path | None = None,
    plan: CompressionPlan | None = None,
    validation: Iterable[Mapping] | None = None,
) -> CompressReport:
    """Make the layers of a model smaller, in place, where this costs least.

    Heads and neurons of feed-forward blocks are removed, and queries, keys and values become narrower. `compress` needs
    no labels. It chooses and fits sizes and weights by the outputs of the model on the batches. At the end it refits
    the last projection of every site, in their order, on what the smaller model before it puts out, where this helps on
    examples that are held out. `distill` then recovers much of what is lost, most of it on texts like those it sees.
    The result saves and loads as any model does. If an error is raised, the model is unchanged. Compress before making
    the optimizer, and before DDP, FSDP, PEFT or `torch.compile`.

    Examples:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256)
        >>> model = BertModel(config)
        >>> batches = [{"input_ids": torch.arange(200).view(8, 25)} for _ in range(4)]  # (batch, tokens) each
        >>> report = compress(model, batches, 0.5, refine_steps=2)
        >>> 0.45 < report.costs["parameters"].share <= 0.5
        True
        >>> model(**batches[0]).last_hidden_state.shape  # (batch, tokens, D): as before
        torch.Size([8, 25, 64])

    Args:
        model: a supported transformers model: an original one, or one with heads removed, with collaborative or with
            narrower sites.
        batches: input dicts as the model takes them, without labels: 256 to 2,048 sentences like those that it is used
            on. Or a plan that `plan` made for this model, with its own options.
        budget: the share of the layers' present cost to keep, above 0 and at most 1: of attention and feed-forward
            blocks, unless `parts` or `sites` say otherwise. Embeddings are not among them, unless they may have `bits`.
            Without `max_error` the default is 0.5. Or the size of the whole model's weights, as in "10MB" (10^6 bytes).
        max_error: instead of a budget, the largest error of the model's output, on examples that no fit has seen. For
            models without a head and regressions, the error is the root mean square of the change, relative to the
            standard deviation of the output; for classifiers and language models, the root of twice the mean
            Kullback-Leibler divergence. The model becomes as small as this allows.
        max_loss: instead of both, how much of a score the model may lose, in the units of `evaluate`. The model becomes
            about as small as this allows: a few budgets are fitted and scored. Chance moves a score of few examples:
            the interval that `collab_heads.evaluate` reports says how far.
        evaluate: takes the model, in evaluation mode, and returns its score, of which more is better: a function of
            yours, or what `scorer` makes of a file. It must not change the model.
        of: the measure of the budget: "parameters", "bytes", "operations", "cache" or "time"; `plan` defines them.
        sites: roles or paths of the sites that may change, feed-forward blocks ("enc-ffn", "dec-ffn") included; None
            for all.
        parts: the parts that may become smaller: some of "heads" (their number), "query_key" and "values" (their
            widths), and "neurons" (of feed-forward blocks). Only sites that have one of them count in the budget.
        kind: the kind of narrower query/key projections: "per_head", or "shared", which is smallest and slow.
        shape: the sizes that sites may have beside each other: "even" gives all feed-forward blocks of a stack the same
            number of neurons, or none; "free" lets every site have its own; "ctranslate2" is what this engine runs,
            "gguf" what llama.cpp runs, and "uniform" what the stock config of the family can say (see `export`). None:
            "even" for a model without a head, whose hidden states are compared, else "free".
        multiple_of: what the widths of smaller layers are multiples of: of queries, of keys and of values over all
            heads, and the number of neurons. 64 suits GPUs and four bits (see the guide to quantisation). Widths that
            do not change stay as they are.
        refine_steps: Adam steps that fit each narrower query/key projection to the original output of its site.
        seed: seed of the order of the inputs in the refinement.
        bits: the bits that weights may have, embeddings included: some of 8, 4 and 3; None for floating-point numbers
            alone. Weights are put on grids (a half-precision scale for 32 inputs; with 8 bits for a row) by GPTQ, and
            stay in float32 in use; `save_pretrained` packs them. Weights that are trained further leave their grids.
        table_bits: the same of embeddings, and of linear layers outside of the sites; None: `bits`. With `bits=8`,
            `export(…, int8=True)` multiplies in integers, which is fastest, and tables may still have fewer.
        engine: where a budget of time is measured: in "torch", "onnxruntime" or "openvino", see `plan`.
        measurements: a file that keeps what is measured of each site, as JSON, as soon as it is known. A plan that was
            killed goes on from there, and a later call with the same model, batches and options takes all of it, also
            for another budget or `shape`, and for another `of` if the same parts and bits count in it. Fits are kept
            beside it until `compress` is done, in the folder `<file>.fits`, about as large as the model: a call that
            was killed goes on at the next fit.
        plan: a plan that was loaded (`CompressionPlan.load`), with its own options: its choices are fitted to
            the batches, and no site is measured again.
        validation: examples of another kind than the batches, 64 to 256 are enough. The error on them is reported, too;
            nothing is fitted to them, but the refit at the end must help on them as well. They show what a model loses
            away from its calibration, which is often several times as much.

    Returns:
        A report with the changes of every site, the predicted and the measured error, and the costs before and after;
        `print` it.

    Raises:
        ArgumentError: on an impossible budget (the message says what is possible), if several of budget, error and loss
            are given, or on an error or a loss that every smaller model exceeds.
        CollabHeadsError: as in `plan`.
    """
    started = time.perf_counter()
    limits = {"budget": budget, "max_error": max_error, "max_loss": max_loss}
    if len(asked := [f"{name}={value!r}" for name, value in limits.items() if value is not None]) > 1:
        raise ArgumentError(f"{' and '.join(asked)} exclude each other: give one")
    if max_error is not None and not (is_number(max_error) and max_error > 0):
        raise ArgumentError(f"max_error {max_error!r} must be a number above 0: the error that the output may have")
    if max_loss is not None and not (is_number(max_loss) and max_loss >= 0):
        raise ArgumentError(f"max_loss {max_loss!r} must be a number of 0 or more: what the score may lose")
    if (max_loss is None) != (evaluate is None):
        raise ArgumentError("max_loss and evaluate belong together: what may be lost, and the function that scores")
    if isinstance(batches, CompressionPlan) and plan is not None:
        raise ArgumentError("there are two plans: pass batches and the plan= that is to be fitted to them")
    given = batches if isinstance(batches, CompressionPlan) else plan
    if not asked:
        budget = DEFAULT_BUDGET
    if isinstance(budget, str) and of == "parameters" and given is None:
        of = "bytes"
    options = PlanOptions(of, sites, parts, kind, shape, multiple_of, refine_steps, seed, bits, table_bits, engine)
    if given is not None:
        if own := options.changed() + ["measurements"] * (measurements is not None):
            raise ArgumentError(f"{', '.join(own)}: a plan has its own; give what is to count to plan()")
        options = given.options
    if budget is not None:
        check_budget(budget, options.of)
        if given is not None:
            given.share_of(budget)
    is_timed = options.of not in COUNTED
    phases = (
        ("plan", 10),
        ("fitting", 4 if budget is not None else 12),
        ("timing what was chosen", 3 * is_timed),
    )
    # how many budgets are fitted for an error or a loss is not known
    begun = nullcontext() if budget is None else work(COMPRESS)
    with opened(model, changes=True, of="layers") as layers, one_bar("compress", phases), begun, keeping_threads():
        check_size(model, budget)
        other = None if validation is None else probe_of(model, validation)
        before = 0.0 if evaluate is None else scored(model, evaluate)
        if not math.isfinite(before):
            raise ArgumentError(f"evaluate returned {before} for the model as it is: what could it lose?")
        made, measured = plan_for(layers, batches, options, budget, plan, measurements)
        torch.set_num_threads(measured.threads)
        share, scores = None if budget is None else made.share_of(budget), None
        if share is not None:
            chosen = FittedChoice.of(measured, made.choose(share), other)
        elif max_error is not None:
            chosen = smallest_by_error(made, measured, max_error, other)
        else:
            limit, score = cast(float, max_loss), cast(Callable, evaluate)
            chosen, scores = smallest_by_score(made, measured, limit, score, before, other)
        report = report_of(made, measured, chosen, share, max_error, scores)
        # Nothing has changed up to here; nothing can fail from here on.
        leave_old_grids(measured, chosen.fitted)
        install(layers, chosen.fitted)
    measured.kept.remove()
    planning = 0.0 if given is None else given.seconds
    return dataclasses.replace(
        report,
        model_parameters_after=model.num_parameters(),
        model_bytes_after=num_bytes(model),
        seconds=planning + time.perf_counter() - started,
    )


def probe_of(model: PreTrainedModel, validation: Iterable[Mapping]) -> Probe:
    """Return the probe of the examples of another kind; its errors name them."""
    try:
        return Probe(model, prepared(model, each_batch(validation)), [])
    except CalibrationError as error:
        raise CalibrationError(f"validation: {error}") from error


def leave_old_grids(measured: Measurements, fitted: Mapping[str, object]) -> None:
    """Take the weights that change off the grids of few bits on which they lie.

    With bits it is all that were counted; those that stay on a grid are put there anew. Without, a warning says so.
    """
    has_bits = measured.options.has_bits
    parts = [*measured.sites, *measured.tables]
    changed = [module for part in parts if has_bits or part.path in fitted for module in part.modules]
    if not has_bits and any(bits_of(inner) is not None for module in changed for inner in module.modules()):
        logger.warning(
            "weights of few bits become floating-point numbers again where the model changes, and take more bytes: "
            "pass bits, such as bits=(8, 4), to put what is left of them on grids"
        )
    for module in changed:
        leave_grids(module)


def plan_for(
    layers: OpenLayers,
    batches: Iterable[Mapping] | CompressionPlan,
    options: PlanOptions,
    budget: float | str | None,
    plan: CompressionPlan | None,
    file: str | Path | None,
) -> tuple[CompressionPlan, Measurements]:
    """Return the plan that was given, or a new one, with the measurements that its choices are fitted with.

    A budget that cannot be reached is refused before anything is measured, but for one of time.
    """
    if isinstance(batches, CompressionPlan):
        if batches.measured is None:
            raise ArgumentError("a plan that was loaded has no batches to fit to: pass batches, and it with plan=")
        batches.measured.check_model(layers)
        return batches, batches.measured
    if plan is None:
        made = planned(layers, batches, options, file, partial(check_reach, budget=budget))
        return made, cast(Measurements, made.measured)
    return plan, measure(layers, batches, options, plan.check_sites, errors=False)


def report_of(
    made: CompressionPlan,
    measured: Measurements,
    chosen: FittedChoice,
    budget: float | None,
    max_error: float | None,
    scores: tuple[float, float] | None,
) -> CompressReport:
    """Return the report of what was chosen, before it is installed."""
    model, choices, uses = measured.model, chosen.choices, measured.uses
    parameters, size = model.num_parameters(), num_bytes(model)
    return CompressReport(
        sites=tuple(site_report(made, uses[path], path, choice) for path, choice in choices.items()),
        of=made.of,
        budget=budget,
        max_error=max_error,
        scores=scores,
        predicted_error=made.predicted(choices),
        measured_error=chosen.error,
        validation_error=chosen.elsewhere,
        nearby_errors=made.nearby(choices),
        costs=costs(made, measured, choices),
        model_parameters_before=parameters,
        model_parameters_after=parameters,
        model_bytes_before=size,
        model_bytes_after=size,
        operations_share=operations_share(measured, choices),
        seconds=0.0,
    )


def operations_share(measured: Measurements, choices: Choices) -> float:
    """Return the share of the model's multiplications on the batches that is left."""
    uses, others = measured.uses, measured.others
    before, after = (
        sum(operations(use, chosen[path]) for path, use in uses.items())
        for chosen in (dict.fromkeys(uses, UNCHANGED), choices)
    )
    return (after + others) / (before + others)


def costs(made: CompressionPlan, measured: Measurements, choices: Choices) -> dict[Measure, Cost]:
    """Return the cost of the sites by every known measure, unless it is zero; "time" only if the plan is of it."""
    found = {}
    for name in COUNTED:
        cost = cast(Callable, counted(name, made.shape))
        before = sum(cost(use, UNCHANGED) for use in measured.uses.values())
        after = sum(cost(use, choices[path]) for path, use in measured.uses.items())
        if before:
            found[name] = Cost(before, after)
    if made.of not in COUNTED:
        found[made.of] = Cost(*timed_again(measured, choices))
    return found


def site_report(made: CompressionPlan, use: SiteUse, path: str, choice: Choice) -> CompressedSite:
    whole, geometry = use.shape.geometry, resized(use.shape, choice)
    before, after, projection = size_of(whole), size_of(geometry), getattr(geometry, "query_key", None)
    is_cached = use.role.startswith("dec") and bool(use.work.cached)  # encoders are counted as if they generated
    return CompressedSite(
        path=path,
        role=use.role,
        kind=None if projection is None else projection.kind,
        sizes={name: (part.total(whole), part.total(geometry)) for name, part in parts_of(use.shape).items()},
        parameters_before=before.parameters,
        parameters_after=after.parameters,
        cache_before=before.cache * is_cached,
        cache_after=after.cache * is_cached,
        predicted_error=math.sqrt(made.option(path, choice).error),
        bits_before=whole.bits,
        bits_after=geometry.bits,
    )
