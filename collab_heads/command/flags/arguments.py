"""The command-line flags that the scripts share, under the names of the Hugging Face no-trainer examples."""

import argparse
from collections.abc import Callable

from collab_heads.base.checks import check_choice
from collab_heads.command.flags.collaborative import check_distillation, check_fit, check_smaller, check_swap
from collab_heads.command.flags.parsing import (
    AUTO,
    count,
    count_from_1,
    decay,
    epochs,
    epochs_or_auto,
    interval,
    not_negative,
    path,
    positive,
    seed,
    stored_value,
)
from collab_heads.errors import ArgumentError

# the schedules whose only parameters are the warm-up and the number of steps
SCHEDULES = "linear cosine cosine_with_restarts polynomial constant constant_with_warmup inverse_sqrt".split()
PRECISIONS = ("no", "bf16", "fp16")
# The arguments that a resumed run may change; all others must stay as they were.
FREE_ON_RESUME = frozenset(
    "output_dir overwrite_output_dir resume_from_checkpoint checkpointing_steps save_total_limit logging_steps "
    "with_tracking report_to push_to_hub hub_model_id hub_token dataloader_num_workers cache_dir "
    "preprocessing_num_workers demo".split()
)


def add_model_arguments(parser: argparse.ArgumentParser, *, of_images: bool = False) -> None:
    """Add the flags of the model, and of its tokenizer or image processor."""
    group = parser.add_argument_group("model")
    add = group.add_argument
    add("--model_name_or_path", type=path, metavar="NAME", help="folder, or name on the Hub, of the model")
    flag, what = ("--image_processor_name", "image processor") if of_images else ("--tokenizer_name", "tokenizer")
    add(flag, type=path, metavar="NAME", help=f"folder, or name on the Hub, of the {what} (default: the model's)")
    if not of_images:
        add("--use_slow_tokenizer", action="store_true", help="use the tokenizer that is written in Python")
    add("--trust_remote_code", action="store_true", help="run Python code that comes with the model")
    add(
        "--ignore_mismatched_sizes",
        action="store_true",
        help="replace a classification head of another number of classes by a new one, instead of refusing it",
    )
    add(
        "--cache_dir",
        type=path,
        metavar="DIR",
        help="folder in which downloads, and run_translation.py's tokenized pairs, are kept for the next run (default: "
        "downloads where HF_HOME says, and pairs nowhere)",
    )
    add(
        "--attn_implementation",
        metavar="NAME",
        help="how attention is computed: sdpa, eager, flash_attention_2, ... (default: transformers chooses, mostly "
        "sdpa)",
    )


def add_training_arguments(parser: argparse.ArgumentParser, *, of_tasks: bool = False) -> None:
    """Add the flags of fine-tuning.

    Args:
        parser: takes the flags.
        of_tasks: allow `auto` epochs, the number that a GLUE task sets.
    """
    group = parser.add_argument_group("training")
    add = group.add_argument
    for kind in ("train", "eval"):
        flag = f"--per_device_{kind}_batch_size"
        add(flag, type=count_from_1, default=8, metavar="N", help="examples per batch and device")
    add("--gradient_accumulation_steps", type=count_from_1, default=1, metavar="N", help="batches per optimizer step")
    add("--learning_rate", type=positive, default=5e-5, metavar="LR", help="peak learning rate of AdamW")
    add(
        "--weight_decay",
        type=not_negative,
        default=0.0,
        metavar="W",
        help="weight decay of AdamW; biases, norms, gates and alphas have none",
    )
    add("--adam_beta1", type=decay, metavar="X", help="decay of AdamW's mean of gradients (default: 0.9)")
    add("--adam_beta2", type=decay, metavar="X", help="decay of AdamW's mean of squared gradients (default: 0.999)")
    add("--adam_epsilon", type=positive, metavar="X", help="what AdamW adds to its divisor (default: 1e-8)")
    add(
        "--max_grad_norm",
        type=not_negative,
        default=1.0,
        metavar="X",
        help="clip gradients of a larger norm to this one; 0: never",
    )
    parse: Callable[[str], float | str] = epochs_or_auto if of_tasks else epochs
    values, explained = "N", "training epochs; 0: only evaluate the model"
    if of_tasks:
        values += f"|{AUTO}"
        explained += (
            f"; {AUTO}: 10 for RTE and SST-2, 3 for the other tasks, as in the source of collaborative attention"
        )
    add("--num_train_epochs", type=parse, default=3, metavar=values, help=explained)
    add("--max_train_steps", type=count, metavar="N", help="optimizer steps; replaces --num_train_epochs")
    add("--eval_steps", type=count_from_1, metavar="N", help="evaluate every N steps (default: after every epoch)")
    add(
        "--early_stopping_patience",
        type=count_from_1,
        metavar="N",
        help="end a training after N evaluations in a row that were no better than the best before them, by the metric "
        "of the task that GLUE quotes, or by BLEU (default: train to the end)",
    )
    add(
        "--lr_scheduler_type",
        default="linear",
        metavar="NAME",
        help=f"how the learning rate changes: {', '.join(SCHEDULES)}",
    )
    add(
        "--num_warmup_steps",
        type=count,
        default=0,
        metavar="N",
        help="optimizer steps in which the learning rate rises to its peak",
    )
    add("--warmup_ratio", type=not_negative, metavar="X", help="the same as a share of all steps, such as 0.06")
    add("--group_by_length", action="store_true", help="put examples of similar length into one step: less padding")
    add(
        "--mixed_precision",
        metavar="DTYPE",
        help="no, bf16 or fp16 (default: as `accelerate launch` or its configuration says)",
    )
    add("--gradient_checkpointing", action="store_true", help="compute activations twice: less memory, more time")
    add("--dataloader_num_workers", type=count, default=0, metavar="N", help="processes that load batches")
    add("--cpu", action="store_true", help="train on the CPU, even where there is a GPU")
    add("--seed", type=seed, default=42, metavar="N", help="seed of everything that is random")


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the output: results, checkpoints, tracking and upload."""
    group = parser.add_argument_group("output")
    add = group.add_argument
    add(
        "--output_dir",
        type=path,
        metavar="DIR",
        help="folder for the model, results and checkpoints; must be new or empty (default: nothing is written)",
    )
    add("--overwrite_output_dir", action="store_true", help="replace what an earlier run wrote to --output_dir")
    add(
        "--checkpointing_steps",
        type=interval,
        metavar="N|epoch",
        help="save a checkpoint every N steps, or after every epoch (default: none)",
    )
    add(
        "--save_total_limit",
        type=count_from_1,
        metavar="N",
        help="keep only the N newest checkpoints (default: all)",
    )
    add(
        "--resume_from_checkpoint",
        nargs="?",
        const="latest",
        type=path,
        metavar="DIR",
        help="checkpoint folder to resume from; without a value, the newest one in --output_dir",
    )
    add("--with_tracking", action="store_true", help="log losses and metrics to an experiment tracker")
    add("--report_to", default="tensorboard", metavar="NAME", help="tracker: tensorboard, wandb, ... or all")
    add("--logging_steps", type=count_from_1, default=50, metavar="N", help="log the mean loss every N steps")
    add("--push_to_hub", action="store_true", help="upload the final model to the Hub")
    add("--hub_model_id", metavar="NAME", help="repository to upload to (default: the name of --output_dir)")
    add("--hub_token", metavar="TOKEN", help="access token of the Hub (default: that of `hf auth login` or HF_TOKEN)")


def check_shared(args: argparse.Namespace) -> None:
    """Check the flags that all scripts share, against each other and against tables that take long to import.

    Raises:
        ArgumentError: if flags are wrong or contradict each other; the message names the flag and the way out.
    """
    check_together(args)
    check_tables(args)


def check_together(args: argparse.Namespace) -> None:
    """Check the flags against each other, without long imports; raises the errors of `check_shared`."""
    check_choice("--mixed_precision", args.mixed_precision or "no", PRECISIONS)
    check_choice("--lr_scheduler_type", args.lr_scheduler_type, SCHEDULES)
    if args.model_name_or_path is None and not (
        getattr(args, "config_name", None) or getattr(args, "model_type", None)
    ):
        other = ", or --model_type for a model from scratch" if hasattr(args, "model_type") else ""
        raise ArgumentError(f"--model_name_or_path is missing: a folder, or a name on the Hub{other} (or run --demo)")
    check_swap(args)
    check_distillation(args)
    if args.output_dir is None:
        for flag in ("checkpointing_steps", "resume_from_checkpoint", "with_tracking", "push_to_hub"):
            if getattr(args, flag):
                raise ArgumentError(f"--{flag} needs --output_dir")
    check_early_stopping(args)
    if args.warmup_ratio is not None and (args.num_warmup_steps or args.warmup_ratio > 1):
        raise ArgumentError("--warmup_ratio is a share from 0 to 1, and stands in for --num_warmup_steps")


def check_tables(args: argparse.Namespace) -> None:
    """Check flags against the Hub and against tables that take long to import; raises the errors of `check_shared`."""
    check_fit(args)
    check_smaller(args)
    if args.with_tracking and args.report_to != "all":
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        check_choice("--report_to", args.report_to, [str(name) for name in LOGGER_TYPE_TO_CLASS])
    if args.push_to_hub:
        from collab_heads.command.flags.hub import check_hub

        check_hub(args)


def check_early_stopping(args: argparse.Namespace) -> None:
    """Raise ArgumentError if early stopping could skip a step that another flag relies on."""
    if args.early_stopping_patience is None:
        return
    if getattr(args, "target_heads", None) is not None and args.head_selection == "learned":
        raise ArgumentError(
            "--early_stopping_patience and heads that are learned in training exclude each other: it could end before "
            "the number is reached; use --head_selection gradient, or prune first and train again"
        )
    if getattr(args, "average_checkpoints", 0):
        raise ArgumentError(
            "--early_stopping_patience and --average_checkpoints exclude each other: use --load_best_model_at_end"
        )


def trains(args: argparse.Namespace) -> bool:
    """Return True if the run has training steps."""
    return bool(args.num_train_epochs if args.max_train_steps is None else args.max_train_steps)


def fingerprint(args: argparse.Namespace) -> dict:
    """Return the arguments that a resumed run must share with the run that it resumes."""
    return {name: stored_value(value) for name, value in vars(args).items() if name not in FREE_ON_RESUME}
