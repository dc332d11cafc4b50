"""One run of a script: fine-tune, swap, gate, evaluate, prune, save; in phases, each of which can be resumed."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel

from collab_heads.base.checks import is_number
from collab_heads.base.processes import agreed
from collab_heads.collaborative.score_terms import restrict_scores
from collab_heads.distillation.checkpoint import DistillReport
from collab_heads.distillation.distill import distill
from collab_heads.distillation.examples import num_examples
from collab_heads.errors import OutputError
from collab_heads.files.checkpoint import PROGRESS
from collab_heads.saving.card import README, complete, model_card
from collab_heads.saving.marks import is_changed
from collab_heads.training.loop.fine_tune import fine_tune
from collab_heads.training.loop.training import Hooks
from collab_heads.training.options.hub import push
from collab_heads.training.runs.analysis import check_ablation
from collab_heads.training.runs.head_steps import HeadSteps
from collab_heads.training.runs.learner import Learner, check_backend
from collab_heads.training.runs.session import provenance
from collab_heads.training.runs.swap import Phase, check_original, original_of, summary, swap_everywhere
from collab_heads.training.storage.checkpoint import RESUME, prune_checkpoints, weight_bytes
from collab_heads.training.storage.output import RESULTS, Output

BATCH = 32  # examples of a step of distillation, over all processes: as `Learner.samples` makes them


class Run:
    """A run of a script, executed by `complete`: `begin`; `prepare`, `train` and `conclude` for each phase; `finish`.

    The constructor makes the checks that are left; nothing is written before `begin`.

    Args:
        learner: the model that is trained, its data, and the session of the run.

    Attributes:
        history: every evaluation: "stage", "epoch", "step", "metrics".
        swapped: the numbers of the swap or the compression; None without.
        distilled: the numbers of the distillation after it; None without.
        trained: the counts and the loss of every training.
        heads: the changes of heads.
    """

    def __init__(self, learner: Learner):
        self.learner = learner
        self.session = learner.session
        self.args = self.session.args
        self.accelerator = self.session.accelerator
        progress = self.session.progress
        self.history: list[dict] = progress.get("history", [])
        self.swapped: dict | None = progress.get("swap")
        self.distilled: dict | None = progress.get("distilled")
        self.trained: list[dict] = progress.get("trained", [])
        self.provenance = provenance()
        self.check_position()
        if self.session.checkpoint is not None:  # it goes, and with it what is read from the source of a model
            learner.model.config._name_or_path = self.args.model_name_or_path or ""
        check_backend(learner)
        check_original(self.args, learner.model)
        check_ablation(learner)
        (last,) = [phase for phase in learner.phases if phase.is_last_training]
        self.heads = HeadSteps(learner, learner.steps(last.number))

    def complete(self) -> dict:
        """Execute the whole run; return the content of `all_results.json`."""
        self.begin()  # a trained model is evaluated as it is
        for phase in self.phases:  # one, or with --swap after and between two
            self.prepare(phase)  # swap, choose heads
            self.train(phase)
            self.conclude(phase)  # remove heads, take the best or the averaged weights
        return self.finish()  # model, predictions, results

    def check_position(self) -> None:
        """Raise OutputError if the checkpoint is of a phase or a step that this run does not have."""
        if self.session.checkpoint is None:
            return
        number, step = self.session.progress["phase"], self.session.progress["step"]
        phases = self.learner.phases
        if number >= len(phases) or not phases[number].trains or step > self.learner.steps(number).total:
            raise OutputError(
                f"{RESUME}: {self.session.checkpoint} is of step {step} of phase {number}, which this run does not "
                f"have: {PROGRESS} is damaged"
            )

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases that are left: all, or those from the checkpoint's on."""
        return self.learner.phases[self.session.progress.get("phase", 0) :]

    def begin(self) -> None:
        """Prepare the output folder, start the trackers, and evaluate a model that is already trained."""
        args, session = self.args, self.session
        self.accelerator.wait_for_everyone()  # all processes have read what the first one may clear
        if output := session.writes_to:
            if args.overwrite_output_dir and not session.resumes_in_place:
                output.clear()
            elif session.checkpoint is not None:  # a killed run may not have done this
                prune_checkpoints(output.path, args.save_total_limit, output.path / session.checkpoint.name)
            output.save()
        self.accelerator.wait_for_everyone()
        if args.with_tracking:
            settings = {k: v for k, v in session.arguments.items() if isinstance(v, int | float | str | bool)}
            start_trackers = partial(self.accelerator.init_trackers, self.learner.project, settings)
            output.note_logs(start_trackers) if output else start_trackers()
        self.learner.model.to(self.accelerator.device)
        if session.checkpoint is not None:
            self.restrict()
        elif self.learner.is_trained:
            self.evaluate("loaded")

    def prepare(self, phase: Phase) -> None:
        """Begin a phase, unless it is resumed: swap, and before the last training choose and mix heads."""
        if self.is_resumed(phase):
            return
        if phase.swaps:
            self.swap()
        elif phase.number == 0:
            self.restrict()
        if phase.is_last_training:
            if self.heads.choose():
                self.evaluate("pruned")
            self.heads.mix()

    def is_resumed(self, phase: Phase) -> bool:
        """Return True if the checkpoint was written in this phase."""
        return self.session.checkpoint is not None and self.session.progress["phase"] == phase.number

    def restrict(self) -> None:
        """Remove terms from the attention score, if the flags ask for it."""
        if self.args.score_terms != "both":
            restrict_scores(self.learner.model, self.args.score_terms)

    def swap(self) -> None:
        """Swap or compress the model, calibrated on training examples, and evaluate it; then distil it if asked for."""
        original = original_of(self.args, self.learner.model) if self.args.distill_steps else None
        count = self.args.calibration_samples
        calibration = self.learner.samples(count, labels=False) if count else None
        report = swap_everywhere(self.accelerator, self.args, self.learner.model, calibration)
        self.accelerator.print(report)
        self.swapped = summary(report)
        self.restrict()
        self.evaluate("swapped" if self.args.compress_budget is None else "compressed")
        if original is not None:
            distilled = learn_from(self.learner, original)
            self.accelerator.print(distilled)
            self.distilled = distilled.to_dict()
            self.evaluate("distilled")

    def train(self, phase: Phase) -> None:
        """Fine-tune the model, with evaluations along the way, if the phase trains."""
        if not phase.trains:
            return
        learner, checkpoint = self.learner, self.session.checkpoint
        before = sum(entry["steps"] for entry in self.trained)
        hooks = Hooks(
            collate=learner.collate,
            weight=learner.weight,
            evaluate=lambda model, epoch, step: self.evaluate(phase.stage, epoch, step, model),
            save_model=learner.save_model,
            progress=self.record_of_run,
            steps=learner.steps(phase.number),
            loss=learner.loss,
            stop=None if self.args.early_stopping_patience is None else lambda: self.stops_early(phase),
            steps_before=before,
        )
        if phase.is_last_training:
            hooks = self.heads.add_to(hooks)
        hooks = self.heads.watched(hooks, phase.stage, before)
        trained = fine_tune(
            self.accelerator,
            learner.model,
            learner.encoded["train"],
            self.args,
            hooks,
            phase=phase.number,
            resume=(checkpoint, self.session.progress["step"]) if checkpoint and self.is_resumed(phase) else None,
        )
        self.trained.append(
            {
                "stage": phase.stage,
                "steps": trained.steps,
                "train_loss": trained.loss,  # the mean over all these steps, resumed or not
                "examples": trained.examples,  # examples and seconds: since the run was resumed
                "seconds": trained.seconds,
                "samples_per_second": trained.examples / trained.seconds if trained.seconds else None,
            }
        )

    def stops_early(self, phase: Phase) -> bool:
        """Return True if the last evaluations of a training, as many as the flag says, did not improve."""
        name, patience = self.learner.primary, self.args.early_stopping_patience
        values = [entry["metrics"][name] for entry in self.history if entry["stage"] == phase.stage]
        stops = agreed(self.accelerator, lambda: bool(values) and len(values) - values.index(max(values)) > patience)
        if stops:
            self.accelerator.print(f"{phase.stage}: {name} was no better in {patience} evaluations: training ends")
        return stops

    def conclude(self, phase: Phase) -> None:
        """End a phase: load and evaluate the best or the averaged weights, and remove heads that training closed."""
        if phase.trains:
            for stage in self.learner.final_weights(phase):
                self.evaluate(stage)
        if phase.is_last_training and self.heads.finish():
            self.evaluate("pruned")

    def evaluate(self, stage: str, epoch: int = 0, step: int = 0, model: PreTrainedModel | None = None) -> None:
        """Measure a model (by default the run's own) on the validation splits, and record the result."""
        model = model or self.learner.model
        metrics = self.learner.measure(model)
        self.record(stage, epoch, step, metrics)
        self.learner.evaluated(stage, step, metrics, model)

    def record(self, stage: str, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics: in the history, on the terminal and for the trackers."""
        self.history.append({"stage": stage, "epoch": epoch, "step": step, "metrics": dict(metrics)})
        values = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self.accelerator.print(f"{stage}{f', epoch {epoch}' if epoch else ''}: {values}")
        before = sum(entry["steps"] for entry in self.trained)
        self.accelerator.log({f"eval_{name}": value for name, value in metrics.items()}, step=before + step)

    def record_of_run(self) -> dict:
        """Return what a checkpoint needs to resume the run."""
        return {
            "run": self.session.run,
            "history": self.history,
            "swap": self.swapped,
            "distilled": self.distilled,
            **self.heads.state(),
            "trained": self.trained,
            **self.learner.state(),
        }

    def finish(self) -> dict:
        """Write the model first, then predictions of the test splits, and the results last.

        Returns:
            The content of `all_results.json`.
        """
        output = self.session.writes_to
        self.write_model()
        self.heads.show(sum(entry["steps"] for entry in self.trained[:-1]))
        if self.heads.fold():
            self.evaluate("folded")
            self.write_model()
        for split, metrics in self.learner.predict().items():
            self.record(split, 0, 0, metrics)
        results = self.results()
        if output:
            write_card(output, self.learner.model, final_metrics(results))
            output.write_json(RESULTS, results)
            push(self.args, self.learner.model, self.learner.preparer, final_metrics(results))
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()
        return results

    def write_model(self) -> None:
        """Write the present model into the output folder, if there is one."""
        if output := self.session.writes_to:
            model = self.learner.model
            output.write_model(partial(save_without_card, self.learner, model), weight_bytes(model))

    def results(self) -> dict:
        """Return the content of `all_results.json`: final metrics first."""
        final: Mapping[str, float] = next(
            (entry["metrics"] for entry in self.history[::-1] if entry["stage"] != "test"), {}
        )
        return {
            **{f"eval_{name}": value for name, value in final.items()},
            "train_loss": self.trained[-1]["train_loss"] if self.trained else None,
            "task": self.learner.task,
            "stages": {entry["stage"]: entry["metrics"] for entry in self.history},
            "history": self.history,
            "train": self.trained,
            "swap": self.swapped,
            "distilled": self.distilled,
            "heads": self.heads.record or None,
            "parameters": self.learner.model.num_parameters(),
            "processes": self.accelerator.num_processes,
            "arguments": self.session.arguments,
            **self.provenance,
            **self.learner.results(),
        }


def learn_from(learner: Learner, original: PreTrainedModel) -> DistillReport:
    """Distil the original into a run's model, on all processes, on training examples without labels."""
    session = learner.session
    steps, accelerator = session.args.distill_steps, session.accelerator
    return distill(
        learner.model,
        original,
        learner.samples(num_examples(steps, BATCH), labels=False),
        steps,
        seed=session.args.seed,
        mixed_precision="bf16" if accelerator.mixed_precision == "bf16" else "no",  # fp16 would need scaled gradients
        accelerator=accelerator,
    )


def final_metrics(results: Mapping[str, object]) -> dict[str, float]:
    """Return the metrics that a run measured last: name -> value."""
    return {name: value for name, value in results.items() if name.startswith("eval_") and is_number(value)}


def write_card(output: Output, model: PreTrainedModel, metrics: Mapping[str, float]) -> None:
    """Write the card of a changed model into the output folder; a card of the user's only gets our sections."""
    if (output.path / README).exists() and not output.owns(README):
        complete(model.config, output.path, metrics=metrics)
    elif is_changed(model.config):
        output.write(README, str(model_card(model, metrics=metrics)).encode("utf-8"))


def save_without_card(learner: Learner, model: PreTrainedModel, folder: Path) -> None:
    """Save a model without its card, which is written when the run is over: these files replace others."""
    learner.save_model(model, folder)
    (folder / README).unlink(missing_ok=True)
