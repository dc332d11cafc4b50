"""Change the heads of a run's model before, during and after its last training."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch.optim import Optimizer
from transformers import PreTrainedModel

from collab_heads.analysis.inspect import inspect
from collab_heads.base.processes import agreed
from collab_heads.contract.registry import get_adapter
from collab_heads.errors import CollabHeadsError, OutputError
from collab_heads.files.reading import WRONG
from collab_heads.heads.fold import fold_heads
from collab_heads.heads.gating import gated_sites
from collab_heads.heads.penalty.head_penalty import HeadPenalty
from collab_heads.rotation.head_rotation import HeadRotation
from collab_heads.sites.record import CollabConfig
from collab_heads.training.loop.steps import HeadRates, TrainingSteps
from collab_heads.training.loop.training import Hooks
from collab_heads.training.options.heads import acts_in_training, learns_gates, wants_gates
from collab_heads.training.runs import head_changes
from collab_heads.training.runs.analysis import GateRecorder, HeadWatch, save_report, save_statistics
from collab_heads.training.runs.head_changes import check_rotating_sites, rotation_of
from collab_heads.training.runs.learner import Learner
from collab_heads.training.storage.checkpoint import RESUME


class HeadSteps:
    """The gates, alphas and rotation of a run.

    Args:
        learner: its model has the heads.
        steps: of the last training, the one in which heads change.

    Attributes:
        record: what was done to the heads, for the results.
        importance: of every head, from which the learning of gates begins; None without.
        recorder: of the gates over the training, for the report; None without.
        rotation: exchanges heads before epochs; None without.
        watch: records the heads over all trainings; None without.
    """

    def __init__(self, learner: Learner, steps: TrainingSteps):
        self.learner = learner
        self.session = learner.session
        self.steps = steps
        self.args = learner.session.args
        self.record: dict = self.session.progress.get("heads", {})
        self.importance: Mapping | None = None
        self.recorder: GateRecorder | None = None
        self.rotation = self.planned_rotation()
        noted = self.session.progress.get("head_history")
        self.watch = HeadWatch(learner, self.rotation, noted) if self.args.analyze_every else None

    def planned_rotation(self) -> HeadRotation | None:
        """Return the rotation that the flags describe, checked against model and epochs; None without one."""
        rotation = rotation_of(self.args, self.learner.end_tokens)
        if rotation is not None:
            rotation.check(self.learner.model, self.steps.epochs_begun)
            if self.session.checkpoint is None:
                check_rotating_sites(self.args, self.learner.model, rotation)
            if (folder := self.session.checkpoint) is not None:
                if (state := self.session.progress.get("rotation")) is None:
                    raise OutputError(f"{RESUME}: {folder} is damaged: it does not say which heads have changed places")
                rotation.load_state_dict(state)
        return rotation

    def choose(self) -> bool:
        """Put gates on the heads, or choose heads and remove the others at once; return True if pruned."""
        if not wants_gates(self.args):
            return False
        common = self.session.accelerator, self.args, self.learner.model, self.labelled_samples
        report = head_changes.choose_heads(*common)
        if learns_gates(self.args):
            self.importance = head_changes.importance_before_training(*common)
        if report is None:
            return False
        self.session.accelerator.print(report)
        self.record["fixed" if learns_gates(self.args) else "pruned"] = report.to_dict()
        return True

    def labelled_samples(self, count: int) -> Sequence[Mapping]:
        """Return batches of training examples with labels, on which importance is measured."""
        return self.learner.samples(count, labels=True)

    def mix(self) -> None:
        """Put alphas on the heads, and check the rotation again, since heads may have been removed or gated."""
        if self.args.alpha_mixing:
            head_changes.put_alphas(self.args, self.learner.model)
        if self.rotation is not None:
            self.rotation.check(self.learner.model, self.steps.epochs_begun)

    def add_to(self, hooks: Hooks) -> Hooks:
        """Return the hooks of the last training with the penalty, the rotation and the recorder of gates."""
        self.record_gates()
        args = self.args
        learns = learns_gates(args) or acts_in_training(args)
        return replace(
            hooks,
            penalty=self.penalty if learns else None,
            rates=HeadRates(gate_lr=args.gate_learning_rate, alpha_lr=args.alpha_learning_rate),
            before_epoch=None if self.rotation is None else self.rotate,
            after_step=self.recorder,
        )

    def watched(self, hooks: Hooks, stage: str, before: int) -> Hooks:
        """Return a training's hooks with measurements of heads, if asked for; `before`: steps of the run before it."""
        return hooks if self.watch is None else self.watch.added_to(hooks, stage, before)

    def record_gates(self) -> None:
        """Start to record how open the gates are, if the report will show it; a resumed record is continued."""
        model = self.learner.model
        if self.args.analyze and learns_gates(self.args) and gated_sites(model, get_adapter(model)):
            noted = self.session.progress.get("gates_over_training")
            try:
                self.recorder = GateRecorder(model, self.steps.total, noted)
                if noted is not None and self.recorder.history.moments[-1].step > self.session.progress["step"]:
                    raise ValueError("they go on after its step")
            except (CollabHeadsError, *WRONG) as error:
                raise OutputError(f"{RESUME}: its gates_over_training are damaged: {error!r:.200}") from error

    def penalty(self, total: int) -> HeadPenalty | None:
        """Return the penalty of a training of `total` optimizer steps; None if the heads that it was for are gone."""
        options = head_changes.alpha_options(self.args, self.learner.model, total)
        if learns_gates(self.args):
            options |= head_changes.gate_options(self.args, total, self.importance)
        return None if all(value is None for value in options.values()) else HeadPenalty(self.learner.model, **options)

    def rotate(self, model: PreTrainedModel, epoch: int, optimizer: Optimizer) -> None:
        """Exchange heads before an epoch; the first process chooses the pairs for all."""
        rotation, accelerator = self.rotation, self.session.accelerator
        if rotation is None:
            return
        pairs = agreed(accelerator, lambda: rotation.plan(model, epoch, self.learner.validation()))
        rotation.apply(model, epoch=epoch, optimizer=optimizer, pairs=pairs)
        if pairs:
            named = ", ".join(f"{first} with {second}" for first, second in pairs)
            accelerator.print(f"epoch {epoch}: {len(pairs)} pairs of heads changed places: {named}")

    def finish(self) -> bool:
        """Record what became of the heads, and remove those that training closed; return True if gates were learned."""
        model = self.learner.model
        removes = learns_gates(self.args)
        if self.args.alpha_mixing:
            self.record["alphas"] = inspect(model).alphas.to_dict()  # gates that are removed take them into W_O
        if removes:
            gates, report = head_changes.remove_closed_heads(model)
            self.session.accelerator.print(report)
            self.record |= {"gates": gates, "pruned": report.to_dict()}
        if self.rotation is not None:
            self.record["rotation"] = self.rotation.history
        return removes

    def show(self, before: int = 0) -> None:
        """Show the heads of the final model, and over the trainings, as far as the flags ask for it.

        Args:
            before: optimizer steps of the run before its last training.
        """
        if self.watch is not None:
            self.watch.draw(self.exchanges(before))
        save_statistics(self.learner)
        save_report(self.learner, None if self.recorder is None else self.recorder.history)

    def exchanges(self, before: int) -> dict[str, list[int]]:
        """Return the optimizer steps of the run after which heads changed places: role -> steps."""
        if self.rotation is None:
            return {}
        model = self.learner.model
        roles: dict[str, str] = {site.path: site.role for site in get_adapter(model).sites(model)}
        steps: dict[str, set[int]] = {}
        for entry in self.rotation.history:
            step = before + sum(len(self.steps.of_epoch(epoch)) for epoch in range(entry["epoch"] - 1))
            for (path, _), _ in entry["pairs"]:
                steps.setdefault(roles[path], set()).add(step)
        return {role: sorted(of_role) for role, of_role in steps.items()}

    def fold(self) -> bool:
        """Fold the heads into a stock model, if asked for and needed; return True if this was done."""
        model = self.learner.model
        if not (self.args.fold_heads and CollabConfig.on(model).states):
            return False
        report = fold_heads(model)
        self.session.accelerator.print(report)
        self.record["folded"] = report.to_dict()
        return True

    def state(self) -> dict:
        """Return the state of the heads that a checkpoint needs to resume."""
        return {
            "heads": self.record,
            "rotation": self.rotation and self.rotation.state_dict(),
            "gates_over_training": self.recorder and self.recorder.state(),
            "head_history": self.watch and self.watch.state(),
        }
