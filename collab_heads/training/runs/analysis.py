"""What a run does to show the heads of the model that it ends with."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from collab_heads.analysis.analyze import analyze_heads
from collab_heads.analysis.measures.gate_history import GateHistory
from collab_heads.analysis.measures.sentences import Sentences
from collab_heads.heads.gating import gated_sites
from collab_heads.registry import get_adapter, head_numbers
from collab_heads.text import portable_name
from collab_heads.training.flags.analyzing import ABLATION, treebank
from collab_heads.training.storage.output import REPORT

if TYPE_CHECKING:
    from collab_heads.training.runs.run import Run

RECORDS = 100  # of the gates, over a training


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
            rows = {site.path: gates.open_probability() for site, gates in self.sites}
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
        data=f"validation examples of {portable_name(str(run.task))}",
    )
    run.accelerator.print(report)
    run.accelerator.print(f"report on the heads: {run.output.write_folder(REPORT, report.save)}")
