"""The work of the commands that change a model or look at it: `run_NAME` is that of `collab-heads NAME`."""

import copy
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_heads.analysis.analyze import analyze_heads
from collab_heads.analysis.facts import FamilyFacts, FamilyList, ModelFacts
from collab_heads.analysis.inspect import look
from collab_heads.analysis.report.head_report import HeadReport
from collab_heads.base.estimates import Estimate, Work, work
from collab_heads.base.extras import missing
from collab_heads.base.report import portable_name
from collab_heads.collaborative.report import SwapReport
from collab_heads.collaborative.swap import swap_to_collaborative
from collab_heads.command.inputs import (
    Loaded,
    LoadedOfAnyKind,
    batches_of,
    calibration,
    check_class,
    chosen_sentences,
    generated,
    load,
    load_of_any_kind,
)
from collab_heads.command.texts import drawn, read_data, read_others
from collab_heads.compression.compress import compress
from collab_heads.compression.compression_plan import CompressionPlan
from collab_heads.compression.measurements import HELD_OUT, MEASURED
from collab_heads.compression.plan import COMPRESS, plan
from collab_heads.compression.report import CompressReport
from collab_heads.contract.registry import get_adapter, is_lone_decoder
from collab_heads.data.parallel import Pairs
from collab_heads.distillation.checkpoint import DistillReport
from collab_heads.distillation.distill import distill
from collab_heads.distillation.estimate import estimate_distillation
from collab_heads.distillation.examples import num_examples
from collab_heads.errors import ArgumentError, DataError
from collab_heads.evaluation.evaluate import made, score_of
from collab_heads.evaluation.task import Limits, Task
from collab_heads.files.atomic import write_json
from collab_heads.files.conllu import read_conllu
from collab_heads.files.folders import write_folder
from collab_heads.fitting.kinds import check_kind
from collab_heads.heads.criteria import criterion_of, head_importance, most_important
from collab_heads.heads.fold import fold_heads
from collab_heads.heads.gating import gated_sites, swap_to_gated
from collab_heads.heads.prune import prune_heads
from collab_heads.heads.report import FoldReport, PruneReport
from collab_heads.plots.canvas import save_figure
from collab_heads.saving.card import complete
from collab_heads.saving.source_files import OF_PROCESSORS, copy_files, copy_modules, source_of
from collab_heads.sites.site import select_sites
from collab_heads.training.options.changes import check_fit
from collab_heads.training.options.heads import read_alive
from collab_heads.training.options.parser import options_of
from collab_heads.vocabulary.trim import VocabularyReport, trim_vocabulary


def run_inspect(args: Namespace) -> ModelFacts | FamilyFacts | FamilyList:
    """Print what a model is made of, a type of models, or all types, as the flags say."""
    found = look(args.model, trust_remote_code=args.trust_remote_code)
    print(found)
    return found


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
    check_kind(args.kind)
    all_texts, task = read_data(args), examples(args)
    others = None if args.validation is None else read_others(args, args.validation)
    loaded = load(args)
    model, tokenizer, _ = loaded
    check_class(model)
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
    given = {name: getattr(args, name) for name in options_of("compression.plan", "plan")}
    if isinstance(args.budget, str) and args.of == "parameters":
        given["of"] = "bytes"
    if begun is not None:
        begun.more += [partial(estimate, loaded, batches) for estimate in later]
    made = plan(model, batches, **{name: value for name, value in given.items() if value is not None})
    print(made)
    if args.plan:
        if args.output_dir is not None:
            write_plan(made, args.output_dir)
        return made
    original = copy.deepcopy(model) if args.distill_steps else None
    limits = {"max_error": args.max_error, "max_loss": args.max_loss, "evaluate": score}
    report = compress(model, made, args.budget, validation=elsewhere, **limits)
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
    return args.budget if isinstance(args.budget, float) else 0.5


def time_left(args: Namespace) -> float:
    """Return the share of a model's time that is left then, about: narrower sites take more than their share."""
    return 0.2 + 0.8 * share_left(args)


def examples(args: Namespace) -> Task | None:
    """Return the task of `--task` with the examples of `--evaluate`; None without them."""
    if args.evaluate is None:
        return None
    return made(args.task, args.evaluate, None, Limits(args.batch_size, args.max_length, args.source_prefix))


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


def run_swap(args: Namespace) -> SwapReport:
    """Swap the attention of a model, print and write the result, and return the report."""
    check_fit(args)
    texts = read_data(args) if args.data else None
    loaded = load(args)
    check_class(loaded.model)
    report = swap_to_collaborative(
        loaded.model,
        dim_shared_query_key=args.dim_shared_query_key,
        dim_value=args.dim_value,
        kind=args.kind,
        allocation=args.allocation,
        sites=args.sites,
        batches=calibration(args, loaded, texts),
        tol=args.decomposition_tol,
        method=args.decomposition_method,
        refine_steps=args.refine_steps,
        seed=args.seed,
    )
    print(report)
    write_model(args, loaded, "swap", report)
    return report


def run_prune(args: Namespace) -> PruneReport:
    """Choose heads, remove the others, print and write the result, and return the report."""
    alive = None if args.alive_heads is None else read_alive(args.alive_heads)
    texts = read_data(args) if args.data else None
    loaded = load(args)
    model = loaded.model
    check_class(model)
    if alive is None and args.target_heads is None and not gated_sites(model, get_adapter(model)):
        raise ArgumentError(
            "the model has no gates that say which heads go: give --target_heads (how many stay), or --alive_heads"
        )
    batches = calibration(args, loaded, texts)
    if args.target_heads is not None:
        alive = most_important(model, scores(args, model, batches), args.target_heads)
    if alive is not None:
        swap_to_gated(model, alive_heads=alive)  # else the gates of the trained model say which heads stay
    report = prune_heads(model, batches=None if args.no_repair else batches)
    print(report)
    write_model(args, loaded, "prune", report)
    return report


def scores(args: Namespace, model: PreTrainedModel, batches: Sequence[Mapping] | None) -> dict[str, Tensor]:
    """Score every head of the sites that `--target_heads` and `--sites` name: path -> [H]."""
    names = list(args.target_heads) if isinstance(args.target_heads, Mapping) else args.sites
    sites = select_sites(get_adapter(model).sites_with_heads(model), names)
    criterion = criterion_of(args.head_selection, seed=args.seed)
    if criterion.needs_labels:
        batches = [with_labels(model, batch) for batch in batches or ()]
    measured = head_importance(model, batches, criterion=criterion)
    return {site.path: measured[site.path] for site in sites}


def with_labels(model: PreTrainedModel, batch: Mapping) -> Mapping:
    """Add the labels of a language model, its own tokens, to a batch; return the batch of any other model unchanged."""
    if not is_lone_decoder(model.config):
        return batch
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def run_trim(args: Namespace) -> VocabularyReport:
    """Trim the vocabulary of a model, print and write the result, and return the report."""
    sides = read_data(args)
    sources = [args.source_prefix + line for line in sides["source"]]
    texts = list(zip(sources, sides["target"], strict=True)) if "target" in sides else sources
    loaded = load(args)
    check_class(loaded.model)
    small, report = trim_vocabulary(loaded.model, loaded.tokenizer, texts, keep=args.keep, min_count=args.min_count)
    print(report)
    write_model(args, loaded._replace(tokenizer=small), "trim", report)
    return report


def run_fold(args: Namespace) -> FoldReport:
    """Fold the heads of a model, print and write the result, and return the report."""
    loaded = load_of_any_kind(args)
    check_class(loaded.model)
    report = fold_heads(loaded.model)
    print(report)
    write_model(args, loaded, "fold", report)
    return report


def run_analyze(args: Namespace) -> HeadReport:
    """Analyze the heads of a model, print and save the report, and return it.

    All input is read before the model runs.
    """
    if missing("plots"):
        print("matplotlib is not installed: no curves and distributions (pip install matplotlib)", file=sys.stderr)
    sentences = read_conllu(args.treebank) if args.treebank else None
    texts = {side: lines[: args.samples] for side, lines in read_data(args).items()}
    chosen = read_others(args, args.sentences) if args.sentences else None
    task = examples(args)
    model, tokenizer, _ = load(args)
    batches = batches_of(args, model, tokenizer, texts)
    report = analyze_heads(
        model,
        [with_labels(model, batch) for batch in batches] if model.can_generate() else batches,
        parts=args.parts,
        tokenizer=tokenizer,
        treebank=sentences,
        num_examples=args.examples,
        sentences=() if chosen is None else chosen_sentences(args, model, tokenizer, chosen),
        evaluate=None if task is None else lambda model: task.SIGN * score_of(task, tokenizer, model),
        metric="loss" if task is None else task.name,
        higher_is_better=task is not None and task.SIGN > 0,
        prefixes=args.prefixes or "reference",
        compare_with=args.compare_with or (),
        data=", ".join(map(portable_name, args.data)),
    )
    print(report.to_string() if args.all_heads else report)
    print(f"report: {report.save(args.output_dir)}")
    return report


Report = CompressReport | DistillReport | SwapReport | PruneReport | FoldReport | VocabularyReport


def write_model(
    args: Namespace,
    loaded: Loaded | LoadedOfAnyKind,
    name: str,
    report: Report,
    record: Mapping | None = None,
    *,
    distilled: DistillReport | None = None,
    more: Callable[[Path], object] | None = None,
) -> None:
    """Write a folder for `from_pretrained`, with the model in its original dtype and a record of the change beside it.

    Args:
        args: the flags; if the model is a sentence-transformers folder, its other parts are copied.
        loaded: the changed model and its tokenizer.
        name: name of the JSON file with the record.
        report: the report of the change.
        record: content of the JSON file; default: the report.
        distilled: report of a distillation after the change, for the model card.
        more: writes other files into the folder that it receives.
    """
    model = loaded.model
    said = "\n".join(str(each) for each in (report, distilled) if each is not None)
    cast(nn.Module, model).to(loaded.dtype)

    def fill(folder: Path) -> None:
        copy_modules(Path(args.model), folder)
        model.save_pretrained(folder)
        complete(model.config, folder, report=said)
        if loaded.tokenizer is not None:
            loaded.tokenizer.save_pretrained(folder)
        elif (source := source_of(model.config)) is not None:
            copy_files(source, folder, OF_PROCESSORS)
        write_json(folder / f"{name}.json", report.to_dict() if record is None else record)
        if more is not None:
            more(folder)

    size = sum(parameter.nbytes for parameter in model.parameters())
    write_folder(Path(os.path.realpath(args.output_dir)), fill, size)
    print(f"model: {args.output_dir}")


def write_plan(made: CompressionPlan, output_dir: str) -> None:
    """Write a compression plan, the cost of every budget, as JSON and as a picture."""

    def fill(folder: Path) -> None:
        write_json(folder / "plan.json", made.to_dict())
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
