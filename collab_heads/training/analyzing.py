"""What the scripts do to show the heads of the model that they end with: `--analyze`."""

import argparse
from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from collab_heads.analysis.analyze import analyze_heads
from collab_heads.analysis.conllu import Sentence, read_conllu
from collab_heads.analysis.gate_history import GateHistory
from collab_heads.analysis.plots import check_matplotlib
from collab_heads.analysis.present import head_numbers
from collab_heads.analysis.sentences import Sentences
from collab_heads.errors import ArgumentError
from collab_heads.heads.gating import gated_sites
from collab_heads.naming import portable
from collab_heads.registry import get_adapter
from collab_heads.training.arguments import count_from_1, path
from collab_heads.training.output import REPORT

if TYPE_CHECKING:
    from collab_heads.training.run import Run

RECORDS = 100  # of the gates, over a training
ABLATION = ("statistics", "roles", "relevance", "gradient", "ablation")


def add_analysis_arguments(parser: argparse.ArgumentParser) -> None:
    """What is shown of the heads."""
    group = parser.add_argument_group("looking at heads")
    group.add_argument(
        "--analyze", action="store_true", help="a report on the heads at the end: tables and pictures in head_report/"
    )
    group.add_argument("--analyze_samples", type=count_from_1, metavar="N", help="validation examples for it; all")
    group.add_argument(
        "--analyze_treebank",
        type=path,
        metavar="FILE",
        help="CoNLL-U, in the input's language: heads that find dependencies",
    )
    group.add_argument(
        "--analyze_ablation", action="store_true", help="also the loss without each head: an evaluation per head"
    )


def check_analysis(args: Namespace) -> None:
    """Check what can be checked without model and data; a treebank is read once.

    Raises:
        ArgumentError: on flags without effect.
        DataError: if the treebank is missing or broken.
        MissingPackageError: if there is no matplotlib to draw with.
    """
    for flag in ("analyze_samples", "analyze_treebank", "analyze_ablation"):
        if getattr(args, flag) and not args.analyze:
            raise ArgumentError(f"--{flag} has no effect without --analyze")
    if args.analyze:
        if args.output_dir is None:
            raise ArgumentError("--analyze needs --output_dir")
        check_matplotlib()
    treebank(args)


def treebank(args: Namespace) -> list[Sentence] | None:
    """The sentences of the treebank; None without."""
    return read_conllu(args.analyze_treebank) if args.analyze_treebank else None


class GateRecorder:
    """Notes how open the gates of a model are, some hundred times over a training.

    Args:
        model: with gates.
        steps: optimizer steps of the training.
        state: of a recorder that this one goes on from.
    """

    def __init__(self, model: PreTrainedModel, steps: int, state: Mapping | None = None):
        adapter = get_adapter(model)
        self.sites, numbers = gated_sites(model, adapter), head_numbers(model, adapter)
        self.every, self.last = max(1, steps // RECORDS), steps
        sites = tuple(site for site, _ in self.sites)
        self.history = GateHistory(sites, {site.path: numbers[site.path] for site in sites})
        for step, row in state or ():
            self.history = self.history.record(step, row)
        if state is None:
            self.note(0)

    def __call__(self, step: int) -> None:
        """After an optimizer step."""
        if step % self.every == 0 or step == self.last:
            self.note(step)

    def note(self, step: int) -> None:
        """Add how open they are now."""
        with torch.no_grad():
            rows = {site.path: projection.gates.open_probability() for site, projection in self.sites}
        self.history = self.history.record(step, rows)

    def state(self) -> list:
        """What `state` takes, ready for JSON."""
        return [
            [step, {path: rows[place].tolist() for path, rows in self.history.probabilities.items()}]
            for place, step in enumerate(self.history.steps)
        ]


def save_report(run: "Run", exclude: list[int]) -> None:
    """Analyze the final model on the validation examples and write the report, if asked to."""
    args = run.args
    if not (args.analyze and run.accelerator.is_main_process):
        return
    if not get_adapter(run.model).sites_with_heads(run.model):
        run.accelerator.print("no heads are left: there is nothing to report on them")
        return
    batches = list(run.validation())
    if args.analyze_samples:
        batches = list(Sentences(batches).first(args.analyze_samples))
    report = analyze_heads(
        run.model,
        batches,
        parts=ABLATION if args.analyze_ablation else None,
        tokenizer=run.tokenizer,
        treebank=treebank(args),
        exclude=exclude,
        gate_history=None if run.recorder is None else run.recorder.history,
        data=f"validation examples of {portable(str(run.task))}",
    )
    run.accelerator.print(report)
    run.accelerator.print(f"report on the heads: {run.output.write_folder(REPORT, report.save)}")
