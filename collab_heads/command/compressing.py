"""The work of `collab-heads compress`: plan, fit, distil, write."""

import copy
import os
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from collab_heads.base.estimates import Estimate, Work, work
from collab_heads.base.extras import missing
from collab_heads.base.numerics import keeping_threads
from collab_heads.command.inputs import Loaded, batches_of, check_class, generated, load
from collab_heads.command.texts import drawn, read_data, read_others
from collab_heads.command.work import examples, write_model
from collab_heads.compression.budgets import DEFAULT_BUDGET, check_budget, check_reach, check_size
from collab_heads.compression.compress import compress
from collab_heads.compression.compression_plan import CompressionPlan
from collab_heads.compression.measurements import HELD_OUT, MEASURED
from collab_heads.compression.options import PlanOptions
from collab_heads.compression.plan import COMPRESS, planned
from collab_heads.compression.report import CompressReport
from collab_heads.contract.registry import is_lone_decoder
from collab_heads.data.parallel import Pairs
from collab_heads.distillation.checkpoint import DistillReport
from collab_heads.distillation.distill import distill
from collab_heads.distillation.estimate import estimate_distillation
from collab_heads.distillation.examples import num_examples
from collab_heads.errors import DataError
from collab_heads.evaluation.evaluate import score_of
from collab_heads.files.folders import write_folder
from collab_heads.model.opened import opened
from collab_heads.plots.canvas import save_figure

Later = Callable[[Loaded, Sequence[Mapping]], Estimate | None]  # of what follows a work, from its model and batches


def run_compress(
    args: Namespace, name: str = COMPRESS, later: Sequence[Later] = ()
) -> CompressReport | CompressionPlan:
    """Compress a model, print and write the result, and return the report; with `--plan` return only the plan.

    All input is read and checked before the model runs.

    Args:
        args: the flags.
        name: of the work that this begins.
        later: estimate what follows in that work.
    """
    if args.plan or args.max_error or args.max_loss is not None:  # the number of fits is not known
        with work("plan"):
            return compressed(args, [])
    if args.distill_steps:
        later = [*later, partial(distillation_after, args)]
    with work(name) as begun, work(COMPRESS):
        return compressed(args, later, begun)


def compressed(args: Namespace, later: Sequence[Later], begun: Work | None = None) -> CompressReport | CompressionPlan:
    """Do the work of `run_compress`, which has begun."""
    given = {each.name: getattr(args, each.name) for each in fields(PlanOptions)}
    if isinstance(args.budget, str) and args.of == "parameters":
        given["of"] = "bytes"
    options = PlanOptions(**{name: each for name, each in given.items() if each is not None})
    if args.budget is not None:
        check_budget(args.budget, options.of)
    all_texts, task = read_data(args), examples(args)
    others = None if args.validation is None else read_others(args, args.validation)
    loaded = load(args)
    model, tokenizer, _ = loaded
    check_class(model)
    stored = loaded.dtype.itemsize / torch.float32.itemsize  # bytes of its file, for each here
    written = 1.0 if options.has_bits else stored  # only float32 holds codes times scales
    check_size(model, args.budget, written)
    texts = drawn(all_texts, args.samples, args.seed)
    check_enough(args, texts)
    batches = batches_of(args, model, tokenizer, texts)
    elsewhere = None if others is None else batches_of(args, model, tokenizer, drawn(others, MEASURED, args.seed))
    score = None if task is None else partial(score_of, task, tokenizer)
    if score is not None:
        score(model)  # before the work: it may not be able to do the task
    own = generated(args, loaded)
    if is_lone_decoder(model.config) and model.can_generate() and not own:
        print("fitted to --data alone: with --generated 64 a language model keeps more of what it can do elsewhere")
    batches = [*batches, *own]
    if begun is not None:
        begun.more += [partial(estimate, loaded, batches) for estimate in later]
    limits = {"max_error": args.max_error, "max_loss": args.max_loss, "evaluate": score}
    is_open = args.plan or args.max_error is not None or args.max_loss is not None
    budget = DEFAULT_BUDGET if args.budget is None and not is_open else args.budget
    check = partial(check_reach, budget=budget, written=written)
    with opened(model, changes=True, of="layers") as layers, work("plan"), keeping_threads():
        made = planned(layers, batches, options, args.measurements, check)
    print(made)
    if args.plan:
        if args.output_dir is not None:
            write_plan(made, args.output_dir)
        return made
    original = copy.deepcopy(model) if args.distill_steps else None
    share = None if budget is None else made.share_of(budget, written)
    report = compress(model, made, share, validation=elsewhere, **limits)
    before, after = stored * report.model_bytes_before, written * report.model_bytes_after
    report = replace(report, model_bytes_before=round(before), model_bytes_after=round(after))
    print(report)
    distilled = None
    if original is not None:
        distilled = distill_on(args, model, loaded._replace(model=original), all_texts, own)
    record = {
        **report.to_dict(),
        "distilled": None if distilled is None else distilled.to_dict(),
        "plan": made.to_dict(),
    }
    measured = report.costs[report.of].share, report.measured_error
    picture = drawing(made, "compression", measured)
    write_model(args, loaded, "compression", report, record, distilled=distilled, more=picture)
    return report


def distillation_after(args: Namespace, loaded: Loaded, batches: Sequence[Mapping]) -> Estimate | None:
    """Estimate the distillation of a model that will be compressed to a budget."""
    model = loaded.model
    trained = share_left(args) * sum(parameter.nbytes for parameter in model.parameters())
    return estimate_distillation(model, model, batches, args.distill_steps, trained, time_left(args))


def share_left(args: Namespace) -> float:
    """Return the share of the layers that a budget leaves, about."""
    return args.budget if isinstance(args.budget, float) else DEFAULT_BUDGET


def time_left(args: Namespace) -> float:
    """Return the share of a model's time that is left then, about: narrower sites take more than their share."""
    return 0.2 + 0.8 * share_left(args)


def distill_on(
    args: Namespace,
    model: PreTrainedModel,
    original: Loaded,
    texts: Pairs,
    own: Sequence[Mapping],
    output_dir: Path | None = None,
) -> DistillReport:
    """Train a compressed model to be like its original, print the report and return it.

    Args:
        args: the flags.
        model: the compressed model.
        original: its original, with the tokenizer of both.
        texts: the texts of `--data`; as many are drawn as the steps read.
        own: batches of texts that the original has written.
        output_dir: where checkpoints are kept, from which a run that was killed goes on.
    """
    several = drawn(texts, num_examples(args.distill_steps, args.batch_size), args.seed)
    batches = [*batches_of(args, original.model, original.tokenizer, several), *own]
    report = distill(
        model,
        original.model,
        batches,
        args.distill_steps,
        learning_rate=args.distill_learning_rate,
        seed=args.seed,
        output_dir=output_dir,
    )
    print(report)
    return report


def check_enough(args: Namespace, texts: Pairs) -> None:
    """Raise DataError unless there are enough sentences to fit on some and to measure the error on one other."""
    if (found := len(texts["source"])) < HELD_OUT:
        raise DataError(
            f"{' and '.join(args.data)}: {found} sentences, and one of {HELD_OUT} is kept to measure on: give more "
            "(256 to 2,048 are good)"
        )


def write_plan(made: CompressionPlan, output_dir: str) -> None:
    """Write a compression plan, the cost of every budget, as JSON and as a picture."""

    def fill(folder: Path) -> None:
        made.save(folder / "plan.json")
        draw(made, "plan", folder)

    write_folder(Path(os.path.realpath(output_dir)), fill)
    print(f"plan: {output_dir}")


def draw(made: CompressionPlan, name: str, folder: Path, measured: tuple[float, float] | None = None) -> None:
    """Draw the cost of every budget, and the measured cost of one, if matplotlib is installed."""
    if not missing("plots"):
        save_figure(made.picture([] if measured is None else [measured]), folder / name)


def drawing(made: CompressionPlan, name: str, measured: tuple[float, float]) -> Callable[[Path], object]:
    """Return `draw` as a function of the folder alone."""
    return partial(draw, made, name, measured=measured)
