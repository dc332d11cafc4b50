"""The commands that train, `collab-heads glue`, `translate` and `images`, and the scripts with the same work."""

from argparse import Namespace
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate.state import PartialState

from collab_heads.base.checks import check_choice
from collab_heads.base.progress import showing_bars
from collab_heads.command.checks import check_training
from collab_heads.command.flags import COMMANDS
from collab_heads.command.shared_flags import QUIET
from collab_heads.contract.registry import blueprints, image_blueprints
from collab_heads.data import glue, images, parallel
from collab_heads.demo import demos
from collab_heads.training.options import tasks
from collab_heads.training.options.run import check_tables
from collab_heads.training.runs.classifier import Classifier, ImageClassifier
from collab_heads.training.runs.learner import Learner
from collab_heads.training.runs.run import Run
from collab_heads.training.runs.session import Session, launched
from collab_heads.training.runs.translator import Translator


@dataclass(frozen=True)
class Task:
    """A task that models are trained on.

    Attributes:
        name: of its command.
        check_data: checks the flags of its data.
        load_data: reads the examples that the flags name.
        learner: builds the learner from a session and its data.
        demo: what `--demo` runs.
        model_types: returns the types that a model from scratch can have.
    """

    name: str
    check_data: Callable[[Namespace], None]
    load_data: Callable[[Namespace], Any]
    learner: Callable[[Session, Any], Learner]
    demo: demos.Demo
    model_types: Callable[[], Collection[str]] = tuple

    def main(self, argv: Sequence[str] | None = None) -> dict:
        """Parse the flags and run.

        Returns:
            The content of `all_results.json`; with `--demo` that of each of its runs, by name.
        """
        args = self.parse(argv)
        quiet = vars(args).pop("quiet")  # not of the work
        with showing_bars(not quiet):
            return self.work(args)

    def parse(self, argv: Sequence[str] | None = None) -> Namespace:
        """Parse the flags and make all checks that need neither data nor model."""
        parser = COMMANDS[self.name].parser()
        parser.add(QUIET)
        args = parser.parse_args(argv)
        self.check(args)
        return args

    def check(self, args: Namespace) -> None:
        """Check the flags against each other, and against tables that take long to import."""
        if getattr(args, "model_type", None) is not None and not args.demo:
            check_choice("--model_type", args.model_type, self.model_types())
        check_training(args, self.check_data)
        if not args.demo:
            check_tables(args)

    def run(self, args: Namespace) -> dict:
        """Check parsed flags and run; returns the same as `main`."""
        self.check(args)
        return self.work(args)

    def work(self, args: Namespace) -> dict:
        """Run with checked flags; returns the same as `main`."""
        if args.demo:
            return self.demo.main(self.main, None if args.demo is True else args.demo)
        with launched(args) as accelerator:  # the output folder is reserved from here on
            data = self.load_data(args)
            session = Session.begin(args, data, accelerator)  # from the beginning, or from a checkpoint
            return Run(self.learner(session, data)).complete()


def load_glue(args: Namespace) -> glue.Data:
    """Read the examples from files, from a folder in GLUE's format, or from the Hub, as the flags say."""
    if args.task_name is None:
        files = args.train_file, args.validation_file, args.test_file if args.do_predict else None
        data = glue.from_files(*files, args.label_column, args.skip_bad_rows, args.text_columns)
    elif args.data_dir:
        data = glue.from_folder(args.task_name, args.data_dir, test=args.do_predict, skip_bad_rows=args.skip_bad_rows)
    else:
        data = glue.from_hub(args.task_name, test=args.do_predict)
    return data.first({"train": args.max_train_samples, "validation": args.max_eval_samples})


def load_images(args: Namespace) -> glue.Data:
    """Read the folders of images; every image is opened once, so that a broken one is reported before training."""
    folders = {split: getattr(args, f"{split}_dir") for split in ("train", "validation", "test")}
    first = PartialState().is_main_process  # only one of several processes shows a bar
    data = images.from_folders({split: path for split, path in folders.items() if path}, show_progress=first)
    return data.first({"train": args.max_train_samples, "validation": args.max_eval_samples})


def load_pairs(args: Namespace) -> parallel.Corpus:
    """Read the sentence pairs from the Hub or from files, as the flags say."""
    if args.dataset_name:
        splits = ["train", "validation", *(["test"] if args.do_predict else [])]
        corpus = parallel.from_hub(
            args.dataset_name, args.dataset_config_name, args.source_lang, args.target_lang, splits=splits
        )
    else:
        files = {split: getattr(args, f"{split}_file") for split in ("train", "validation", "test")}
        given = {split: paths for split, paths in files.items() if paths}
        corpus = parallel.from_files(given, args.source_lang, args.target_lang)
    return corpus.first({"train": args.max_train_samples, "validation": args.max_eval_samples})


GLUE = Task("glue", tasks.check_glue, load_glue, Classifier.load, demos.GLUE)
TRANSLATION = Task("translate", tasks.check_translation, load_pairs, Translator.load, demos.TRANSLATION, blueprints)
IMAGES = Task("images", tasks.check_images, load_images, ImageClassifier.load, demos.IMAGES, image_blueprints)
run_glue, run_translate, run_images = GLUE.run, TRANSLATION.run, IMAGES.run
