"""What a run does to show the heads of the model that it ends with."""

from collections.abc import Iterable, Mapping

import torch
from transformers import PreTrainedModel

from collab_heads.analysis.analyze import analyze_heads
from collab_heads.analysis.measures.gate_history import GateHistory
from collab_heads.analysis.measures.sentences import Sentences
from collab_heads.analysis.measures.statistics import head_statistics
from collab_heads.checks import check_choice
from collab_heads.errors import ArgumentError
from collab_heads.heads.gating import gated_sites
from collab_heads.registry import get_adapter, head_numbers
from collab_heads.text import portable_name
from collab_heads.training.flags.analyzing import ABLATION, LOSS, treebank
from collab_heads.training.runs.learner import Learner
from collab_heads.training.storage.output import REPORT, STATISTICS
from collab_heads.words import ReportPart

RECORDS = 100  # of the gates, over a training


class GateRecorder:
    """Notes how open the gates of a model are, some hundred times over a training.

    Args:
        model: with gates.
        steps: optimizer steps of the training.
        state: from `state`, of a recorder that this one goes on from.

    Attributes:
        history: what was noted.
    """

    def __init__(self, model: PreTrainedModel, steps: int, state: Iterable | None = None):
        adapter = get_adapter(model)
        numbers = head_numbers(model, adapter)
        self.sites = gated_sites(model, adapter)
        self.every = max(1, steps // RECORDS)
        self.last_step = steps
        sites = tuple(site for site, _ in self.sites)
        self.history = GateHistory(sites, {site.path: numbers[site.path] for site in sites})
        for step, rows in state or ():
            self.history = self.history.record(step, rows)
        if state is None:
            self.note(0)

    def __call__(self, step: int) -> None:
        """After an optimizer step."""
        if step % self.every == 0 or step == self.last_step:
            self.note(step)

    def note(self, step: int) -> None:
        """Add how open they are now."""
        with torch.no_grad():
            rows = {site.path: gates.open_probability() for site, gates in self.sites}
        self.history = self.history.record(step, rows)

    def state(self) -> list:
        """What `state` takes, ready for JSON."""
        return [
            [step, {path: rows[index].tolist() for path, rows in self.history.probabilities.items()}]
            for index, step in enumerate(self.history.steps)
        ]


def save_statistics(learner: Learner) -> None:
    """Measure the heads on the validation examples, as the final model sees them, if asked to."""
    session = learner.session
    if not session.args.save_head_statistics:
        return
    batches = learner.validation(generated=True)  # all processes generate, where there is something to generate
    if output := session.writes_to:
        statistics = head_statistics(learner.model, batches, exclude=learner.end_tokens)
        session.accelerator.print(statistics)
        output.write_folder(STATISTICS, statistics.save)


def check_ablation(learner: Learner) -> None:
    """Check that a model can be measured without each of its heads as `--analyze_ablation` says.

    Raises:
        ArgumentError: on a metric that the evaluations do not have, or that several processes would have to share.
    """
    metric = learner.session.args.analyze_ablation
    if not metric or metric == LOSS:
        return
    check_choice("--analyze_ablation", metric, [LOSS, *learner.metrics])
    if learner.session.accelerator.num_processes > 1:
        raise ArgumentError(f"--analyze_ablation {metric} is for one process; {LOSS} can be measured in any run")


def shown_batches(learner: Learner) -> Iterable[Mapping]:
    """Batches of the validation examples that heads are looked at on: all, or so many as the flag says."""
    batches, count = list(learner.validation()), learner.session.args.analyze_samples
    return Sentences(batches).first(count) if count else batches


def save_report(learner: Learner, gate_history: GateHistory | None) -> None:
    """Analyze the final model on the validation examples and write the report, if asked to."""
    session, args = learner.session, learner.session.args
    if not args.analyze or (output := session.writes_to) is None:
        return
    if not get_adapter(learner.model).sites_with_heads(learner.model):
        session.accelerator.print("no heads are left: there is nothing to report on them")
        return
    batches = list(shown_batches(learner))
    ablation, prefixes = {}, getattr(args, "analyze_prefixes", None)  # a flag of translation alone
    parts: tuple[ReportPart, ...] | None = None
    if args.analyze_ablation:
        parts = (*ABLATION, "contributions") if prefixes else ABLATION
    if args.analyze_ablation not in (False, LOSS):
        metric = args.analyze_ablation
        ablation = {
            "evaluate": lambda model: learner.measure(model)[metric],
            "metric": metric,
            "higher_is_better": True,
        }
    report = analyze_heads(
        learner.model,
        batches,
        parts=parts,
        tokenizer=learner.tokenizer,
        treebank=treebank(args),
        exclude=learner.end_tokens,
        gate_history=gate_history,
        prefixes=prefixes or "reference",
        **ablation,
        data=f"validation examples of {portable_name(str(learner.task))}",
    )
    session.accelerator.print(report)
    session.accelerator.print(f"report on the heads: {output.write_folder(REPORT, report.save)}")
