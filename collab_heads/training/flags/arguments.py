"""The command-line flags that the scripts share, under the names of the Hugging Face no-trainer examples."""

import argparse
import math
from collections.abc import Callable

from collab_heads.checks import check_choice
from collab_heads.collaborative.kinds import FITS
from collab_heads.collaborative.solvers import METHODS, check_method
from collab_heads.collaborative.swap import ALLOCATIONS
from collab_heads.errors import ArgumentError
from collab_heads.sites import ROLES
from collab_heads.state import KINDS
from collab_heads.training.flags.hub import check_hub
from collab_heads.training.flags.old_flags import check_old_flag
from collab_heads.training.flags.path_names import path, plain

# the schedules that need nothing but a warm-up and a number of steps
SCHEDULES = "linear cosine cosine_with_restarts polynomial constant constant_with_warmup inverse_sqrt".split()
SWAPS = ("before", "after", "between")
MAX_COUNT, MAX_SEED, MAX_EPOCHS = 2**31 - 1, 2**32 - 2**16, 10_000
# What may differ between a run and its continuation; everything else must be as it was.
FREE_ON_RESUME = frozenset(
    "output_dir overwrite_output_dir resume_from_checkpoint checkpointing_steps save_total_limit logging_steps "
    "with_tracking report_to push_to_hub hub_model_id hub_token dataloader_num_workers".split()
)


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that suggests the nearest flag for one that it does not know; flags are not abbreviated."""

    def __init__(self, *, allow_abbrev: bool = False, **options):
        super().__init__(allow_abbrev=allow_abbrev, **options)

    def parse_args(self, args=None, namespace=None):
        """As argparse, with a suggestion."""
        found, unknown = self.parse_known_args(args, namespace)
        for flag in unknown:
            if flag.startswith("-"):
                check_old_flag(flag.split("=")[0])
                check_choice("flag", flag.split("=")[0], self._option_string_actions)
            raise ArgumentError(f"unexpected argument {flag!r}")
        return found

    def error(self, message):
        """Raise instead of printing the whole usage and leaving."""
        raise ArgumentError(f"{message} (see --help)")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model and tokenizer."""
    group = parser.add_argument_group("model")
    group.add_argument("--model_name_or_path", type=path, metavar="NAME", help="folder, or name on the Hub")
    group.add_argument("--tokenizer_name", type=path, metavar="NAME", help="where it is not the model's")
    group.add_argument("--use_slow_tokenizer", action="store_true", help="the tokenizer written in Python")
    group.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the model")
    group.add_argument("--ignore_mismatched_sizes", action="store_true", help="start a head that does not fit afresh")
    group.add_argument("--attn_implementation", metavar="NAME", help="sdpa, eager, flash_attention_2, ...")


def add_collaborative_arguments(parser: argparse.ArgumentParser) -> None:
    """The swap to collaborative attention."""
    group = parser.add_argument_group("collaborative attention")
    group.add_argument("--collaborative", action="store_true", help="swap in collaborative attention")
    group.add_argument(
        "--dim_shared_query_key", type=width, metavar="R", help="width over all heads, or a share such as 0.5; all"
    )
    group.add_argument("--mixing", default=KINDS[0], metavar="KIND", help="shared or per_head (shared)")
    group.add_argument(
        "--allocation", default="uniform", metavar="HOW", help="uniform; balanced: the same parameters where they count"
    )
    group.add_argument(
        "--swap",
        default="before",
        metavar="WHEN",
        help="before fine-tuning, after it, or between two: fine-tune, swap, fine-tune again (before)",
    )
    group.add_argument(
        "--calibration_samples", type=count, default=256, metavar="N", help="training examples; 0: weights only (256)"
    )
    group.add_argument("--refine_steps", type=count, default=120, metavar="N", help="per site, with calibration (120)")
    group.add_argument("--decomposition_tol", type=positive, default=1e-4, metavar="TOL", help="of the sweeps (1e-4)")
    group.add_argument("--decomposition_method", default="als", metavar="NAME", help="als or parafac (als)")
    group.add_argument("--sites", nargs="+", metavar="SITE", help="roles or paths to swap; all")
    group.add_argument(
        "--score_terms",
        default="both",
        metavar="TERMS",
        help="ablation: keep only the content or only the context term of the score (both)",
    )


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """Fine-tuning."""
    group = parser.add_argument_group("training")
    group.add_argument("--per_device_train_batch_size", type=count_from_1, default=8, metavar="N", help="(8)")
    group.add_argument("--per_device_eval_batch_size", type=count_from_1, default=8, metavar="N", help="(8)")
    group.add_argument("--gradient_accumulation_steps", type=count_from_1, default=1, metavar="N", help="(1)")
    group.add_argument("--learning_rate", type=positive, default=5e-5, metavar="LR", help="peak (5e-5)")
    group.add_argument("--weight_decay", type=not_negative, default=0.0, metavar="W", help="not on biases, norms (0)")
    group.add_argument("--max_grad_norm", type=not_negative, default=1.0, metavar="X", help="0: no clipping (1.0)")
    group.add_argument("--num_train_epochs", type=epochs, default=3, metavar="N", help="0: evaluate only (3)")
    group.add_argument("--max_train_steps", type=count, metavar="N", help="optimizer steps, instead of epochs")
    group.add_argument("--eval_steps", type=count_from_1, metavar="N", help="evaluate every N steps, not every epoch")
    group.add_argument("--lr_scheduler_type", default="linear", metavar="NAME", help="(linear)")
    group.add_argument("--num_warmup_steps", type=count, default=0, metavar="N", help="optimizer steps (0)")
    group.add_argument("--warmup_ratio", type=not_negative, metavar="X", help="share of all steps, instead")
    group.add_argument("--group_by_length", action="store_true", help="examples of like length into one step")
    group.add_argument("--mixed_precision", metavar="DTYPE", help="no, bf16 or fp16; as accelerate is configured")
    group.add_argument("--gradient_checkpointing", action="store_true", help="less memory, more time")
    group.add_argument("--dataloader_num_workers", type=count, default=0, metavar="N", help="(0)")
    group.add_argument("--cpu", action="store_true", help="leave GPUs alone")
    group.add_argument("--seed", type=seed, default=42, metavar="N", help="of everything random (42)")


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """What is written, and where."""
    group = parser.add_argument_group("output")
    group.add_argument(
        "--output_dir", type=path, metavar="DIR", help="for model, results and checkpoints; must be new or empty"
    )
    group.add_argument("--overwrite_output_dir", action="store_true", help="replace an earlier run's files there")
    group.add_argument("--checkpointing_steps", type=interval, metavar="N|epoch", help="save every N steps or epoch")
    group.add_argument("--save_total_limit", type=count_from_1, metavar="N", help="keep the newest N checkpoints; all")
    group.add_argument(
        "--resume_from_checkpoint",
        nargs="?",
        const="latest",
        type=path,
        metavar="DIR",
        help="a checkpoint folder; without a value the newest in --output_dir",
    )
    group.add_argument("--with_tracking", action="store_true", help="log to experiment trackers")
    group.add_argument("--report_to", default="tensorboard", metavar="NAME", help="tensorboard, wandb, ... or all")
    group.add_argument("--logging_steps", type=count_from_1, default=50, metavar="N", help="(50)")
    group.add_argument("--push_to_hub", action="store_true", help="upload the final model")
    group.add_argument("--hub_model_id", metavar="NAME", help="repository to upload to; the output folder's name")
    group.add_argument("--hub_token", metavar="TOKEN", help="of the Hub")


def check_shared(args: argparse.Namespace) -> None:
    """Check what a single flag cannot know.

    Raises:
        ArgumentError: naming the flag and the way out.
    """
    check_choice("--swap", args.swap, SWAPS)
    check_choice("--mixing", args.mixing, KINDS)
    check_choice("--allocation", args.allocation, ALLOCATIONS)
    if args.allocation == "balanced" and not args.calibration_samples:
        raise ArgumentError("--allocation balanced needs --calibration_samples")
    check_choice("--decomposition_method", args.decomposition_method, METHODS)
    check_method(args.decomposition_method)
    check_choice("--score_terms", args.score_terms, ("both", "content", "context"))
    check_choice("--mixed_precision", args.mixed_precision or "no", ("no", "bf16", "fp16"))
    check_choice("--lr_scheduler_type", args.lr_scheduler_type, SCHEDULES)
    if args.model_name_or_path is None and not (
        getattr(args, "config_name", None) or getattr(args, "model_type", None)
    ):
        raise ArgumentError("--model_name_or_path is missing: a folder, or a name on the Hub (or run --demo)")
    named = args.dim_shared_query_key, args.sites, args.swap, args.mixing, args.allocation
    if not args.collaborative and named != (None, None, "before", KINDS[0], "uniform"):
        raise ArgumentError(
            "--dim_shared_query_key, --sites, --swap, --mixing and --allocation have no effect without --collaborative"
        )
    why = FITS[args.mixing].meaningless.get("method")
    if why is not None and args.decomposition_method != "als":
        raise ArgumentError(f"--decomposition_method has no meaning for --mixing {args.mixing}, {why}")
    if args.decomposition_tol >= 1:
        raise ArgumentError(f"--decomposition_tol {args.decomposition_tol} must be below 1")
    if args.output_dir is None:
        for flag in ("checkpointing_steps", "resume_from_checkpoint", "with_tracking", "push_to_hub"):
            if getattr(args, flag):
                raise ArgumentError(f"--{flag} needs --output_dir")
    check_hub(args)
    if args.warmup_ratio is not None and (args.num_warmup_steps or args.warmup_ratio > 1):
        raise ArgumentError("--warmup_ratio is a share from 0 to 1, and stands in for --num_warmup_steps")


def trains(args: argparse.Namespace) -> bool:
    """Whether there is any training."""
    return bool(args.num_train_epochs if args.max_train_steps is None else args.max_train_steps)


def fingerprint(args: argparse.Namespace) -> dict:
    """The arguments that a continued run must share with the run that it continues."""
    return {name: plain(value) for name, value in vars(args).items() if name not in FREE_ON_RESUME}


def width(text: str) -> int | float:
    """Parse "128" as a width and "0.5" as a share."""
    try:
        return int(text)
    except ValueError:
        return float(text)


def interval(text: str) -> int | str:
    """Parse a number of steps, or "epoch"."""
    return text if text == "epoch" else count_from_1(text)


def count(text: str, least: int = 0, most: int = MAX_COUNT) -> int:
    """Parse a whole number from 0."""
    value = int(text)
    if value < 0 <= least:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    if value < least:
        raise argparse.ArgumentTypeError(f"{text} is too small: {least} or more")
    if value > most:
        raise argparse.ArgumentTypeError(f"{text} is too large: {most:,} at most")
    return value


def count_from_1(text: str) -> int:
    """Parse a whole number from 1."""
    return count(text, least=1)


def seed(text: str) -> int:
    """Parse a seed that every generator takes: numpy's end at 2**32, and processes and phases add their numbers."""
    return count(text, most=MAX_SEED)


def epochs(text: str) -> float:
    """Parse a number of epochs, whole or not."""
    if not_negative(text) > MAX_EPOCHS:
        raise argparse.ArgumentTypeError(f"{text} is too large: {MAX_EPOCHS:,} at most; --max_train_steps takes more")
    return float(text)


def per_role(number: Callable[[str], int | float]) -> Callable[[str], object]:
    """A parser of "18" and of "enc-self=4,dec-self=4", whose numbers `number` parses."""

    def parse(text: str) -> int | float | dict:
        if "=" not in text:
            return number(text)
        found: dict = {}
        for part in text.split(","):
            role, _, value = part.partition("=")
            if role.strip() not in ROLES or role.strip() in found:
                raise argparse.ArgumentTypeError(f"{part!r} is not one role=number of {', '.join(ROLES)}")
            found[role.strip()] = number(value)
        return found

    parse.__name__ = "number, or role=number,"  # argparse quotes it
    return parse


def not_negative(text: str) -> float:
    """Parse a finite number from 0."""
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} must be a finite number, 0 or more")
    return value


def positive(text: str) -> float:
    """Parse a finite number above 0."""
    if not_negative(text) == 0:
        raise argparse.ArgumentTypeError("0 is too small")
    return float(text)
