"""The checks of the commands before long imports; the docstring of each is what its `--help` says."""

import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from collab_heads.base.checks import check_choice
from collab_heads.base.extras import check_extra
from collab_heads.base.option_values import (
    ALLOCATIONS,
    BITS,
    CRITERION_WORDS,
    ENGINE_WORDS,
    EVALUATION_TASKS,
    EXPORT_TARGETS,
    LAYERED,
    MEASURES,
    MODEL_SHAPES,
    PREFIX_KINDS,
    REPORT_PARTS,
    SHAPE_OF_TARGET,
    SITE_PARTS,
)
from collab_heads.command.places import (
    check_files,
    check_input,
    check_model_name,
    check_new_model,
    check_output_dir,
    file_and_weight,
)
from collab_heads.errors import ArgumentError, DataError, OutputError
from collab_heads.training.options import tasks
from collab_heads.training.options.run import check_flags


def inspect(args: Namespace) -> None:
    """Say what is in a model: its attention, module by module, with heads, widths, parameters and cache.

        collab-heads inspect small
        collab-heads inspect bert
        collab-heads inspect

    A folder or a name on the Hub is one model, whose weights are not loaded; the type of a model, such as bert, says
    what works with its family; without MODEL, what works with each family.
    """
    if args.model is not None:
        check_input(args)


def compress(args: Namespace) -> None:
    """Make the layers of a model smaller: from text alone, without labels.

        collab-heads compress sentence-transformers/all-MiniLM-L6-v2 --data text.txt --plan
        collab-heads compress Helsinki-NLP/opus-mt-de-en --data dev.de dev.en --budget 0.5 --output_dir small
        collab-heads compress MODEL --data reviews.csv --column text --max_error 0.1 --output_dir small
        collab-heads compress MODEL --data news.txt --validation manuals.txt --budget 0.8 --output_dir small
        collab-heads compress DECODER --data news.txt:2 code.txt:1 --generated 64 --budget 0.9 --output_dir small
        collab-heads compress MODEL --data text.txt --bits 8 4 --budget 10MB --output_dir small

    `--plan` shows what every budget would cost in quality; `--distill_steps 300` brings back much of it. Text files
    have a sentence a line; gzipped where the name ends in .gz. A translation model takes two, or one and its own
    translations. The smaller model loads with `from_pretrained` as any model does, where collab_heads has been
    imported.
    """
    for part in args.parts or ():
        check_choice("--parts", part, SITE_PARTS)
    limits = check_spending(args)
    check_together(args, "max_loss", "evaluate", "task")
    if args.plan and args.validation:
        raise ArgumentError("--validation measures the smaller model, and --plan makes none: leave one of them out")
    if args.plan and limits:
        raise ArgumentError(f"--plan shows every budget: leave --{limits[0]} out, or leave --plan out")
    if args.plan and args.distill_steps:
        raise ArgumentError("--plan makes no model that --distill_steps could train: leave one out")
    if not args.plan and args.output_dir is None:
        raise ArgumentError("--output_dir is missing: a new folder for the smaller model (or only look, with --plan)")
    if args.output_dir is not None:
        check_output_dir(Path(args.output_dir))
        if args.measurements and Path(args.output_dir).resolve() in Path(args.measurements).resolve().parents:
            raise ArgumentError(
                f"{args.measurements} would be in --output_dir, which stays empty until the model is written: give "
                "--measurements another place"
            )
    check_input(args)


def check_spending(args: Namespace) -> list[str]:
    """Check the flags that say what the layers are to cost, and return the names of the limits that are given."""
    check_choice("--of", args.of, MEASURES)
    check_choice("--engine", args.engine, ENGINE_WORDS)
    if args.shape is not None:
        check_choice("--shape", args.shape, MODEL_SHAPES)
    if args.task is not None:
        check_choice("--task", args.task, EVALUATION_TASKS)
    limits = [name for name in ("budget", "max_error", "max_loss") if getattr(args, name, None) is not None]
    if len(limits) > 1:
        raise ArgumentError(f"{' and '.join(f'--{name}' for name in limits)} exclude each other: give one")
    if isinstance(args.budget, float) and args.budget > 1:
        raise ArgumentError(f"budget {args.budget} must be a share of what the layers have now: above 0, at most 1")
    for name in ("bits", "table_bits"):
        if others := [each for each in getattr(args, name) or () if each not in BITS]:
            raise ArgumentError(f"--{name} {others[0]}: weights may have {', '.join(map(str, BITS))}")
    if args.distill_steps:
        check_extra("train", "distillations", ("accelerate",))
    return limits


def check_together(args: Namespace, *names: str) -> None:
    """Raise ArgumentError if some of these flags are given, and others not."""
    absent = [f"--{name}" for name in names if getattr(args, name) is None]
    if 0 < len(absent) < len(names):
        every = [f"--{name}" for name in names]
        raise ArgumentError(f"{' and '.join(absent)} missing: {', '.join(every[:-1])} and {every[-1]} belong together")


def shrink(args: Namespace) -> None:
    r"""Make a model smaller, write it for the engines that serve it, and score all of it: in one command.

        collab-heads shrink sentence-transformers/all-MiniLM-L6-v2 --data text.txt --budget 0.33 --distill_steps 300 \
            --to onnx --int8 --evaluate dev.csv --task similarity --output_dir small
        collab-heads shrink recipe.yaml --output_dir small

    The steps: --trim, `compress`, `distill`, `export` for every target of --to, `evaluate` for all of them, for the
    original, and for the original in int8. DIR is a checkpoint, with a folder for every target in it, its scores in
    its card, and a recipe.json: `collab-heads shrink DIR/recipe.json --output_dir again` makes the same model. What
    each step made is kept in DIR.unfinished until all are done: a run that was killed goes on from there. A recipe is
    a file of flags: `budget: 0.33`.
    """
    limits = check_spending(args)
    check_together(args, "evaluate", "task")
    if "max_loss" in limits and args.evaluate is None:
        raise ArgumentError("--max_loss needs --evaluate and --task: what may be lost of which score?")
    targets = list(dict.fromkeys(args.to or ()))
    for target in targets:
        check_choice("--to", target, EXPORT_TARGETS)
    if args.int8 and not set(targets) - {"transformers"}:
        raise ArgumentError("--int8 is for engines: name one with --to, such as onnx")
    shapes = {SHAPE_OF_TARGET[target] for target in targets if target in SHAPE_OF_TARGET}
    if args.shape is None and len(shapes) > 1:
        raise ArgumentError(f"--to {' '.join(targets)}: no one --shape suits all of them: export them apart")
    args.to, args.shape = targets, args.shape or next(iter(shapes), None)
    check_files(*args.evaluate or ())
    check_new_model(args)
    check_input(args)
    for name in (*(file_and_weight(file)[0] for file in args.data), *(args.evaluate or ())):
        if not os.path.isfile(name):
            raise ArgumentError(f"{name} is a pipe, which can be read once, and several steps read it: give a file")


def swap(args: Namespace) -> None:
    r"""Replace queries and keys by narrower or shared ones, and values by narrower ones, of widths that you give.

        collab-heads swap sentence-transformers/all-MiniLM-L6-v2 --dim_shared_query_key 0.5 --data text.txt \
            --output_dir out
        collab-heads swap Helsinki-NLP/opus-mt-de-en --dim_shared_query_key enc-self=256,dec-enc=128 --output_dir out

    With texts the replacement is fitted to what the layers see, which keeps far more of the quality than the weights
    alone do. `collab-heads compress` finds the widths itself.
    """
    check_choice("--allocation", args.allocation, ALLOCATIONS)
    if args.allocation == "balanced" and args.data is None:
        raise ArgumentError("--allocation balanced needs --data")
    check_new_model(args)
    check_input(args)


def prune(args: Namespace) -> None:
    """Remove heads: fewer parameters, less work, a smaller cache.

        collab-heads prune sentence-transformers/all-MiniLM-L6-v2 --target_heads 36 --data text.txt --output_dir out
        collab-heads prune Helsinki-NLP/opus-mt-de-en --target_heads dec-enc=24 --data dev.de dev.en --output_dir out
        collab-heads prune trained --output_dir out

    The last line is for a model with gates: what is closed goes. `--target_heads` says how many heads stay; which ones,
    `--head_selection`: reconstruction keeps those that the others can least stand in for, and needs no labels.
    """
    check_choice("--head_selection", args.head_selection, CRITERION_WORDS)
    if args.target_heads is not None and args.alive_heads is not None:
        raise ArgumentError("--target_heads and --alive_heads exclude each other: one of them says which heads stay")
    if args.target_heads is not None and args.head_selection != "random" and args.data is None:
        raise ArgumentError(f"--head_selection {args.head_selection} needs --data (or choose at random)")
    if args.sites and not isinstance(args.target_heads, int):
        raise ArgumentError("--sites goes with a total for --target_heads; the others name their own")
    check_new_model(args)
    check_files(args.alive_heads)
    check_input(args)


def trim(args: Namespace) -> None:
    """Trim the vocabulary of a model to the tokens that texts use: the tokenizer, the embeddings and the output layer.

        collab-heads trim sentence-transformers/all-MiniLM-L6-v2 --data text.txt --output_dir trimmed
        collab-heads trim Helsinki-NLP/opus-mt-de-en --data dev.de dev.en --keep 0.9 --output_dir trimmed

    Texts of kept tokens give what they gave before. Special tokens, characters and bytes stay, so that nothing becomes
    unknown; other words become shorter pieces. What is written loads without this package, unless the model was
    compressed.
    """
    if args.keep is not None and args.min_count > 1:
        raise ArgumentError(
            "--keep and --min_count exclude each other: --keep takes the tokens that the texts use most"
        )
    check_new_model(args)
    check_input(args)


def export(args: Namespace) -> None:
    """Write a model for the engine that serves it, run it there, and compare it with PyTorch.

        collab-heads export small --to onnx --output_dir served
        collab-heads export small --to onnx --int8 --output_dir served
        collab-heads export translator --to ctranslate2 --int8 --output_dir served

    onnx is for ONNX Runtime, transformers.js for that library, openvino for OpenVINO, executorch for ExecuTorch,
    ctranslate2 for CTranslate2, gguf for llama.cpp; transformers is a checkpoint that loads without this package, where
    the configuration of the family can say what the model is. With --per_layer every layer has its own sizes there; the
    README.md of the folder has the lines with which it loads.
    """
    check_choice("--to", args.to, EXPORT_TARGETS)
    if args.per_layer and args.to != LAYERED:
        raise ArgumentError(f"--per_layer: only --to {LAYERED} has configs of layers, not {args.to}")
    check_new_model(args)
    check_input(args)


def encode(args: Namespace) -> None:
    """Write the embeddings of texts, a line each, as an array that numpy loads.

        collab-heads encode sentence-transformers/all-MiniLM-L6-v2 text.txt --output embeddings.npy
        collab-heads encode served text.txt --output embeddings.npy

    The model is a sentence encoder, stock or changed, or what `collab-heads export` wrote of one, but for
    transformers.js. Row i of the array [N, d], float32, is that of line i, empty lines included. Texts longer than the
    model reads are cut, as sentence-transformers does.
    """
    if args.output is None:
        raise ArgumentError("--output is missing: a new .npy file for the embeddings")
    if os.path.exists(args.output) or Path(args.output).suffix != ".npy":
        raise OutputError(f"--output {args.output} must be a new file whose name ends in .npy")
    check_model_name(args.model, in_llama_cpp=True)
    check_files(args.file)


def generate(args: Namespace) -> None:
    """Write the translations of texts, a line each, or what a language model writes after them.

        collab-heads generate Helsinki-NLP/opus-mt-de-en text.txt --output translated.txt
        collab-heads generate served text.txt --output translated.txt

    The model is stock or changed, or what `collab-heads export` wrote of one for ONNX Runtime, OpenVINO or
    llama.cpp. A translation model searches as its generation config says; a language model always takes the most
    probable token. Line i is that of line i; empty lines stay empty.
    """
    if args.output is None:
        raise ArgumentError("--output is missing: a new file for the texts")
    if os.path.exists(args.output):
        raise OutputError(f"--output {args.output} must be a new file")
    check_model_name(args.model, in_llama_cpp=True)
    check_files(args.file)


def evaluate(args: Namespace) -> None:
    """Score models on a task of yours, on the same examples: the original, changed ones, and what `export` wrote.

        collab-heads evaluate sentence-transformers/all-MiniLM-L6-v2 small served --task similarity --data dev.tsv
        collab-heads evaluate classifier small --task classification --data dev.csv --column text label
        collab-heads evaluate Helsinki-NLP/opus-mt-de-en small --task translation --data dev.de dev.en

    Each score of a changed model has the 95 % interval of its difference from the original. Flips are the share of
    answers that differ: models with the same score may answer many examples differently. similarity: Spearman's
    correlation; classification: accuracy, F1, Matthews' correlation; regression: Spearman's and Pearson's
    correlation; translation: BLEU, chrF; perplexity; retrieval: nDCG and recall of the nearest ten.
    """
    check_choice("--task", args.task, EVALUATION_TASKS)
    for name in (args.original, *args.changed):
        check_model_name(name, in_llama_cpp=True)
    check_files(*args.data)


def fold(args: Namespace) -> None:
    """Make a stock model again, which loads without this package: gates and alphas go into the output projections.

        collab-heads fold trained --output_dir out

    Fewer heads, and narrower queries, keys and values, stay so where the configuration of the family can say it; other
    removed heads come back as zeros. What no stock model can be is refused, and said why.
    """
    check_new_model(args)
    check_input(args)


def analyze(args: Namespace) -> None:
    """Show the heads of a model.

        collab-heads analyze sentence-transformers/all-MiniLM-L6-v2 --data text.txt --treebank dev.conllu
        collab-heads analyze Helsinki-NLP/opus-mt-de-en --data dev.de.gz dev.en.gz --output_dir report

    Text files have a sentence a line; gzipped where the name ends in .gz. A translation model takes two, or one and its
    own translations. `--sentences` shows the attention in sentences of your choice. `--evaluate dev.tsv --task
    similarity` also measures that score without each head and without many, which takes an evaluation for every head.
    Labelled examples: `collab-heads glue --analyze`. Without matplotlib the page has no curves and distributions, and
    there are no pictures beside it.
    """
    for part in args.parts or ():
        check_choice("part", part, REPORT_PARTS)
    for kind in args.prefixes or ():
        check_choice("--prefixes", kind, PREFIX_KINDS)
    for model in args.compare_with or ():
        check_model_name(model)
    check_together(args, "evaluate", "task")
    if args.task is not None:
        check_choice("--task", args.task, EVALUATION_TASKS)
        if args.parts and "ablation" not in args.parts:
            raise ArgumentError("--evaluate is of the ablation, which --parts does not name: add ablation")
        check_files(*args.evaluate)
    if args.parts and "contributions" not in args.parts:
        for name in ("prefixes", "compare_with"):
            if getattr(args, name):
                raise ArgumentError(f"--{name} is of contributions, which --parts does not name: add contributions")
    if args.treebank and args.parts and "roles" not in args.parts:
        raise ArgumentError("--treebank is of roles, which --parts does not name: add roles")
    check_output_dir(Path(args.output_dir))
    check_files(args.treebank)
    check_input(args)


def check_training(args: Namespace, own: Callable[[Namespace], None]) -> None:
    """Check the flags of a training against each other; `own` checks those of its data."""
    if not check_demo(args):
        own(args)
        check_flags(args)


def glue(args: Namespace) -> None:
    r"""Fine-tune a Transformer on a GLUE task, or on classification files of your own, with collaborative attention.

        collab-heads glue --model_name_or_path bert-base-uncased --task_name mrpc --collaborative \
            --dim_shared_query_key 256 --swap between --output_dir out
        collab-heads glue --demo

    With several processes: `accelerate launch -m collab_heads glue ...`.
    """
    check_extra("train", "fine-tuning and translation")
    check_training(args, tasks.check_glue)
    if not args.demo:
        check_files(args.train_file, args.validation_file, args.test_file)
        if args.data_dir is not None and not os.path.isdir(args.data_dir):
            raise DataError(f"--data_dir {args.data_dir} is not a folder")


def translate(args: Namespace) -> None:
    r"""Train, compress and prune translation models: Marian, BART, mBART, M2M100, T5.

        collab-heads translate --model_name_or_path Helsinki-NLP/opus-mt-de-en --train_file train.de train.en \
            --validation_file dev.de dev.en --target_heads enc-self=12,dec-self=12,dec-enc=12 --output_dir out
        collab-heads translate --demo

    With several processes: `accelerate launch -m collab_heads translate ...`.
    """
    check_extra("train", "fine-tuning and translation")
    check_training(args, tasks.check_translation)
    if not args.demo:
        check_files(
            *(name for split in (args.train_file, args.validation_file, args.test_file) for name in split or ())
        )


def images(args: Namespace) -> None:
    r"""Train, fine-tune, compress and prune classifiers of images: ViT, DeiT, DINOv2.

        collab-heads images --model_name_or_path facebook/deit-small-patch16-224 --train_dir images/train \
            --validation_dir images/validation --ignore_mismatched_sizes --collaborative --dim_shared_query_key 192 \
            --swap between --output_dir out
        collab-heads images --model_type deit --image_size 32 --patch_size 4 --train_dir images/train \
            --validation_dir images/validation --collaborative --dim_shared_query_key 64
        collab-heads images --demo

    With several processes: `accelerate launch -m collab_heads images ...`.
    """
    check_extra("train", "training on images")
    check_training(args, tasks.check_images)
    if not args.demo:
        tasks.check_folders(args)


def check_demo(args: Namespace) -> bool:
    """Return True if the demo is requested; no other flag has to be checked then."""
    if args.demo and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ArgumentError("--demo is for one process: start it without `accelerate launch` or `torchrun`")
    return bool(args.demo)
