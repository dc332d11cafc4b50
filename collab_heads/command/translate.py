"""The work of `collab-heads translate` and of run_translation.py: train, compress and prune translation models."""

from argparse import Namespace
from collections.abc import Sequence

from collab_heads.command.flags import translate as flags
from collab_heads.training.data.parallel import Corpus, from_files, from_hub
from collab_heads.training.demo import translation_demo
from collab_heads.training.flags import risk
from collab_heads.training.flags.checks import check_run
from collab_heads.training.flags.parsing import Parser
from collab_heads.training.flags.translation_arguments import check_translation
from collab_heads.training.runs.run import Run
from collab_heads.training.runs.session import Session, launched
from collab_heads.training.runs.translator import Translator


def main(argv: Sequence[str] | None = None) -> dict:
    """Run; returns what `all_results.json` holds."""
    return work(parse(argv))


def parse(argv: Sequence[str] | None = None) -> Namespace:
    """Read the flags and check what can be checked without data or model."""
    parser = Parser(description=flags.__doc__)
    flags.add_arguments(parser)
    args = parser.parse_args(argv)
    check(args)
    return args


def check(args: Namespace) -> None:
    """Check what a single flag cannot know."""
    if args.demo:
        return
    check_translation(args)
    risk.check_risk(args)
    check_run(args)


def run(args: Namespace) -> dict:
    """Check the flags and run; returns what `all_results.json` holds."""
    check(args)
    return work(args)


def work(args: Namespace) -> dict:
    """Run what checked flags ask for."""
    if args.demo:
        return translation_demo.main(main)
    with launched(args) as accelerator:  # the output folder is reserved from here on
        data = load_data(args)
        session = Session.begin(args, data, accelerator)  # from the beginning, or from a checkpoint
        return Run(Translator.load(session, data)).complete()


def load_data(args: Namespace) -> Corpus:
    """Read the pairs from wherever the flags say."""
    if args.dataset_name:
        splits = ["train", "validation", *(["test"] if args.do_predict else [])]
        corpus = from_hub(
            args.dataset_name, args.dataset_config_name, args.source_lang, args.target_lang, splits=splits
        )
    else:
        files = {split: getattr(args, f"{split}_file") for split in ("train", "validation", "test")}
        corpus = from_files({s: paths for s, paths in files.items() if paths}, args.source_lang, args.target_lang)
    return corpus.first({"train": args.max_train_samples, "validation": args.max_eval_samples})
