"""plan: predict the error at every budget, and what each site gets under it, before the model is changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from collab_heads.base.arguments import checking_arguments
from collab_heads.base.estimates import is_of, say, work
from collab_heads.base.numerics import keeping_threads
from collab_heads.base.option_values import REFINE_STEPS, SITE_PARTS, Engine, ModelShape, SitePart
from collab_heads.base.progress import one_bar
from collab_heads.compression.budgets import rest_of
from collab_heads.compression.choosing import Choosing
from collab_heads.compression.compression_plan import CompressionPlan
from collab_heads.compression.estimate import estimate_compression
from collab_heads.compression.latency import Latencies
from collab_heads.compression.measurements import Measurements, measure_model
from collab_heads.compression.measures import COUNTED, Measure, SiteUse, counted
from collab_heads.compression.model_shapes import MODEL_SHAPE_RULES, allowed_choices
from collab_heads.compression.options import PlanOptions
from collab_heads.compression.parts.shape import Choice
from collab_heads.compression.parts.table import PARTS, wholes_of
from collab_heads.compression.planned_site import PlannedSite
from collab_heads.contract.registry import get_adapter
from collab_heads.errors import ModelStateError
from collab_heads.model.open_layers import OpenLayers
from collab_heads.model.opened import opened
from collab_heads.model.refusals import check_not_inference
from collab_heads.running.batches import NoticingFew, without_unread_labels
from collab_heads.running.threads import choose_threads
from collab_heads.running.translations import with_translations
from collab_heads.serving.part_in_engine import check_engine
from collab_heads.sites.state import QueryKeyKind

logger = logging.get_logger("transformers.collab_heads")  # below transformers' own: its verbosity counts
COMPRESS = "compress"  # the work that is a plan and the fits of one budget
PHASES = (
    ("translating", 2),
    ("calibrating", 2),
    ("measuring sites", 8),
    ("timing sites", 3),  # of budgets of time
)


@checking_arguments
@torch.inference_mode(False)  # what is seen now is learned from in `compress`
def plan(
    model: PreTrainedModel,
    batches: Iterable[Mapping],
    *,
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
) -> CompressionPlan:
    """Predict the error of the model's output at every budget; the model is not changed.

    For each site, `plan` measures how its error rises with fewer heads, narrower queries, keys and values, or fewer
    neurons, and how much this error moves the model's output. The smaller sizes are fitted in closed form to seven
    eighths of the examples, and measured on the others. A budget is then spent where it reduces the error most.

    Examples:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256)
        >>> model = BertModel(config)
        >>> batches = [{"input_ids": torch.arange(200).view(8, 25)} for _ in range(4)]  # (batch, tokens) each
        >>> planned = plan(model, batches, refine_steps=0)
        >>> planned.predicted(planned.choose(0.5)) < planned.predicted(planned.choose(0.25))  # predicted errors
        True
        >>> report = compress(model, planned, 0.5)

    Args:
        model: a supported transformers model: an original one, or one with heads removed, with collaborative or with
            narrower sites, which is compressed further.
        batches: input dicts as the model takes them, without labels (256 to 2,048 sentences: neurons need most). The
            text that a decoder reads may be given, as decoder inputs or labels; if not, the model translates its
            inputs, greedily.
        of: the measure of budgets: "parameters" of attention's four projections and of feed-forward blocks, "bytes"
            that they take in a checkpoint (with `bits`, those of embeddings, too; with shape="gguf", in a file for
            llama.cpp), "operations" (multiplications of their matrix products on the batches, as torch computes them:
            with padding, and in a decoder for all target tokens at once), "cache" (elements that are cached after the
            batches, of sources and targets; a window that slides keeps its last tokens), or "time" (seconds on this
            machine, measured for the first batch as it is, on as many threads as PyTorch has, in the `engine`).
        sites: roles or paths of the sites that may change, feed-forward blocks ("enc-ffn", "dec-ffn") included; None
            for all.
        parts: the parts that may become smaller: some of "heads" (their number), "query_key" and "values" (their
            widths), and "neurons" (of feed-forward blocks). Only sites that have one of them count in budgets; a budget
            of cache is of attention alone.
        kind: the kind of narrower query/key projections, see `swap_to_collaborative`. "shared" saves most parameters
            and cache, and is slow.
        shape: the sizes that sites may have beside each other: "even" gives all feed-forward blocks of a stack the same
            number of neurons, or none; "free" lets every site have its own; "ctranslate2" is what this engine runs,
            "gguf" what llama.cpp runs, and "uniform" what the stock config of the family can say (see `export`). None:
            "even" for a model without a head, whose hidden states are compared, else "free".
        multiple_of: what the widths of smaller layers are multiples of: of queries, of keys and of values over all
            heads, and the number of neurons. 64 suits GPUs and four bits (see the guide to quantisation). Widths that
            do not change stay as they are.
        refine_steps: Adam steps that finally fit each narrower query/key projection to the original output of its site.
        seed: seed of the order of the inputs in the refinement.
        bits: the bits that weights may have: some of 8, 4 and 3, beside floating-point numbers. Sites and tables of
            embeddings get them where this costs least; budgets are of bytes then, or of time in an engine. None for
            floating-point numbers.
        table_bits: the same of embeddings, and of linear layers outside of the sites; None: `bits`. Not of time.
        engine: where a budget of time is measured: in "torch", "onnxruntime" or "openvino". An engine runs every site
            with the operators that `export` writes for it: of integers where `bits` are 8 (`int8=True`).
        measurements: a file that keeps what is measured of each site, as JSON, as soon as it is known. A plan that was
            killed goes on from there, and a later call with the same model, batches and options takes all of it, also
            for another budget or `shape`, and for another `of` if the same parts and bits count in it.

    Raises:
        UnsupportedModelError: if there is no adapter for the model, it is wrapped, its output cannot be compared, or
            `parts` names nothing that can become smaller in its family, or its weights were made in inference mode.
        ArgumentError: on an unknown role, path, measure, part, kind or shape, an impossible number, or a measure that
            is zero for the sites.
        CalibrationError: if the batches are empty or too few, or the model cannot take them.
        NonFiniteError: if weights, inputs or outputs contain NaN or inf.
        ModelStateError: if a site has gates or alphas, or cannot be changed safely, or `bits` or an engine are asked
            for and weights are not in float32, for an engine on the processor.
        OutputError: if the file of measurements is of another run, in use, or cannot be written.
        DataError: if it is damaged.
        MissingPackageError: if the engine is not installed.
    """
    options = PlanOptions(of, sites, parts, kind, shape, multiple_of, refine_steps, seed, bits, table_bits, engine)
    with opened(model, changes=True, of="layers") as layers, work("plan"), keeping_threads():
        return planned(layers, batches, options, measurements)


def planned(
    layers: OpenLayers,
    batches: Iterable[Mapping],
    options: PlanOptions,
    file: str | Path | None = None,
    check: Callable[[Choosing], None] = lambda choosing: None,
) -> CompressionPlan:
    """Make the plan of an opened model, as `plan` does; for the last argument see `measure`."""
    started = time.perf_counter()
    with one_bar("plan", PHASES if options.of not in COUNTED else PHASES[:-1]):
        measured = measure(layers, batches, options, check, file=file)
        made = plan_of(measured, counted(options.of, options.shape) or Latencies(measured))
    made.seconds = time.perf_counter() - started
    return made


def measure(
    layers: OpenLayers,
    batches: Iterable[Mapping],
    options: PlanOptions,
    check: Callable[[Choosing], None],
    *,
    errors: bool = True,
    file: str | Path | None = None,
) -> Measurements:
    """Check that the parts of a model can become smaller, prepare the batches, and measure it.

    Args:
        layers: the layers of the model.
        batches: input dicts as the model takes them.
        options: the options of the plan.
        check: raises an error unless the sites can become what is asked for.
        errors: see `measure_model`.
        file: keeps what is measured, see `plan`.
    """
    model = layers.model
    check_engine(options.engine, model)
    check_not_inference(model)
    check_dtypes(layers, options)
    if options.shape is not None:
        MODEL_SHAPE_RULES[options.shape].check(layers)
    for part in PARTS.values() if options.parts else ():
        if not part.may_stay or set(options.counted_parts) == {part.name}:
            get_adapter(model, layers.adapter, part.capability(options.kind))
    listed = prepared(model, NoticingFew(batches))
    choosing = Choosing.of(layers, options, listed)
    check(choosing)
    if file is None or not Path(file).exists():  # else much is measured already, with a number of threads
        choose_threads(model, listed[0])
        if errors:
            say(lambda: estimate_compression(layers, listed, options, fits=is_of(COMPRESS)))
    return measure_model(choosing, listed, errors=errors, file=file)


def check_dtypes(layers: OpenLayers, options: PlanOptions) -> None:
    """Raise ModelStateError if the weights' dtypes have no room for codes times scales, or their bytes differ."""
    dtypes = {parameter.dtype for parameter in layers.model.parameters()}
    named = ", ".join(sorted(map(str, dtypes)))
    if options.has_bits and dtypes != {torch.float32}:
        raise ModelStateError(
            f"bits={options.grid_bits or options.grid_table_bits}: the model has weights in {named}, and only float32 "
            "holds codes times scales: load it with dtype=torch.float32"
        )
    if options.of == "bytes" and len(dtypes) > 1:
        raise ModelStateError(
            f"of='bytes': the model has weights in {named}, so sizes do not tell bytes: count parameters, or load it "
            "with dtype=torch.float32"
        )


def prepared(model: PreTrainedModel, batches: Iterable[Mapping]) -> list[Mapping]:
    """Return batches without labels that nothing reads, and with translations where a decoder has no inputs."""
    listed = list(enumerate(without_unread_labels(model, batch) for batch in batches))
    return [batch for _, batch in with_translations(model, listed)]


def plan_of(measured: Measurements, cost: Callable[[SiteUse, Choice], float]) -> CompressionPlan:
    """Make the plan of a model from its measurements.

    Args:
        measured: the measurements.
        cost: the cost of a choice for a site, in the units of the measure.
    """
    shape = measured.options.shape or ("even" if has_states(measured) else "free")
    choices = measured.choices
    sites = []
    for path, use in measured.uses.items():
        squares = (sum(measured.errors[path].of(each).values()) for each in choices[path])
        costs = (cost(use, choice) for choice in choices[path])
        sites.append(
            PlannedSite(path, use.role, wholes_of(use.shape), tuple(choices[path]), tuple(costs), tuple(squares))
        )
    allowed = list(allowed_choices(measured, shape, is_even=has_states(measured)))
    return CompressionPlan(measured.options, shape, tuple(sites), allowed, measured, rest=rest_of(measured))


def has_states(measured: Measurements) -> bool:
    """Return True if the output that is compared is the hidden states of a model without a head."""
    return measured.probe.kept[0].are_states
