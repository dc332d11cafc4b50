"""Measure and show the heads of a run's model, over its trainings and at its end."""

from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.analysis.analyze import analyze_heads
from collab_heads.analysis.measures.ablation import mean_loss
from collab_heads.analysis.measures.head_scores import SAME, head_scores
from collab_heads.analysis.measures.sentences import Sentences
from collab_heads.analysis.measures.statistics import head_statistics
from collab_heads.base.checks import check_choice
from collab_heads.base.option_values import Metric
from collab_heads.base.processes import agreed
from collab_heads.base.report import portable_name
from collab_heads.contract.registry import get_adapter, head_numbers
from collab_heads.errors import ArgumentError, DataError, OutputError
from collab_heads.heads.alpha import mixed_sites
from collab_heads.heads.gating import gated_sites
from collab_heads.heads.history import ALPHAS, GATES, HeadHistory, Moment
from collab_heads.plots.canvas import png_bytes, svg_bytes
from collab_heads.plots.history import history_curves, history_gif, history_strip
from collab_heads.rotation.head_rotation import HeadRotation
from collab_heads.training.loop.training import Hooks
from collab_heads.training.options.heads import LOSS, treebank
from collab_heads.training.runs.learner import Learner
from collab_heads.training.storage.checkpoint import RESUME
from collab_heads.training.storage.output import HISTORY, REPORT, STATISTICS

RECORDS = 100  # of the gates, over a training


class GateRecorder:
    """A recorder of how open the gates of a model are, about a hundred times over a training.

    Args:
        model: with gates.
        steps: optimizer steps of the training.
        state: from `state`, of the recorder that this one resumes.

    Attributes:
        history: the record so far.
    """

    def __init__(self, model: PreTrainedModel, steps: int, state: Iterable | None = None):
        adapter = get_adapter(model)
        numbers = head_numbers(model, adapter)
        self.sites = gated_sites(model, adapter)
        self.every = max(1, steps // RECORDS)
        self.last_step = steps
        sites = tuple(site for site, _ in self.sites)
        self.history = HeadHistory(sites, {site.path: numbers[site.path] for site in sites})
        for step, rows in state or ():
            self.record(step, rows)
        if state is None:
            self.note(0)

    def __call__(self, step: int) -> None:
        """Record the gates after an optimizer step, if a record is due."""
        if step % self.every == 0 or step == self.last_step:
            self.note(step)

    def note(self, step: int) -> None:
        """Record how open the gates are after `step` optimizer steps."""
        with torch.no_grad():
            self.record(step, {site.path: gates.open_probability() for site, gates in self.sites})

    def record(self, step: int, rows: Mapping[str, Tensor]) -> None:
        self.history = self.history.record(Moment(step, 0, "training"), {GATES: rows})

    def state(self) -> list:
        """Return the record for the argument `state` of a resumed recorder, ready for JSON."""
        return [
            [moment.step, {path: rows[index].tolist() for path, rows in self.history.values[GATES].items()}]
            for index, moment in enumerate(self.history.moments)
        ]


def save_statistics(learner: Learner) -> None:
    """Measure the heads of the final model on validation examples and save the result, if asked to."""
    session = learner.session
    if not session.args.save_head_statistics:
        return
    batches = learner.validation(generated=True)  # all processes take part in generation
    if output := session.writes_to:
        statistics = head_statistics(learner.model, batches, exclude=learner.end_tokens)
        session.accelerator.print(statistics)
        output.write_folder(STATISTICS, statistics.save)


def check_ablation(learner: Learner) -> None:
    """Check that this run can measure the metric of `--analyze_ablation` without each of its heads."""
    metric = learner.session.args.analyze_ablation
    if not metric or metric == LOSS:
        return
    check_choice("--analyze_ablation", metric, [LOSS, *learner.metrics])
    if learner.session.accelerator.num_processes > 1:
        raise ArgumentError(f"--analyze_ablation {metric} is for one process; {LOSS} can be measured in any run")


def shown_batches(learner: Learner) -> Iterable[Mapping]:
    """Return batches of the validation examples that heads are measured on: all, or as many as the flag says."""
    batches, count = list(learner.validation()), learner.session.args.analyze_samples
    return Sentences(batches).first(count) if count else batches


def save_report(learner: Learner, gate_history: HeadHistory | None) -> None:
    """Analyze the final model on the validation examples and write the report, if asked to."""
    session, args = learner.session, learner.session.args
    if not args.analyze or (output := session.writes_to) is None:
        return
    if not get_adapter(learner.model).sites_with_heads(learner.model):
        session.accelerator.print("no heads are left: there is nothing to report on them")
        return
    batches = list(shown_batches(learner))
    metric = args.analyze_ablation
    ablation: dict[str, Any] = {}
    if metric == LOSS:
        ablation = {"evaluate": lambda model: mean_loss(model, batches)}
    elif metric:
        ablation = {
            "evaluate": lambda model: learner.measure(model)[metric],
            "metric": metric,
            "higher_is_better": True,
        }
    report = analyze_heads(
        learner.model,
        batches,
        tokenizer=learner.tokenizer,
        treebank=treebank(args),
        exclude=learner.end_tokens,
        gate_history=gate_history,
        prefixes=getattr(args, "analyze_prefixes", None) or "reference",  # a flag of translation alone
        **ablation,
        data=f"validation examples of {described(args, learner.task)}",
    )
    session.accelerator.print(report)
    session.accelerator.print(f"report on the heads: {output.write_folder(REPORT, report.save)}")


def described(args: Namespace, task: str | None) -> str:
    """Return what the validation examples are of: the user's files, or a task."""
    given = getattr(args, "validation_file", None) or getattr(args, "validation_dir", None) or str(task)
    return " and ".join(portable_name(str(name)) for name in ([given] if isinstance(given, str | Path) else given))


SERIES = "head_history.json"


class HeadWatch:
    """A record of the heads over the trainings of a run: confidence, gates and alphas, every few optimizer steps.

    Args:
        learner: its model has the heads.
        rotation: of the run; the metrics by which it ranks heads are recorded, too.
        noted: from `state`, of the run that is resumed; None without one.

    Attributes:
        history: the record; None before the first measurement, and if there are no heads.
        batches: those that heads are measured on; empty before the first measurement.
    """

    def __init__(self, learner: Learner, rotation: HeadRotation | None, noted: Mapping | None):
        self.learner, self.session = learner, learner.session
        self.metrics = watched_metrics(rotation)
        self.batches: list[Mapping] = []
        try:
            self.history = None if noted is None else HeadHistory.from_dict(noted)
        except DataError as error:
            raise OutputError(f"{RESUME}: what it records of heads over the training is damaged: {error}") from error

    def added_to(self, hooks: Hooks, stage: str, before: int) -> Hooks:
        """Return a training's hooks with measurements of the heads; `before`: optimizer steps of the run before it."""
        note = partial(self.note, stage, before)
        return replace(hooks, look=note, look_every=self.session.args.analyze_every)

    def note(self, stage: str, before: int, model: PreTrainedModel, epoch: int, step: int) -> None:
        """Measure the heads of a model; the first process does so for all."""
        moment = Moment(before + step, epoch, stage)
        agreed(self.session.accelerator, lambda: self.look(model, moment))

    def look(self, model: PreTrainedModel, moment: Moment) -> None:
        """Measure the heads, add the values to the history and write it."""
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
            values[GATES] = {site.path: gates.open_probability() for site, gates in gated_sites(model, adapter)}
        values[ALPHAS] = {site.path: alphas.alpha for site, alphas in mixed_sites(model, adapter)}
        present = {name: of_sites for name, of_sites in values.items() if of_sites}
        self.history = self.history.record(moment, present, numbers)
        self.write()

    def write(self) -> None:
        """Write the history; its file is replaced as a whole."""
        if self.history is not None and (output := self.session.writes_to):
            output.write(f"{HISTORY}/{SERIES}", self.history.to_json().encode())

    def draw(self, exchanges: Mapping[str, Sequence[int]]) -> None:
        """Draw the history at the end of a run and print its folder; `exchanges`: as `history_curves` takes them."""
        if (output := self.session.writes_to) is None:
            return
        if self.history is None:
            self.session.accelerator.print("no heads are left: there is no history of them")
            return
        self.write()  # a resumed run that had nothing left to do
        for measure in self.history.values:
            figures = {measure: history_curves(self.history, measure, exchanges=exchanges)}
            if measure != ALPHAS:
                figures[f"{measure}_by_head"] = history_strip(self.history, measure)
            for name, figure in figures.items():
                output.write(f"{HISTORY}/{name}.png", png_bytes(figure))
                output.write(f"{HISTORY}/{name}.svg", svg_bytes(figure))
        if self.history.where(GATES):
            output.write(f"{HISTORY}/{GATES}.gif", history_gif(self.history, GATES))
        self.session.accelerator.print(f"heads over the training: {output.path / HISTORY}")

    def state(self) -> dict | None:
        """Return the history for a checkpoint; None without one."""
        return None if self.history is None else self.history.to_dict()


def watched_metrics(rotation: HeadRotation | None) -> list[Metric]:
    """Return the metrics to record: confidence and those by which a rotation ranks heads, each once."""
    settings = [] if rotation is None else list(rotation.role_settings.values())
    names: list[str] = ["confidence"]
    names += [each.metric for each in settings if each.ranks]
    return cast(list[Metric], list(dict.fromkeys(SAME.get(name, name) for name in names)))
