"""The work of `collab-heads translate` and of run_translation.py: train, compress and prune translation models."""

from argparse import Namespace
from collections.abc import Sequence

from collab_heads.command.flags import translate as flags
from collab_heads.command.flags.shared import demo_row
from collab_heads.command.training import check_all, read_flags, run_script, train
from collab_heads.contract.registry import blueprints
from collab_heads.data.parallel import Corpus, from_files, from_hub
from collab_heads.demo import translation_demo
from collab_heads.training.runs.translator import Translator


def main(argv: Sequence[str] | None = None) -> dict:
    """Parse the flags and run.

    Returns:
        The content of `all_results.json`; with `--demo` that of each of its runs, by name.
    """
    return run_script(parse(argv), work)


def parse(argv: Sequence[str] | None = None) -> Namespace:
    """Parse the flags and make all checks that need neither data nor model."""
    return read_flags(flags, argv, blueprints())


def run(args: Namespace) -> dict:
    """Check parsed flags and run; returns the same as `main`."""
    check_all(flags, args, blueprints())
    return work(args)


def work(args: Namespace) -> dict:
    """Run with checked flags; returns the same as `main`."""
    return translation_demo.main(main, demo_row(args)) if args.demo else train(args, Translator.load, load_data)


def load_data(args: Namespace) -> Corpus:
    """Read the sentence pairs from the Hub or from files, as the flags say."""
    if args.dataset_name:
        splits = ["train", "validation", *(["test"] if args.do_predict else [])]
        corpus = from_hub(
            args.dataset_name, args.dataset_config_name, args.source_lang, args.target_lang, splits=splits
        )
    else:
        files = {split: getattr(args, f"{split}_file") for split in ("train", "validation", "test")}
        corpus = from_files({s: paths for s, paths in files.items() if paths}, args.source_lang, args.target_lang)
    return corpus.first({"train": args.max_train_samples, "validation": args.max_eval_samples})
