"""The flags that all trainings share, under the names of the Hugging Face no-trainer examples."""

from argparse import Namespace
from typing import Any

from collab_heads.base.checks import check_choice
from collab_heads.errors import ArgumentError
from collab_heads.training.options.changes import check_distillation, check_fit, check_smaller, check_swap
from collab_heads.training.options.heads import check_alphas, check_analysis, check_heads, check_rotation
from collab_heads.training.options.parser import Flag, Parse, flag, needing
from collab_heads.training.options.value_types import (
    AUTO,
    below_1,
    count,
    count_from_1,
    epochs,
    epochs_or_auto,
    interval,
    not_negative,
    path,
    positive,
    seed,
    stored_value,
)

# the schedules whose only parameters are the warm-up and the number of steps
SCHEDULES = "linear cosine cosine_with_restarts polynomial constant constant_with_warmup inverse_sqrt".split()
POLYNOMIAL_END = 1e-7  # the learning rate at the end, in transformers
PRECISIONS = ("no", "bf16", "fp16")
# The arguments that a resumed run may change; all others must stay as they were.
FREE_ON_RESUME = frozenset(
    "output_dir overwrite_output_dir resume_from_checkpoint checkpointing_steps save_total_limit logging_steps "
    "with_tracking report_to push_to_hub hub_model_id hub_token dataloader_num_workers cache_dir "
    "preprocessing_num_workers demo".split()
)


def model_flags(*, of_images: bool = False) -> list[Flag]:
    """Return the flags of the model, and of its tokenizer or image processor."""
    name, what = ("--image_processor_name", "image processor") if of_images else ("--tokenizer_name", "tokenizer")
    slow = [] if of_images else [flag("--use_slow_tokenizer", "use the tokenizer that is written in Python")]
    return [
        flag("--model_name_or_path NAME", "folder, or name on the Hub, of the model", path),
        flag(f"{name} NAME", f"folder, or name on the Hub, of the {what} (default: the model's)", path),
        *slow,
        flag("--trust_remote_code", "run Python code that comes with the model"),
        flag(
            "--ignore_mismatched_sizes",
            "replace a classification head of another number of classes by a new one, instead of refusing it",
        ),
        flag(
            "--cache_dir DIR",
            "folder in which downloads, and run_translation.py's tokenized pairs, are kept for the next run (default: "
            "downloads where HF_HOME says, and pairs nowhere)",
            path,
        ),
        flag(
            "--attn_implementation NAME",
            "how attention is computed: sdpa, eager, flash_attention_2, ... (default: transformers chooses, mostly "
            "sdpa)",
        ),
    ]


def training_flags(*, of_tasks: bool = False) -> list[Flag]:
    """Return the flags of fine-tuning; with `of_tasks`, the number of epochs can be `auto`, that of a GLUE task."""
    parse: Parse = epochs_or_auto if of_tasks else epochs
    values, explained = "N", "training epochs; 0: only evaluate the model"
    if of_tasks:
        values += f"|{AUTO}"
        explained += (
            f"; {AUTO}: 10 for RTE and SST-2, 3 for the other tasks, as in the source of collaborative attention"
        )
    return [
        flag("--per_device_train_batch_size N", "examples per batch and device", count_from_1, 8),
        flag("--per_device_eval_batch_size N", "examples per batch and device", count_from_1, 8),
        flag("--gradient_accumulation_steps N", "batches per optimizer step", count_from_1, 1),
        flag("--learning_rate LR", "peak learning rate of AdamW", positive, 5e-5),
        flag("--weight_decay W", "weight decay of AdamW; biases, norms, gates and alphas have none", not_negative, 0.0),
        flag("--adam_beta1 X", "decay of AdamW's mean of gradients (default: 0.9)", below_1),
        flag("--adam_beta2 X", "decay of AdamW's mean of squared gradients (default: 0.999)", below_1),
        flag("--adam_epsilon X", "what AdamW adds to its divisor (default: 1e-8)", positive),
        flag("--max_grad_norm X", "clip gradients of a larger norm to this one; 0: never", not_negative, 1.0),
        flag(f"--num_train_epochs {values}", explained, parse, 3),
        flag("--max_train_steps N", "optimizer steps; replaces --num_train_epochs", count),
        flag("--eval_steps N", "evaluate every N steps (default: after every epoch)", count_from_1),
        flag(
            "--early_stopping_patience N",
            "end a training after N evaluations in a row that were no better than the best before them, by the metric "
            "of the task that GLUE quotes, or by BLEU (default: train to the end)",
            count_from_1,
        ),
        flag("--lr_scheduler_type NAME", f"how the learning rate changes: {', '.join(SCHEDULES)}", default="linear"),
        flag("--num_warmup_steps N", "optimizer steps in which the learning rate rises to its peak", count, 0),
        flag("--warmup_ratio X", "the same as a share of all steps, such as 0.06", not_negative),
        flag("--group_by_length", "put examples of similar length into one step: less padding"),
        flag("--mixed_precision DTYPE", "no, bf16 or fp16 (default: as `accelerate launch` or its configuration says)"),
        flag("--gradient_checkpointing", "compute activations twice: less memory, more time"),
        flag("--dataloader_num_workers N", "processes that load batches", count, 0),
        flag("--cpu", "train on the CPU, even where there is a GPU"),
        flag("--seed N", "seed of everything that is random", seed, 42),
    ]


OUTPUT = (
    flag(
        "--output_dir DIR",
        "folder for the model, results and checkpoints; must be new or empty (default: nothing is written)",
        path,
    ),
    *needing(
        "output_dir",
        flag("--overwrite_output_dir", "replace what an earlier run wrote to --output_dir"),
        flag(
            "--checkpointing_steps N|epoch",
            "save a checkpoint every N steps, or after every epoch (default: none)",
            interval,
        ),
        flag(
            "--resume_from_checkpoint DIR",
            "checkpoint folder to resume from; without a value, the newest one in --output_dir",
            path,
            nargs="?",
            const="latest",
        ),
        flag("--with_tracking", "log losses and metrics to an experiment tracker"),
        flag("--push_to_hub", "upload the final model to the Hub"),
    ),
    flag(
        "--save_total_limit N",
        "keep only the N newest checkpoints (default: all)",
        count_from_1,
        needs="checkpointing_steps",
    ),
    flag("--report_to NAME", "tracker: tensorboard, wandb, ... or all", default="tensorboard", needs="with_tracking"),
    flag("--logging_steps N", "log the mean loss every N steps", count_from_1, 50),
    *needing(
        "push_to_hub",
        flag("--hub_model_id NAME", "repository to upload to (default: the name of --output_dir)"),
        flag("--hub_token TOKEN", "access token of the Hub (default: that of `hf auth login` or HF_TOKEN)"),
    ),
)


def check_flags(args: Namespace) -> None:
    """Check the flags of a training against each other, before long imports."""
    check_together(args)
    check_heads(args)
    check_alphas(args)
    check_rotation(args)
    check_analysis(args)


def check_together(args: Namespace) -> None:
    """Check the flags of this file, of the swap and of the distillation against each other."""
    check_choice("--mixed_precision", args.mixed_precision or "no", PRECISIONS)
    check_choice("--lr_scheduler_type", args.lr_scheduler_type, SCHEDULES)
    if args.model_name_or_path is None and not (
        getattr(args, "config_name", None) or getattr(args, "model_type", None)
    ):
        other = ", or --model_type for a model from scratch" if hasattr(args, "model_type") else ""
        raise ArgumentError(f"--model_name_or_path is missing: a folder, or a name on the Hub{other} (or run --demo)")
    check_swap(args)
    check_distillation(args)
    check_early_stopping(args)
    if args.lr_scheduler_type == "constant" and (args.num_warmup_steps or args.warmup_ratio):
        raise ArgumentError("--lr_scheduler_type constant has no warm-up: choose constant_with_warmup")
    if args.lr_scheduler_type == "polynomial" and args.learning_rate <= POLYNOMIAL_END:
        raise ArgumentError(
            f"--learning_rate {args.learning_rate}: --lr_scheduler_type polynomial ends at {POLYNOMIAL_END}; give a "
            "higher one, or choose linear"
        )
    if args.warmup_ratio is not None and (args.num_warmup_steps or args.warmup_ratio > 1):
        raise ArgumentError("--warmup_ratio is a share from 0 to 1, and stands in for --num_warmup_steps")


def check_tables(args: Namespace) -> None:
    """Check flags against the Hub and against tables that take long to import."""
    check_fit(args)
    check_smaller(args)
    if args.with_tracking and args.report_to != "all":
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        check_choice("--report_to", args.report_to, [str(name) for name in LOGGER_TYPE_TO_CLASS])
    if args.push_to_hub:
        from collab_heads.training.options.hub import check_hub

        check_hub(args)


def check_early_stopping(args: Namespace) -> None:
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


def fingerprint(args: Namespace) -> dict[str, Any]:
    """Return the arguments that a resumed run must share with the run that it resumes."""
    return {name: stored_value(value) for name, value in vars(args).items() if name not in FREE_ON_RESUME}
