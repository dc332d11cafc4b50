"""The flags of run_translation.py that run_glue.py does not have."""

import argparse

from collab_heads.base.checks import check_choice
from collab_heads.command.flags import heads
from collab_heads.command.flags.arguments import trains
from collab_heads.command.flags.parsing import count, count_from_1, not_negative, path, per_role, text
from collab_heads.command.flags.scratch import add_sizes, check_born, check_sizes_fit, from_scratch
from collab_heads.command.flags.shared import TABLE
from collab_heads.errors import ArgumentError
from collab_heads.sites.state import MIXING_INITS

SIDES = ("source", "target")
# of a model from scratch
SIZES = {
    "d_model": "width of the model",
    "num_layers": "layers of the encoder, and of the decoder",
    "num_heads": "heads per layer",
    "d_ff": "width of the feed-forward layers",
}
DEFAULT_SIZES = {"d_model": 256, "num_layers": 3, "num_heads": 8, "d_ff": 1024, "dropout": 0.1}


def add_translation_data(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the sentence pairs: where they come from, and how they are cut."""
    group = parser.add_argument_group("data")
    add = group.add_argument
    add(
        "--dataset_name",
        type=path,
        metavar="NAME",
        help="data set on the Hub, with a column `translation` or one column per language",
    )
    add("--dataset_config_name", metavar="NAME", help="configuration of that data set")
    for split in ("train", "validation", "test"):
        add(
            f"--{split}_file",
            nargs="+",
            type=path,
            metavar="FILE",
            help=f"{TABLE}, or two text files with a sentence a line, the source first",
        )
    add(
        "--do_predict",
        action="store_true",
        help="translate and score also the test split of --dataset_name (a --test_file always is)",
    )
    add(
        "--source_lang",
        metavar="LANG",
        help="language of the input: the name of its column, such as de, or the model's code, such as de_DE",
    )
    add("--target_lang", metavar="LANG", help="language of the output")
    add("--source_prefix", type=text, default="", metavar="TEXT", help="text before every input, as T5 wants it")
    add(
        "--max_source_length",
        type=count_from_1,
        default=128,
        metavar="N",
        help="cut inputs to this many tokens (word pieces)",
    )
    add("--max_target_length", type=count_from_1, default=128, metavar="N", help="cut references to this many tokens")
    add(
        "--pad_to_max_length",
        action="store_true",
        default=None,  # as for checkpoints of earlier versions, which lack this flag
        help="pad every pair to --max_source_length and --max_target_length (default: to the longest of its batch)",
    )
    add(
        "--preprocessing_num_workers",
        type=count_from_1,
        metavar="N",
        help="processes that tokenize the pairs (default: this one)",
    )
    add("--max_train_samples", type=count_from_1, metavar="N", help="use only the first N training pairs")
    add("--max_eval_samples", type=count_from_1, metavar="N", help="use only the first N validation pairs")


def add_translation_training(parser: argparse.ArgumentParser) -> None:
    """Add the flags of training and evaluation that only translation has."""
    group = parser.add_argument_group("translation")
    add = group.add_argument
    add(
        "--max_tokens",
        type=count_from_1,
        metavar="N",
        help="tokens per batch and device, padding included; replaces --per_device_train_batch_size",
    )
    add(
        "--label_smoothing",
        type=not_negative,
        default=0.0,
        metavar="X",
        help="share of the target probability that is spread over all tokens",
    )
    add(
        "--word_dropout",
        type=per_role(not_negative, SIDES, "side"),
        default=0.0,
        metavar="X",
        help="probability that a token is replaced in training; one number, or one per side: source=0.1,target=0.2",
    )
    add("--word_dropout_with", default="unknown", metavar="WHAT", help="by what: the unknown token, or a random one")
    add(
        "--trainable_parameters",
        nargs="+",
        metavar="REGEX",
        help="train only parameters whose names match; freeze all others (default: train all)",
    )
    add("--num_beams", type=count_from_1, default=5, metavar="N", help="beams of the search for a translation")
    add(
        "--length_penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="exponent of the length in the score of a beam; a larger one gives longer translations",
    )
    add(
        "--val_max_target_length",
        type=count_from_1,
        metavar="N",
        help="longest translation that the model makes, in tokens (default: --max_target_length)",
    )
    add("--load_best_model_at_end", action="store_true", help="end with the weights of the evaluation with best BLEU")
    add(
        "--average_checkpoints",
        type=count,
        default=0,
        metavar="N",
        help="end with the mean of the weights of the last N checkpoints; 0: with the last weights",
    )


def add_scratch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a translation model from scratch."""
    group = add_sizes(parser, "marian", SIZES, DEFAULT_SIZES)
    group.add_argument(
        "--vocab_size",
        type=count_from_1,
        default=8000,
        metavar="N",
        help="tokens of the vocabulary, which is trained on the training pairs",
    )


def dropout_of_sides(args: argparse.Namespace) -> tuple[float, float]:
    """Return the probabilities of `--word_dropout` for source and target."""
    asked = args.word_dropout
    source, target = (asked.get(side, 0.0) if isinstance(asked, dict) else asked for side in SIDES)
    return source, target


def check_translation(args: argparse.Namespace) -> None:
    """Check the flags of translation against each other.

    Raises:
        ArgumentError: if flags are wrong or contradict each other; the message names the flag and the way out.
    """
    if args.dataset_name and (args.train_file or args.validation_file or args.test_file):
        raise ArgumentError("--dataset_name and files of your own exclude each other")
    if args.dataset_name and not (args.source_lang and args.target_lang):
        raise ArgumentError("--dataset_name needs --source_lang and --target_lang")
    if not args.dataset_name and not (args.train_file and args.validation_file):
        raise ArgumentError("give --dataset_name, or --train_file and --validation_file")
    if args.do_predict and not (args.dataset_name or args.test_file):
        raise ArgumentError("--do_predict needs --test_file")
    if args.pad_to_max_length and args.max_tokens:
        raise ArgumentError("--pad_to_max_length and --max_tokens exclude each other: tokens are counted as padded")
    check_scratch(args)
    check_checkpoints(args)
    check_choice("--word_dropout_with", args.word_dropout_with, ("unknown", "random"))
    if args.word_dropout_with != "unknown" and not any(dropout_of_sides(args)):
        raise ArgumentError(f"--word_dropout_with {args.word_dropout_with} has no effect without --word_dropout")
    for name, values in {"label_smoothing": [args.label_smoothing], "word_dropout": dropout_of_sides(args)}.items():
        if wrong := [value for value in values if value >= 1]:
            raise ArgumentError(f"--{name} {wrong[0]} must be below 1")


def check_checkpoints(args: argparse.Namespace) -> None:
    """Check the flags that choose the final weights; raises ArgumentError."""
    if args.average_checkpoints and not args.checkpointing_steps:
        raise ArgumentError("--average_checkpoints needs --checkpointing_steps")
    if args.average_checkpoints and args.save_total_limit and args.save_total_limit < args.average_checkpoints:
        raise ArgumentError(
            f"--save_total_limit {args.save_total_limit} keeps fewer than --average_checkpoints "
            f"{args.average_checkpoints}"
        )
    if args.load_best_model_at_end and args.average_checkpoints:
        raise ArgumentError("--load_best_model_at_end and --average_checkpoints exclude each other")
    if args.load_best_model_at_end and args.output_dir is None:
        raise ArgumentError("--load_best_model_at_end needs --output_dir")
    other = "--load_best_model_at_end" if args.load_best_model_at_end else "--average_checkpoints"
    if (args.load_best_model_at_end or args.average_checkpoints) and heads.learns_gates(args):
        raise ArgumentError(
            f"{other} and heads that are learned in training exclude each other: earlier weights hold more heads than "
            "asked for; use --head_selection gradient or --alive_heads, or prune first and train again"
        )


def check_scratch(args: argparse.Namespace) -> None:
    """Check the flags of a model from scratch; raises ArgumentError."""
    check_sizes_fit(args, DEFAULT_SIZES)
    check_choice("--mixing_init", args.mixing_init, MIXING_INITS)
    check_born(args)


OBJECTIVES = ("cross_entropy", "minimum_risk")
METRICS = ("bleu", "chrf")
DEFAULTS = {"samples": 50, "sharpness": 5e-3, "metric": "bleu", "cross_entropy": 0.0}


def add_risk_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the training objective: cross-entropy of the references, or risk of sampled translations."""
    add = parser.add_argument_group("what training makes small").add_argument
    add(
        "--objective",
        default="cross_entropy",
        metavar="NAME",
        help="cross_entropy of the references; or minimum_risk: translations are sampled from the model, which has to "
        "be a trained one, and the better ones made more probable. It takes many times the memory of a batch: choose "
        "a small --max_tokens, and more --gradient_accumulation_steps",
    )
    add("--risk_samples", type=count, metavar="N", help="translations sampled per sentence (default: 50)")
    add(
        "--risk_sharpness",
        type=not_negative,
        metavar="X",
        help="exponent of their probabilities, which says how much the more probable ones count (default: 0.005)",
    )
    add(
        "--risk_metric",
        metavar="NAME",
        help="what makes a translation good: bleu or chrf, of a sentence (default: bleu)",
    )
    add(
        "--risk_cross_entropy",
        type=not_negative,
        metavar="X",
        help="weight of the cross-entropy of the references, added to the risk (default: 0)",
    )


def check_risk(args: argparse.Namespace) -> None:
    """Check the flags of the objective against each other, and fill in the defaults.

    Raises:
        ArgumentError: if flags are wrong or contradict each other; the message names the flag and the way out.
    """
    check_choice("--objective", args.objective, OBJECTIVES)
    given = [f"--risk_{name}" for name in DEFAULTS if getattr(args, f"risk_{name}") is not None]
    if args.objective == "cross_entropy":
        if given:
            raise ArgumentError(f"{', '.join(given)} have no effect without --objective minimum_risk")
        return
    for name, default in DEFAULTS.items():
        if getattr(args, f"risk_{name}") is None:
            setattr(args, f"risk_{name}", default)
    check_choice("--risk_metric", args.risk_metric, METRICS)
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
