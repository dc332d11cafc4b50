"""The work of the commands that change a model or look at it: `run_NAME` is that of `collab-heads NAME`."""

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_heads.analysis.analyze import analyze_heads
from collab_heads.analysis.facts import FamilyFacts, FamilyList, ModelFacts
from collab_heads.analysis.inspect import look
from collab_heads.analysis.report.head_report import HeadReport
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
    load,
    load_of_any_kind,
)
from collab_heads.command.texts import read_data, read_others
from collab_heads.compression.report import CompressReport
from collab_heads.contract.registry import get_adapter, is_lone_decoder
from collab_heads.distillation.checkpoint import DistillReport
from collab_heads.errors import ArgumentError
from collab_heads.evaluation.evaluate import made, score_of
from collab_heads.evaluation.task import Limits, Task
from collab_heads.files.atomic import write_json
from collab_heads.files.conllu import read_conllu
from collab_heads.files.folders import write_folder
from collab_heads.heads.criteria import criterion_of, head_importance, most_important
from collab_heads.heads.fold import fold_heads
from collab_heads.heads.gating import gated_sites, swap_to_gated
from collab_heads.heads.prune import prune_heads
from collab_heads.heads.report import FoldReport, PruneReport
from collab_heads.layers.weight_grid import bits_of
from collab_heads.saving.card import complete
from collab_heads.saving.source_files import OF_PROCESSORS, copy_files, copy_modules, source_of
from collab_heads.sites.site import select_sites
from collab_heads.training.options.changes import check_fit
from collab_heads.training.options.heads import read_alive
from collab_heads.vocabulary.trim import VocabularyReport, trim_vocabulary


def run_inspect(args: Namespace) -> ModelFacts | FamilyFacts | FamilyList:
    """Print what a model is made of, a type of models, or all types, as the flags say."""
    found = look(args.model, trust_remote_code=args.trust_remote_code)
    print(found)
    return found


def examples(args: Namespace) -> Task | None:
    """Return the task of `--task` with the examples of `--evaluate`; None without them."""
    if args.evaluate is None:
        return None
    return made(args.task, args.evaluate, None, Limits(args.batch_size, args.max_length, args.source_prefix))


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

    A model with weights of few bits stays in float32, which alone holds codes times scales; they are packed.

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
    if not any(bits_of(module) is not None for module in model.modules()):
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
