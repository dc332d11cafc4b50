"""The flags of the three tasks that train: data of GLUE, of translations and of images; models from scratch; risk."""

import os
from argparse import Namespace
from collections.abc import Collection, Iterable, Mapping

from collab_heads.base.checks import check_choice
from collab_heads.data.glue_tasks import TASKS
from collab_heads.errors import ArgumentError, DataError
from collab_heads.sites.state import MIXING_INITS
from collab_heads.training.options.heads import learns_gates, trains
from collab_heads.training.options.parser import Flag, flag, needing
from collab_heads.training.options.value_types import (
    AUTO,
    count,
    count_from_1,
    finite,
    not_negative,
    path,
    per_role,
    utf8,
)

TABLE = "a table (.csv, .tsv, .json, .jsonl, .parquet, also as .gz or .zip)"
PAD = "--pad_to_max_length"

# ---- GLUE, and tables of one's own

GLUE = (
    flag("--task_name TASK", f"GLUE task: {', '.join(TASKS)}"),
    flag("--data_dir DIR", "folder with GLUE's TSV files (default: download from the Hub)", path, needs="task_name"),
    flag(
        "--train_file FILE",
        f"your own training examples, instead of --task_name: {TABLE}, with a label and one or two columns of text",
        path,
    ),
    flag("--validation_file FILE", "your own validation examples", path),
    flag("--test_file FILE", "your own test examples, for --do_predict; no labels needed", path, needs="do_predict"),
    *needing(
        "train_file",
        flag("--label_column NAME", "column of the label in your own files", default="label"),
        flag(
            "--text_columns NAME...",
            "one or two columns of text in your own files (default: sentence1 and sentence2, or those beside the "
            "label)",
        ),
    ),
    flag("--skip_bad_rows", "leave out TSV rows with a wrong number of fields, instead of refusing the file"),
    flag("--max_length N", "cut texts to this many tokens", count_from_1, 128),
    flag(PAD, "pad every text to --max_length (default: to the longest of its batch)"),
    flag("--max_train_samples N", "use only the first N training examples", count_from_1),
    flag("--max_eval_samples N", "use only the first N validation examples", count_from_1),
    flag("--do_predict", "write predictions for the test examples to predictions/", needs="output_dir"),
)


def check_glue(args: Namespace) -> None:
    """Check the data flags against each other, and set the task's number of epochs."""
    files = [args.train_file, args.validation_file]
    if args.task_name is not None:
        args.task_name = args.task_name.lower()
        check_choice("--task_name", args.task_name, TASKS)
        if any(files) or args.test_file:
            raise ArgumentError("--task_name and files of your own exclude each other")
    elif not all(files):
        raise ArgumentError("give --task_name, or --train_file and --validation_file")
    if args.text_columns and len(args.text_columns) > 2:
        raise ArgumentError(f"--text_columns names {len(args.text_columns)} columns: give one or two")
    if args.num_train_epochs == AUTO:
        if args.task_name is None:
            raise ArgumentError(f"--num_train_epochs {AUTO} is for GLUE's tasks: give files of your own a number")
        args.num_train_epochs = TASKS[args.task_name].epochs
    if args.do_predict and args.task_name is None and not args.test_file:
        raise ArgumentError("--do_predict needs --test_file")


# ---- models from scratch

FROM_SCRATCH = "a model from scratch, instead of --model_name_or_path"
# flags that are arguments of `collaborative_config`
COLLABORATIVE_FROM_SCRATCH = ("dim_shared_query_key", "dim_value", "kind", "mixing_init", "sites")


def scratch_flags(example: str, sizes: Mapping[str, str], defaults: Mapping[str, float]) -> Iterable[Flag]:
    """Yield the flags of a model from scratch.

    Args:
        example: model types to name in the help.
        sizes: name of a whole number -> its description.
        defaults: the default of each size, and of the dropout.
    """
    yield flag("--config_name NAME", "folder, or name on the Hub, of a configuration", path)
    yield flag("--model_type TYPE", f"or a type, such as {example}, with the sizes below")
    for name, text in sizes.items():
        yield flag(f"--{name} N", f"{text} (default: {defaults[name]})", count_from_1)
    dropped = f"share of the activations that is dropped in training (default: {defaults['dropout']})"
    yield flag("--dropout X", dropped, not_negative)
    how = f"with --collaborative, how mixing begins: {', '.join(MIXING_INITS)}"
    yield flag("--mixing_init HOW", how, default=MIXING_INITS[0])


def from_scratch(args: Namespace) -> bool:
    """Return True if the model starts from scratch."""
    return args.model_name_or_path is None and bool(args.config_name or args.model_type)


def check_scratch(args: Namespace, names: Collection[str]) -> None:
    """Check that a model is either loaded, built from a config, or built from a type with the sizes of these names."""
    given = [f"--{name}" for name in ("config_name", "model_type", *names) if getattr(args, name) is not None]
    if args.model_name_or_path is not None and given:
        raise ArgumentError(f"{', '.join(given)} describe a model from scratch: leave them or --model_name_or_path out")
    sizes = [name for name in given if name not in ("--config_name", "--model_type")]
    if sizes and args.model_type is None:
        raise ArgumentError(f"{', '.join(sizes)} need --model_type")
    if args.config_name and args.model_type:
        raise ArgumentError("--config_name and --model_type exclude each other")
    check_choice("--mixing_init", args.mixing_init, MIXING_INITS)
    if args.mixing_init != "concatenate" and not (from_scratch(args) and args.collaborative):
        raise ArgumentError("--mixing_init has no effect without --collaborative and a model from scratch")
    if args.dropout is not None and args.dropout >= 1:
        raise ArgumentError(f"--dropout {args.dropout} must be below 1: it is a share of the activations")
    if not from_scratch(args):
        return
    if args.allocation != "uniform":
        raise ArgumentError(f"--allocation {args.allocation} has no meaning from scratch: there is nothing to weigh")
    if args.compress_budget is not None and args.swap == "before":
        raise ArgumentError(
            "--compress_budget has nothing to go by before a model from scratch is trained: --swap after"
        )
    if args.collaborative and args.distill_steps is not None:
        raise ArgumentError("--distill_steps has no original to learn from: the model is collaborative from the start")
    if args.collaborative and args.swap != "before":
        raise ArgumentError("--swap has no meaning from scratch: the model is collaborative from the start")


def sizes_of(args: Namespace, defaults: Mapping[str, float]) -> dict[str, float]:
    """Return the sizes of a model from scratch by name: the flag if it is given, otherwise the default."""
    return {name: usual if (given := getattr(args, name)) is None else given for name, usual in defaults.items()}


# ---- images: a small ViT for images of 32 x 32

IMAGE_SIZES = {"d_model": 192, "num_layers": 6, "num_heads": 6, "d_ff": 768, "dropout": 0.0}
IMAGE_SIZES |= {"image_size": 32, "patch_size": 4}
IMAGE_SCRATCH = tuple(
    scratch_flags(
        "vit, deit or dinov2",
        {
            "d_model": "width of the model",
            "num_layers": "layers",
            "num_heads": "heads per layer",
            "d_ff": "width of the feed-forward layers",
            "image_size": "pixels on each side, to which images are scaled",
            "patch_size": "pixels on each side of a patch, which is a token",
        },
        IMAGE_SIZES,
    )
)
FOLDER = "images, in it a folder for every class: DIR/CLASS/*.png"
IMAGES = (
    flag("--train_dir DIR", f"folder of the training {FOLDER}", path),
    flag("--validation_dir DIR", f"folder of the validation {FOLDER}", path),
    flag(
        "--test_dir DIR",
        f"folder of the test {FOLDER}, measured at the end; predictions go to predictions/",
        path,
        needs="output_dir",
    ),
    flag("--max_train_samples N", "use only N training images, as many of each class", count_from_1),
    flag("--max_eval_samples N", "use only N validation images, likewise", count_from_1),
    flag(
        "--horizontal_flip X",
        "probability that an image is mirrored, left and right, in training; not for digits and letters",
        not_negative,
        0.0,
    ),
)


def check_images(args: Namespace) -> None:
    """Check the flags of an image classifier against each other."""
    if not (args.train_dir and args.validation_dir):
        raise ArgumentError(
            "give --train_dir and --validation_dir, with a folder of images for every class (or run --demo)"
        )
    if args.horizontal_flip > 1:
        raise ArgumentError(f"--horizontal_flip {args.horizontal_flip} is a probability: 1 at most")
    for name in ("group_by_length", "analyze_treebank"):
        if getattr(args, name):
            raise ArgumentError(f"--{name} has no meaning for images: leave it out")
    check_scratch(args, IMAGE_SIZES)
    if args.model_type is not None:
        wanted = sizes_of(args, IMAGE_SIZES)
        for name, part in (("d_model", "num_heads"), ("image_size", "patch_size")):
            if wanted[name] % wanted[part]:
                raise ArgumentError(f"--{name} {wanted[name]} is not a multiple of --{part} {wanted[part]}")


def check_folders(args: Namespace) -> None:
    """Raise DataError if a folder of images does not exist."""
    for name in ("train_dir", "validation_dir", "test_dir"):
        folder = getattr(args, name)
        if folder is not None and not os.path.isdir(folder):
            what = "not a folder" if os.path.exists(folder) else "missing"
            raise DataError(f"--{name} {folder} is {what}: give a folder with a folder of images for every class")


# ---- translation

SIDES = ("source", "target")
TRANSLATION_SIZES = {"d_model": 256, "num_layers": 3, "num_heads": 8, "d_ff": 1024, "dropout": 0.1}
TRANSLATION_SCRATCH = (
    *scratch_flags(
        "marian",
        {
            "d_model": "width of the model",
            "num_layers": "layers of the encoder, and of the decoder",
            "num_heads": "heads per layer",
            "d_ff": "width of the feed-forward layers",
        },
        TRANSLATION_SIZES,
    ),
    flag("--vocab_size N", "tokens of the vocabulary, which is trained on the training pairs", count_from_1, 8000),
)
PAIRS = (
    flag("--dataset_name NAME", "data set on the Hub, with a column `translation` or one column per language", path),
    flag("--dataset_config_name NAME", "configuration of that data set", needs="dataset_name"),
    *(
        flag(f"--{split}_file FILE...", f"{TABLE}, or two text files with a sentence a line, the source first", path)
        for split in ("train", "validation", "test")
    ),
    flag("--do_predict", "translate and score also the test split of --dataset_name (a --test_file always is)"),
    flag(
        "--source_lang LANG",
        "language of the input: the name of its column, such as de, or the model's code, such as de_DE",
    ),
    flag("--target_lang LANG", "language of the output"),
    flag("--source_prefix TEXT", "text before every input, as T5 wants it", utf8, ""),
    flag("--max_source_length N", "cut inputs to this many tokens (word pieces)", count_from_1, 128),
    flag("--max_target_length N", "cut references to this many tokens", count_from_1, 128),
    flag(PAD, "pad every pair to --max_source_length and --max_target_length (default: to the longest of its batch)"),
    flag("--preprocessing_num_workers N", "processes that tokenize the pairs (default: this one)", count_from_1),
    flag("--max_train_samples N", "use only the first N training pairs", count_from_1),
    flag("--max_eval_samples N", "use only the first N validation pairs", count_from_1),
)
TRANSLATION = (
    flag(
        "--max_tokens N",
        "tokens per batch and device, padding included; replaces --per_device_train_batch_size",
        count_from_1,
    ),
    flag("--label_smoothing X", "share of the target probability that is spread over all tokens", not_negative, 0.0),
    flag(
        "--word_dropout X",
        "probability that a token is replaced in training; one number, or one per side: source=0.1,target=0.2",
        per_role(not_negative, SIDES, "side"),
        0.0,
    ),
    flag("--word_dropout_with WHAT", "by what: the unknown token, or a random one", default="unknown"),
    flag(
        "--trainable_parameters REGEX...",
        "train only parameters whose names match; freeze all others (default: train all)",
    ),
    flag("--num_beams N", "beams of the search for a translation", count_from_1, 5),
    flag(
        "--length_penalty X",
        "exponent of the length in the score of a beam; a larger one gives longer translations",
        finite,
        1.0,
    ),
    flag(
        "--val_max_target_length N",
        "longest translation that the model makes, in tokens (default: --max_target_length)",
        count_from_1,
    ),
    flag("--load_best_model_at_end", "end with the weights of the evaluation with best BLEU", needs="output_dir"),
    flag(
        "--average_checkpoints N",
        "end with the mean of the weights of the last N checkpoints; 0: with the last weights",
        count,
        0,
        needs="checkpointing_steps",
    ),
)


def dropout_of_sides(args: Namespace) -> tuple[float, float]:
    """Return the probabilities of `--word_dropout` for source and target."""
    asked = args.word_dropout
    source, target = (asked.get(side, 0.0) if isinstance(asked, dict) else asked for side in SIDES)
    return source, target


def check_translation(args: Namespace) -> None:
    """Check the flags of translation against each other."""
    if args.dataset_name and (args.train_file or args.validation_file or args.test_file):
        raise ArgumentError("--dataset_name and files of your own exclude each other")
    if args.dataset_name and not (args.source_lang and args.target_lang):
        raise ArgumentError("--dataset_name needs --source_lang and --target_lang")
    if not args.dataset_name and not (args.train_file and args.validation_file):
        raise ArgumentError("give --dataset_name, or --train_file and --validation_file")
    if args.do_predict and not (args.dataset_name or args.test_file):
        raise ArgumentError("--do_predict needs --test_file")
    if args.group_by_length and args.max_tokens:
        raise ArgumentError("--group_by_length has no effect with --max_tokens, which puts similar lengths together")
    if args.pad_to_max_length and args.max_tokens:
        raise ArgumentError("--pad_to_max_length and --max_tokens exclude each other: tokens are counted as padded")
    check_scratch(args, TRANSLATION_SIZES)
    check_final_weights(args)
    check_choice("--word_dropout_with", args.word_dropout_with, ("unknown", "random"))
    if args.word_dropout_with != "unknown" and not any(dropout_of_sides(args)):
        raise ArgumentError(f"--word_dropout_with {args.word_dropout_with} has no effect without --word_dropout")
    for name, values in {"label_smoothing": [args.label_smoothing], "word_dropout": dropout_of_sides(args)}.items():
        if wrong := [value for value in values if value >= 1]:
            raise ArgumentError(f"--{name} {wrong[0]} must be below 1")
    check_risk(args)


def check_final_weights(args: Namespace) -> None:
    if args.average_checkpoints and args.save_total_limit and args.save_total_limit < args.average_checkpoints:
        raise ArgumentError(
            f"--save_total_limit {args.save_total_limit} keeps fewer than --average_checkpoints "
            f"{args.average_checkpoints}"
        )
    if args.load_best_model_at_end and args.average_checkpoints:
        raise ArgumentError("--load_best_model_at_end and --average_checkpoints exclude each other")
    other = "--load_best_model_at_end" if args.load_best_model_at_end else "--average_checkpoints"
    if (args.load_best_model_at_end or args.average_checkpoints) and learns_gates(args):
        raise ArgumentError(
            f"{other} and heads that are learned in training exclude each other: earlier weights hold more heads than "
            "asked for; use --head_selection gradient or --alive_heads, or prune first and train again"
        )


# ---- the objective of translation: cross-entropy of the references, or risk of sampled translations

RISK_DEFAULTS = {"samples": 50, "sharpness": 5e-3, "metric": "bleu", "cross_entropy": 0.0}
RISK = (
    flag(
        "--objective NAME",
        "cross_entropy of the references; or minimum_risk: translations are sampled from the model, which has to be a "
        "trained one, and the better ones made more probable. It takes many times the memory of a batch: choose a "
        "small --max_tokens, and more --gradient_accumulation_steps",
        default="cross_entropy",
    ),
    flag("--risk_samples N", "translations sampled per sentence (default: 50)", count),
    flag(
        "--risk_sharpness X",
        "exponent of their probabilities, which says how much the more probable ones count (default: 0.005)",
        not_negative,
    ),
    flag("--risk_metric NAME", "what makes a translation good: bleu or chrf, of a sentence (default: bleu)"),
    flag(
        "--risk_cross_entropy X",
        "weight of the cross-entropy of the references, added to the risk (default: 0)",
        not_negative,
    ),
)


def check_risk(args: Namespace) -> None:
    """Check the flags of the objective against each other, and fill in the defaults."""
    check_choice("--objective", args.objective, ("cross_entropy", "minimum_risk"))
    given = [f"--risk_{name}" for name in RISK_DEFAULTS if getattr(args, f"risk_{name}") is not None]
    if args.objective == "cross_entropy":
        if given:
            raise ArgumentError(f"{', '.join(given)} have no effect without --objective minimum_risk")
        return
    for name, default in RISK_DEFAULTS.items():
        if getattr(args, f"risk_{name}") is None:
            setattr(args, f"risk_{name}", default)
    check_choice("--risk_metric", args.risk_metric, ("bleu", "chrf"))
    if args.risk_samples < 2:
        raise ArgumentError(f"--risk_samples {args.risk_samples}: there is nothing to choose between: sample 2 or more")
    if from_scratch(args):
        raise ArgumentError(
            "--objective minimum_risk samples translations from the model, and one from scratch makes none yet: train "
            "it with cross-entropy first, then go on from its --output_dir"
        )
    if not trains(args):
        raise ArgumentError("--objective minimum_risk: there are no training steps")
    for name in ("label_smoothing", "word_dropout"):
        if getattr(args, name):
            raise ArgumentError(f"--{name} belongs to cross-entropy: leave it out with --objective minimum_risk")
    if args.alpha_growth_beside == "sum":
        raise ArgumentError("--alpha_growth_beside sum counts target tokens, and --objective minimum_risk sentences")
