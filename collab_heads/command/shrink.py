"""The work of `collab-heads shrink`: the steps of other commands, each kept until all are done."""

import shutil
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, product
from os import path
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from transformers import AutoConfig

import collab_heads
from collab_heads.base.checks import is_number
from collab_heads.base.extras import EXTRAS
from collab_heads.base.report import Report
from collab_heads.command.compressing import Later, distill_on, run_compress
from collab_heads.command.flags import COMMANDS
from collab_heads.command.inputs import generated, load
from collab_heads.command.places import file_and_weight
from collab_heads.command.serving import run_export
from collab_heads.command.shrink_estimate import steps_after
from collab_heads.command.texts import read_data
from collab_heads.command.work import examples, run_trim, write_model
from collab_heads.errors import OutputError
from collab_heads.evaluation.candidates import RUNS, files_of_weights
from collab_heads.evaluation.evaluate import check_task, evaluate
from collab_heads.evaluation.report import EvaluationReport
from collab_heads.files.atomic import write_json
from collab_heads.files.checkpoint import check_same_run
from collab_heads.files.folders import MANIFEST, beside, digest, is_whole, write_folder
from collab_heads.files.reading import parse_json, read_text
from collab_heads.saving.card import complete
from collab_heads.saving.loading import check_device, load_or_explain
from collab_heads.saving.source_files import OF_TEXTS
from collab_heads.serving.export import TARGETS
from collab_heads.sites.state import expect
from collab_heads.training.options.value_types import stored_value

UNFINISHED = ".unfinished"
RECIPE, RECORD, MEASURED = "recipe.json", "shrink.json", "measured.json"
BASELINE = "original in int8"
NAMES = ("trimmed", "compressed", "distilled", *TARGETS, BASELINE)  # of steps
OF_STEPS = ("trim.json", "compression.json", "compression.png", "compression.svg")  # what earlier steps write, too
PARSED = ("1_Pooling/config.json", OF_TEXTS)  # text-embeddings-inference does, in the form that `export` writes
OF_RUN = ("output_dir", "push")  # flags that a recipe does not hold
BASE = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "accelerate")


@dataclass(frozen=True)
class Step:
    """A step that is done.

    Attributes:
        name: its name.
        seconds: its time; of one that was killed and went on, the time after that.
        megabytes: the size of the weights that it wrote, in 10^6 bytes.
        said: its report as a text.
    """

    name: str
    seconds: float
    megabytes: float
    said: str


@dataclass(frozen=True)
class ShrinkReport(Report):
    """The result of `collab-heads shrink`.

    Attributes:
        steps: the steps in their order.
        scores: the original and what each step made, on the task of the user; None if there was none.
        not_scored: the targets whose models `evaluate` does not run on this task.
    """

    steps: tuple[Step, ...]
    scores: EvaluationReport | None
    not_scored: tuple[str, ...] = ()

    ENTRIES = "steps"

    def columns(self):
        return {"step": "{0.name}", "MB": "{0.megabytes:,.1f}", "took": lambda each: duration(each.seconds)}

    def closing(self):
        return f"{duration(sum(each.seconds for each in self.steps))} in all"

    def remarks(self):
        if self.scores is None:
            return []
        return [f"\n{self.scores}", *([without_score(self.not_scored, self.scores.task)] if self.not_scored else [])]


def run_shrink(args: Namespace) -> ShrinkReport:
    """Run the steps, print and write the result, and return the report.

    Every step reads what the one before has written, so a run that goes on after a kill ends as an unbroken one.
    """
    for target in args.to:
        TARGETS[target].check_installed(args.int8 and TARGETS[target].has_int8)
    repository = None if args.push is None else Repository(args.push)
    kept = KeptSteps(beside(Path(path.realpath(args.output_dir)), UNFINISHED), recipe_of(args), origins(args))
    check_device(args.device)
    read_data(args)  # what cannot be read is refused before the work
    if (task := examples(args)) is not None:
        check_task(args.model, task, args.device)
    scored = [target for target in args.to if args.task in RUNS.get(target, ())]
    baseline = None if task is None else next((each for each in scored if TARGETS[each].has_int8), None)
    others = () if task is None else tuple(target for target in args.to if target not in scored)
    if others:
        print(without_score(others, args.task))
    kept.open()
    made, start = {}, args.model  # what is scored: name -> folder
    if args.trim:
        made["trimmed"] = start = kept.folder_of("trimmed", partial(trimmed, args))
    later = steps_after(args, task, scored, baseline)
    compression = partial(compressed, args, start, kept.folder / MEASURED, later)
    made["compressed"] = last = kept.folder_of("compressed", compression)
    if args.distill_steps:
        made["distilled"] = last = kept.folder_of("distilled", partial(distilled, args, start, last, kept.folder))
    for target in args.to:
        int8 = args.int8 and TARGETS[target].has_int8
        place = kept.folder_of(target, partial(exported, args, last, target, int8))
        if target in scored:
            made[f"{target}, int8" if int8 else target] = place
    scores = None
    if args.evaluate is not None:
        if baseline is not None:
            made = {BASELINE: kept.folder_of(BASELINE, partial(exported, args, args.model, baseline, True)), **made}
        reading = {name: getattr(args, name) for name in ("batch_size", "max_length", "source_prefix", "device")}
        scores = evaluate(args.model, made, task=args.task, data=args.evaluate, seed=args.seed, **reading)
    report = ShrinkReport(tuple(kept.steps.values()), scores, others)
    write_result(args, kept, Path(last), report)
    print(report)
    print(f"result: {args.output_dir}")
    if repository is not None:
        repository.upload(args.output_dir)
    return report


def without_score(targets: Sequence[str], task: str) -> str:
    """Return the line that names the targets of no score."""
    return f"without a score: {', '.join(targets)} (collab-heads evaluate does not run them on {task})"


class KeptSteps:
    """Keep the results of the steps of a run in a folder that is deleted when all are done.

    Args:
        folder: holds a folder for each step, and the record of those that are done.
        recipe: the flags of the run.
        more: what else its result depends on: versions, and digests of files.

    Attributes:
        steps: name -> step, of those that are done.
    """

    def __init__(self, folder: Path, recipe: Mapping[str, Any], more: Mapping[str, Any]):
        self.folder, self.recipe, self.more = folder, recipe, more
        self.steps: dict[str, Step] = {}

    def open(self) -> None:
        """Make the folder, or read which steps are done.

        Raises:
            OutputError: if the folder is not ours, or is of another run.
        """
        if not self.folder.exists():
            self.folder.mkdir(parents=True)
            self.note()
            return
        way_out = f"or delete {self.folder} to begin again"
        try:
            record = parse_json(read_text(self.folder / RECORD))
            check_same_run(self.folder, {**record["more"], **record["recipe"]}, {**self.more, **self.recipe})
            self.steps = {each["name"]: checked(Step(**each)) for each in record["steps"]}
        except OutputError as error:  # of another run
            raise OutputError(f"{error}, {way_out}") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise OutputError(f"{self.folder} is in the way, and no unfinished run ({error!r}): move it") from error
        if self.steps:
            print(f"going on after {', '.join(self.steps)}: {self.folder}")

    def note(self) -> None:
        steps = [each.__dict__ for each in self.steps.values()]
        write_json(self.folder / RECORD, {"recipe": self.recipe, "more": self.more, "steps": steps})

    def folder_of(self, name: str, work: Callable[[str], object]) -> str:
        """Return the folder of a step, after its work if that is not done yet."""
        place = self.folder / name
        if name not in self.steps or not is_whole(place):
            print(f"\n{name}", flush=True)
            shutil.rmtree(place, ignore_errors=True)  # written, but not noted
            started = time.perf_counter()
            said = str(work(str(place)))
            size = sum(file.stat().st_size for file in files_of_weights(place)) / 1e6
            self.steps[name] = Step(name, time.perf_counter() - started, size, said)
            self.note()
        return str(place)


def checked(step: Step) -> Step:
    """Return a step that was read from a record; ValueError for what no step is."""
    expect(step.name in NAMES, "name", step.name, f"one of {', '.join(NAMES)}")
    numbers = step.seconds, step.megabytes
    expect(all(is_number(each) and each >= 0 for each in numbers), "numbers", numbers, "finite ones, 0 or more")
    expect(isinstance(step.said, str), "said", step.said, "a text")
    return step


def as_command(name: str, args: Namespace, **own: Any) -> Namespace:
    """Return the flags of another command: `own`, else those of `args` of the same name, else its defaults."""
    defaults = {each.dest: each.default for each in COMMANDS[name].parser()._actions if each.dest != "help"}
    return Namespace(**{flag: getattr(args, flag, default) for flag, default in defaults.items()} | own)


def trimmed(args: Namespace, place: str) -> object:
    return run_trim(as_command("trim", args, output_dir=place))


def compressed(args: Namespace, source: str, measurements: Path, later: Sequence[Later], place: str) -> object:
    """Compress a model; the score is asked for only where it bounds the size."""
    own = {"model": source, "output_dir": place, "measurements": measurements, "distill_steps": 0}
    if args.max_loss is None:
        own |= {"evaluate": None, "task": None}
    return run_compress(as_command("compress", args, **own), "shrink", later)


def exported(args: Namespace, source: str, target: str, int8: bool, place: str) -> object:
    return run_export(as_command("export", args, model=source, output_dir=place, to=target, int8=int8))


def distilled(args: Namespace, original: str, small: str, progress: Path, place: str) -> object:
    """Train the compressed model to be like the one before it, and write it."""
    first, loaded = (load(Namespace(**{**vars(args), "model": each})) for each in (original, small))
    report = distill_on(args, loaded.model, first, read_data(args), generated(args, first), output_dir=progress)
    write_model(Namespace(model=small, output_dir=place), loaded, "distillation", report)
    return report


def recipe_of(args: Namespace) -> dict[str, Any]:
    """Return the flags that were given, as a file of flags holds them."""
    defaults = {each.dest: each.default for each in COMMANDS["shrink"].parser()._actions}
    given = {name: value for name, value in vars(args).items() if name not in OF_RUN and value != defaults[name]}
    return {name: stored_value(value) for name, value in given.items() if value not in (None, [])}


def origins(args: Namespace) -> dict[str, Any]:
    """Return the versions of the packages that work, and the digests of the files that are read."""
    packages = dict.fromkeys(
        chain(BASE, *(EXTRAS.get(getattr(TARGETS[target], "engine", target), ()) for target in args.to))
    )
    versions = {"collab_heads": collab_heads.__version__}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # only some steps need it
            continue
    files = [file_and_weight(name)[0] for name in args.data] + list(args.evaluate or ())
    model = sorted(Path(args.model).glob("*.safetensors")) if path.isdir(args.model) else []
    return {
        "versions": versions,
        "files": {file: digest(Path(file))["sha256"] for file in files},
        "weights": {file.name: digest(file)["sha256"] for file in model},
    }


def write_result(args: Namespace, kept: KeptSteps, model: Path, report: ShrinkReport) -> None:
    """Write the last checkpoint with its card, the exported models in it, the recipe and the record."""

    def fill(folder: Path) -> None:
        shutil.copytree(model, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST))
        for step, name in product(kept.steps, OF_STEPS):
            if step not in args.to and (kept.folder / step / name).exists():
                shutil.copy(kept.folder / step / name, folder)
        for target in args.to:
            shutil.copytree(kept.folder / target, folder / target)
            for name in PARSED if TARGETS[target].embeds else ():
                if (folder / name).exists() and (folder / target / name).exists():
                    shutil.copy(folder / target / name, folder / name)
        config = load_or_explain(AutoConfig, str(model), trust_remote_code=args.trust_remote_code)
        complete(config, folder, report="\n\n".join([*(each.said for each in report.steps), str(report)]))
        write_json(folder / RECIPE, kept.recipe)
        write_json(
            folder / RECORD,
            {"recipe": kept.recipe, **kept.more, "threads": torch.get_num_threads(), **report.to_dict()},
        )

    size = sum(file.stat().st_size for name in (model.name, *args.to) for file in (kept.folder / name).rglob("*"))
    write_folder(Path(path.realpath(args.output_dir)), fill, size)
    shutil.rmtree(kept.folder)


class Repository:
    """A repository of the Hub, that of the user's token.

    Raises:
        OutputError: if nobody is logged in there, before any work.
    """

    def __init__(self, name: str):
        self.name, self.api = name, HfApi()
        try:
            self.api.whoami()
        except Exception as error:  # of huggingface_hub, of the network
            raise OutputError(f"--push {name}: the Hub does not know who you are ({error}): hf auth login") from error

    def upload(self, folder: str) -> None:
        """Upload all files of a folder; the repository is made, private, if it does not exist."""
        try:
            name = self.api.create_repo(self.name, private=True, exist_ok=True).repo_id
            self.api.upload_folder(repo_id=name, folder_path=folder)
        except Exception as error:  # of huggingface_hub, of the network
            raise OutputError(
                f"--push {self.name}: {error}. The result is complete: hf upload {self.name} {folder}"
            ) from error
        print(f"uploaded: {name}")


def duration(seconds: float) -> str:
    """Format a time: 0:07, 12:30, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
