"""The flags of run_translation.py that run_glue.py does not have."""

import argparse

from collab_heads.checks import check_choice
from collab_heads.errors import ArgumentError
from collab_heads.registry import blueprints
from collab_heads.state import MIXING_INITS
from collab_heads.training.flags import pruning
from collab_heads.training.flags.arguments import Parser, count, count_from_1, not_negative, path

SIZE_FLAGS = ("d_model", "num_layers", "num_heads", "d_ff", "dropout")


def add_translation_data(parser: Parser) -> None:
    """Where the pairs are from, and how they are cut."""
    group = parser.add_argument_group("data")
    group.add_argument("--dataset_name", type=path, metavar="NAME", help="on the Hub, with a column `translation`")
    group.add_argument("--dataset_config_name", metavar="NAME", help="its configuration")
    for split in ("train", "validation", "test"):
        text = "a table (.csv .tsv .json .jsonl), or two text files (.gz too), the source first"
        group.add_argument(f"--{split}_file", nargs="+", type=path, metavar="FILE", help=text)
    group.add_argument("--do_predict", action="store_true", help="translate the Hub's test split too, as --test_file")
    group.add_argument("--source_lang", metavar="LANG", help="of the input: de, or the model's code (mBART: de_DE)")
    group.add_argument("--target_lang", metavar="LANG", help="of the output")
    group.add_argument("--source_prefix", default="", metavar="TEXT", help="before every input (T5)")
    group.add_argument("--max_source_length", type=count_from_1, default=128, metavar="N", help="pieces (128)")
    group.add_argument("--max_target_length", type=count_from_1, default=128, metavar="N", help="pieces (128)")
    group.add_argument("--max_train_samples", type=count_from_1, metavar="N", help="take the first N only")
    group.add_argument("--max_eval_samples", type=count_from_1, metavar="N", help="take the first N only")


def add_translation_training(parser: Parser) -> None:
    """What is trained, and how it is measured."""
    group = parser.add_argument_group("translation")
    group.add_argument("--max_tokens", type=count_from_1, metavar="N", help="per batch and device, padding included")
    group.add_argument("--label_smoothing", type=not_negative, default=0.0, metavar="X", help="(0)")
    group.add_argument("--word_dropout", type=not_negative, default=0.0, metavar="X", help="pieces made unknown (0)")
    group.add_argument("--trainable_parameters", nargs="+", metavar="REGEX", help="freeze all others")
    group.add_argument("--num_beams", type=count_from_1, default=5, metavar="N", help="(5)")
    group.add_argument("--length_penalty", type=float, default=1.0, metavar="X", help="above 1: longer (1.0)")
    group.add_argument(
        "--val_max_target_length", type=count_from_1, metavar="N", help="of translations (as for training)"
    )
    group.add_argument("--load_best_model_at_end", action="store_true", help="keep the weights with the best BLEU")
    group.add_argument(
        "--average_checkpoints", type=count, default=0, metavar="N", help="at the end average the last N checkpoints"
    )


def add_scratch_arguments(parser: Parser) -> None:
    """A model from scratch."""
    group = parser.add_argument_group("from scratch, instead of --model_name_or_path")
    group.add_argument("--config_name", type=path, metavar="NAME", help="folder, or name on the Hub, of a config")
    group.add_argument("--model_type", metavar="TYPE", help=", ".join(blueprints()))
    group.add_argument("--d_model", type=count_from_1, metavar="N", help="width")
    group.add_argument("--num_layers", type=count_from_1, metavar="N", help="of encoder and decoder, each")
    group.add_argument("--num_heads", type=count_from_1, metavar="N", help="per layer")
    group.add_argument("--d_ff", type=count_from_1, metavar="N", help="width of the feed-forward layers")
    group.add_argument("--dropout", type=not_negative, metavar="X")
    group.add_argument("--vocab_size", type=count_from_1, default=8000, metavar="N", help="pieces to train (8000)")
    group.add_argument("--mixing_init", default="concatenate", metavar="HOW", help=", ".join(MIXING_INITS))


def from_scratch(args: argparse.Namespace) -> bool:
    """Whether the model starts from scratch."""
    return args.model_name_or_path is None and bool(args.config_name or args.model_type)


def check_translation(args: argparse.Namespace) -> None:
    """Check what a single flag cannot know.

    Raises:
        ArgumentError: naming the flag and the way out.
    """
    if args.dataset_name and (args.train_file or args.validation_file or args.test_file):
        raise ArgumentError("--dataset_name and files of your own exclude each other")
    if args.dataset_name and not (args.source_lang and args.target_lang):
        raise ArgumentError("--dataset_name needs --source_lang and --target_lang")
    if not args.dataset_name and not (args.train_file and args.validation_file):
        raise ArgumentError("give --dataset_name, or --train_file and --validation_file")
    if args.do_predict and not (args.dataset_name or args.test_file):
        raise ArgumentError("--do_predict needs --test_file")
    check_scratch(args)
    check_checkpoints(args)
    for name in ("label_smoothing", "word_dropout"):
        if getattr(args, name) >= 1:
            raise ArgumentError(f"--{name} {getattr(args, name)} must be below 1")


def check_checkpoints(args: argparse.Namespace) -> None:
    """Check the flags of which weights to keep."""
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
    if (args.load_best_model_at_end or args.average_checkpoints) and pruning.learns_gates(args):
        raise ArgumentError(
            f"{other} and heads that are learned in training exclude each other: earlier weights hold more heads than "
            "asked for; use --head_selection importance or --alive_heads, or prune first and train again"
        )


def check_scratch(args: argparse.Namespace) -> None:
    """Check the flags of a model from scratch."""
    given = [f"--{name}" for name in ("config_name", "model_type", *SIZE_FLAGS) if getattr(args, name) is not None]
    if args.model_name_or_path is not None and given:
        raise ArgumentError(f"{', '.join(given)} describe a model from scratch: leave them or --model_name_or_path out")
    check_choice("--mixing_init", args.mixing_init, MIXING_INITS)
    if args.model_type is not None:
        check_choice("--model_type", args.model_type, blueprints())
    sizes = [flag for flag in given if flag not in ("--config_name", "--model_type")]
    if sizes and args.model_type is None:
        raise ArgumentError(f"{', '.join(sizes)} need --model_type")
    if args.config_name and args.model_type:
        raise ArgumentError("--config_name and --model_type exclude each other")
    if args.mixing_init != "concatenate" and not (from_scratch(args) and args.collaborative):
        raise ArgumentError("--mixing_init has no effect without --collaborative and a model from scratch")
    if args.dropout is not None and args.dropout >= 1:
        raise ArgumentError(f"--dropout {args.dropout} must be below 1: it is a share of the activations")
    if from_scratch(args) and args.allocation != "uniform":
        raise ArgumentError(f"--allocation {args.allocation} has no meaning from scratch: there is nothing to weigh")
    if from_scratch(args) and args.swap != "before":
        raise ArgumentError("--swap has no meaning from scratch: the model is collaborative from the start")
