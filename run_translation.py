#!/usr/bin/env python
r"""Train, compress and prune translation models: Marian, BART, mBART, M2M100, T5.

    python run_translation.py --model_name_or_path Helsinki-NLP/opus-mt-de-en --train_file train.de train.en \
        --validation_file dev.de dev.en --target_heads enc-self=12,dec-self=12,dec-enc=12 --output_dir out
    python run_translation.py --demo

With several processes: `accelerate launch run_translation.py ...`.
"""

import argparse
import sys
from collections.abc import Sequence

from collab_heads.extras import exit_without

if __name__ == "__main__":
    exit_without("train", "run_translation.py")  # said before the imports below fail

from collab_heads.errors import CollabHeadsError
from collab_heads.training.data.parallel import Corpus, from_files, from_hub
from collab_heads.training.flags import alphas, analyzing, arguments, collaborative, distilling, pruning, risk, rotating
from collab_heads.training.flags.parsing import Parser
from collab_heads.training.flags.translation_arguments import (
    add_scratch_arguments,
    add_translation_data,
    add_translation_training,
    check_translation,
)
from collab_heads.training.runs.run import Run
from collab_heads.training.runs.session import Session, launched
from collab_heads.training.runs.translator import Translator


def main(argv: Sequence[str] | None = None) -> dict:
    """Run; returns what `all_results.json` holds."""
    args = parse(argv)
    if args.demo:
        from collab_heads.training.demo import translation_demo

        return translation_demo.main(main)
    with launched(args) as accelerator:  # the output folder is reserved from here on
        data = load_data(args)
        session = Session.begin(args, data, accelerator)  # from the beginning, or from a checkpoint
        run = Run(Translator.load(session, data))
        run.begin()  # a trained model is evaluated as it is
        for phase in run.phases:  # one, or with --swap after and between two
            run.prepare(phase)  # swap, choose heads
            run.train(phase)
            run.conclude(phase)  # remove heads, take the best or the averaged weights
        return run.finish()  # model, translations, results


def load_data(args: argparse.Namespace) -> Corpus:
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


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the flags and check what can be checked without data or model."""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--demo",
        action="store_true",
        help="try everything on a generated language with a small model; ignores other flags",
    )
    add_translation_data(parser)
    arguments.add_model_arguments(parser)
    add_scratch_arguments(parser)
    collaborative.add_collaborative_arguments(parser)
    distilling.add_distill_arguments(parser)
    pruning.add_head_arguments(parser)
    alphas.add_alpha_arguments(parser)
    rotating.add_rotation_arguments(parser)
    analyzing.add_analysis_arguments(parser)
    arguments.add_training_arguments(parser)
    add_translation_training(parser)
    risk.add_risk_arguments(parser)
    arguments.add_output_arguments(parser)
    args = parser.parse_args(argv)
    if not args.demo:
        check_translation(args)
        risk.check_risk(args)
        arguments.check_shared(args)
        pruning.check_heads(args)
        alphas.check_alpha_flags(args)
        rotating.check_rotation(args)
        analyzing.check_analysis(args)
    return args


if __name__ == "__main__":
    try:
        main()
    except CollabHeadsError as problem:
        sys.exit(f"run_translation.py: {problem}")
