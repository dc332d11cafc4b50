"""What a run notes of its heads while it trains: `--analyze_every`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.analysis.measures.head_history import ALPHAS, HeadHistory, Moment
from collab_heads.analysis.measures.head_scores import SAME, head_scores
from collab_heads.analysis.plots.canvas import png_bytes, svg_bytes
from collab_heads.analysis.plots.head_history import history_curves, history_strip
from collab_heads.analysis.plots.moving_heads import history_gif
from collab_heads.errors import DataError, OutputError
from collab_heads.heads.alpha import mixed_sites
from collab_heads.heads.gating import gated_sites
from collab_heads.registry import get_adapter, head_numbers
from collab_heads.training.loop.training import Hooks
from collab_heads.training.runs.analysis import shown_batches
from collab_heads.training.runs.learner import Learner
from collab_heads.training.runs.rotate_heads import Rotation
from collab_heads.training.storage.checkpoint import RESUME
from collab_heads.training.storage.output import HISTORY
from collab_heads.training.storage.reservation import agreed
from collab_heads.words import Metric

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
            values.update(head_scores(model, self.batches, self.metrics, adapter, exclude=self.learner.end_tokens))
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
