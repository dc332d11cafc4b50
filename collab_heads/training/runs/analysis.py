"""What a run does to show the heads of the model that it ends with."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.analysis.analyze import analyze_heads
from collab_heads.analysis.measures.gate_history import GateHistory
from collab_heads.analysis.measures.head_history import ALPHAS, HeadHistory, Moment
from collab_heads.analysis.measures.head_scores import SAME, head_scores
from collab_heads.analysis.measures.sentences import Sentences
from collab_heads.analysis.measures.statistics import head_statistics
from collab_heads.analysis.plots.canvas import png_bytes, svg_bytes
from collab_heads.analysis.plots.head_history import history_curves, history_gif, history_strip
from collab_heads.base.checks import check_choice
from collab_heads.base.display import portable_name
from collab_heads.base.option_values import Metric, ReportPart
from collab_heads.command.flags.analyzing import ABLATION, LOSS, treebank
from collab_heads.contract.registry import get_adapter, head_numbers
from collab_heads.errors import ArgumentError, DataError, OutputError
from collab_heads.heads.alpha import mixed_sites
from collab_heads.heads.gating import gated_sites
from collab_heads.training.loop.training import Hooks
from collab_heads.training.runs.head_changes import Rotation
from collab_heads.training.runs.learner import Learner
from collab_heads.training.storage.checkpoint import RESUME
from collab_heads.training.storage.output import HISTORY, REPORT, STATISTICS
from collab_heads.training.storage.reservation import agreed

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


SERIES = "head_history.json"


class HeadWatch:
    """Notes how sure heads are, how open their gates are and how they are mixed, every so many optimizer steps.

    Args:
        learner: whose model's heads they are.
        rotation: of the run; what it ranks heads by is noted, too.
        noted: from `state`, of a run that this one goes on from.

    Attributes:
        history: what was noted; None before the first time, and if there are no heads.
        batches: what heads are measured on, once that is known.

    Raises:
        OutputError: if `noted` is damaged.
    """

    def __init__(self, learner: Learner, rotation: Rotation | None, noted: Mapping | None):
        self.learner, self.session = learner, learner.session
        self.metrics = watched_metrics(rotation)
        self.batches: list[Mapping] = []
        try:
            self.history = None if noted is None else HeadHistory.from_dict(noted)
        except DataError as error:
            raise OutputError(f"{RESUME}: what it records of heads over the training is damaged: {error}") from error

    def added_to(self, hooks: Hooks, stage: str, before: int) -> Hooks:
        """The hooks of a training, with looks at the heads; `before` it the run took so many optimizer steps."""
        note = partial(self.note, stage, before)
        return replace(hooks, look=note, look_every=self.session.args.analyze_every)

    def note(self, stage: str, before: int, model: PreTrainedModel, epoch: int, step: int) -> None:
        """Look at the heads of a model; the first process looks for all."""
        moment = Moment(before + step, epoch, stage)
        agreed(self.session.accelerator, lambda: self.look(model, moment))

    def look(self, model: PreTrainedModel, moment: Moment) -> None:
        """Measure, and write what is known so far."""
        adapter = get_adapter(model)
        sites, numbers = adapter.sites_with_heads(model), head_numbers(model, adapter)
        if self.history is None:
            if not sites:
                return
            self.history = HeadHistory(tuple(sites), {site.path: numbers[site.path] for site in sites})
        values: dict[str, Mapping[str, Tensor]] = {}
        if sites:
            self.batches = self.batches or list(shown_batches(self.learner))
            values.update(head_scores(model, self.batches, self.metrics, exclude=self.learner.end_tokens))
        with torch.no_grad():
            values["gates"] = {site.path: gates.open_probability() for site, gates in gated_sites(model, adapter)}
        values[ALPHAS] = {site.path: alphas.alpha for site, alphas in mixed_sites(model, adapter)}
        present = {name: of_sites for name, of_sites in values.items() if of_sites}
        self.history = self.history.record(moment, present, numbers)
        self.write()

    def write(self) -> None:
        """Write the series as it is now; a file that is there is whole at every moment."""
        if self.history is not None and (output := self.session.writes_to):
            output.write(f"{HISTORY}/{SERIES}", self.history.to_json().encode())

    def draw(self, exchanges: Mapping[str, Sequence[int]]) -> None:
        """Draw what was noted, at the end of a run, and say where; `exchanges`: as `history_curves` takes them."""
        if self.history is None or (output := self.session.writes_to) is None:
            return
        self.write()  # a resumed run that had nothing left to do
        for measure in self.history.values:
            figures = {measure: history_curves(self.history, measure, exchanges=exchanges)}
            if measure != ALPHAS:
                figures[f"{measure}_by_head"] = history_strip(self.history, measure)
            for name, figure in figures.items():
                output.write(f"{HISTORY}/{name}.png", png_bytes(figure))
                output.write(f"{HISTORY}/{name}.svg", svg_bytes(figure))
            output.write(f"{HISTORY}/{measure}.gif", history_gif(self.history, measure))
        self.session.accelerator.print(f"heads over the training: {output.path / HISTORY}")

    def state(self) -> dict | None:
        """What a checkpoint must know to go on."""
        return None if self.history is None else self.history.to_dict()


def watched_metrics(rotation: Rotation | None) -> list[Metric]:
    """Confidence, and what a rotation ranks heads by; each once, under its first name."""
    settings = getattr(rotation, "role_settings", {}).values()
    names = ["confidence", *(each.metric for each in settings if each.ranks)]
    return list(dict.fromkeys(SAME.get(name, name) for name in names))
