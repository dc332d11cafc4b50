"""One run of a script: fine-tune, swap, gate, evaluate, prune, save; in phases, each of which can be gone on with."""

from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from accelerate import Accelerator
from transformers import PreTrainedModel

from collab_heads.collaborative.score_terms import restrict_scores
from collab_heads.training.data.batches import Step
from collab_heads.training.flags import swapping
from collab_heads.training.flags.arguments import fingerprint
from collab_heads.training.flags.hub import push
from collab_heads.training.loop.loop import Hooks, fine_tune, num_steps, order_of, place, weight_bytes
from collab_heads.training.runs import head_steps
from collab_heads.training.runs.continuing import check_place, lies_below, settle
from collab_heads.training.runs.loading import digest
from collab_heads.training.runs.machine import check_backend
from collab_heads.training.runs.provenance import provenance
from collab_heads.training.storage.checkpoint import prune_checkpoints
from collab_heads.training.storage.output import RESULTS, Output
from collab_heads.training.storage.reservation import agreed


class Run:
    """Everything that the phases of a run share; a script says how it loads, feeds and measures its model.

    Making one reads and checks all input; nothing is written before `run`.

    Args:
        args: the parsed flags.
        data: task and examples.
        accelerator: made with `step_scheduler_with_optimizer=False`.

    Attributes:
        name: of the script's runs, for trackers.
        model, tokenizer, encoded, collate: set by `load`; `encoded` maps splits to encoded examples.
        task: set by `load`: what is learned, for the results.
        starts_trained: set by `load`: whether the model can be measured before training.

    Raises:
        CollabHeadsError: on input that cannot work; nothing has been written.
    """

    name = ""

    def __init__(self, args: Namespace, data, accelerator: Accelerator):
        self.args, self.data, self.accelerator = args, data, accelerator
        precision = accelerator.mixed_precision  # also from `accelerate launch` or its config
        self.arguments = {**fingerprint(args), "mixed_precision": precision, "data": digest(data)}
        self.provenance = provenance()
        self.output_dir = None if args.output_dir is None else Path(args.output_dir)
        self.checkpoint, self.progress = agreed(
            accelerator, lambda: settle(args, self.arguments, accelerator.num_processes)
        )
        self.output = None if self.output_dir is None else Output(self.output_dir)
        if self.checkpoint is not None:
            accelerator.print(f"going on from {self.checkpoint}")
        self.history: list[dict] = self.progress.get("history", [])
        self.swapped: dict | None = self.progress.get("swap")
        self.heads: dict = self.progress.get("heads", {})
        self.scores: Mapping | None = None  # of the heads, from which learning starts
        self.recorder = None  # of gates over training, for the report
        self.trained: list[dict] = self.progress.get("trained", [])
        self.load()
        if self.checkpoint is not None:
            check_place(self.checkpoint, self.progress, self.plan(), lambda phase: num_steps(args, self.order(phase)))
        check_backend(self)
        self.rotation = head_steps.new_rotation(self)

    def load(self) -> None:
        """Load config, tokenizer and model from the checkpoint or the flags, and encode the data."""
        raise NotImplementedError

    def weight(self, batch: Mapping) -> int:
        """How many examples (or tokens) the mean loss of a batch is over."""
        raise NotImplementedError

    def samples(self, count: int, *, labels: bool) -> Sequence[Mapping]:
        """Batches of training examples, drawn by the seed."""
        raise NotImplementedError

    def evaluate(self, stage: str, epoch: int = 0, step: int = 0, model: PreTrainedModel | None = None) -> None:
        """Measure the validation splits and add the result to the history."""
        raise NotImplementedError

    def validation(self, *, own: bool = False) -> Iterable[Mapping]:
        """Batches of the validation examples, with labels; `own`: with what the model last made of them, if it can."""
        raise NotImplementedError

    def check_model(self) -> None:
        """Check a loaded model against the flags, before hours of training."""
        if self.checkpoint is None:
            swapping.check_model(self.args, self.model)
            head_steps.check(self)

    def run(self) -> dict:
        """Go through the phases and write model, predictions and results.

        Returns:
            What `all_results.json` holds.
        """
        args, main = self.args, self.accelerator.is_main_process
        self.accelerator.wait_for_everyone()  # no process reads any more what the first may clear
        if self.output and main:
            if args.overwrite_output_dir and not lies_below(self.checkpoint, self.output_dir):
                self.output.clear()
            elif self.checkpoint is not None:  # a run that was killed may not have come to it
                prune_checkpoints(self.output_dir, args.save_total_limit, self.output_dir / self.checkpoint.name)
            self.output.save()
        self.accelerator.wait_for_everyone()
        if args.with_tracking:
            settings = {k: v for k, v in self.arguments.items() if isinstance(v, int | float | str | bool)}
            start = partial(self.accelerator.init_trackers, self.name, settings)
            self.output.note_logs(start) if main else start()
        self.model.to(self.accelerator.device)
        plan = self.plan()
        last, start = self.last_training(), self.progress.get("phase", 0)
        if self.checkpoint is None and self.starts_trained:
            self.evaluate("loaded")
        elif self.checkpoint is not None:
            self.restrict()
        for phase, (swaps, trains) in enumerate(plan[start:], start):
            resumed = (self.checkpoint, self.progress["step"]) if self.checkpoint and phase == start else None
            if swaps and not resumed:
                self.swap()
            if not (swaps or resumed) and phase == 0:
                self.restrict()
            if phase == last and not resumed:
                head_steps.start(self)
            if trains:
                self.train(phase, resumed)
            if phase == last:
                head_steps.end(self)
        return self.finish()

    def plan(self) -> Sequence[tuple[bool, bool]]:
        """Of each phase, whether it starts with the swap and whether it trains."""
        return swapping.phases(self.args)

    def last_training(self) -> int:
        """The phase of the last training, in which heads change."""
        return max(phase for phase, (_, trains) in enumerate(self.plan()) if trains)

    def share(self) -> int:
        """Micro-batches per optimizer step, over all processes."""
        return self.accelerator.num_processes * self.args.gradient_accumulation_steps

    def order(self, phase: int) -> Callable[[int], list[Step]]:
        """Epoch, from 0 -> its optimizer steps."""
        return order_of(self.args, self.encoded["train"], self.share(), phase)

    def epochs(self) -> int:
        """How many epochs the last training begins."""
        steps = num_steps(self.args, order := self.order(self.last_training()))
        return place(order, steps - 1)[0] + 1 if steps else 0

    def restrict(self) -> None:
        """Ablate the score, if asked to."""
        if self.args.score_terms != "both":
            restrict_scores(self.model, self.args.score_terms)

    def swap(self) -> None:
        """Swap, calibrated on training examples, and evaluate what came out."""
        args = self.args
        calibration = self.samples(args.calibration_samples, labels=False) if args.calibration_samples else None
        report = swapping.swap_everywhere(self.accelerator, args, self.model, calibration)
        self.accelerator.print(report)
        self.swapped = swapping.summary(report)
        self.restrict()
        self.evaluate("swapped")

    def record_of_run(self) -> dict:
        """What a checkpoint must know to go on."""
        return {
            "arguments": self.arguments,
            "history": self.history,
            "swap": self.swapped,
            **head_steps.progress(self),
            "trained": self.trained,
        }

    def hooks(self, phase: int, stage: str) -> Hooks:
        """What the training loop calls."""
        return Hooks(
            collate=self.collate,
            weight=self.weight,
            evaluate=lambda model, epoch, step: self.evaluate(stage, epoch, step, model),
            save_model=self.save_model,
            progress=self.record_of_run,
            order=self.order(phase),
            **(head_steps.hooks(self) if phase == self.last_training() else {}),
        )

    def train(self, phase: int, resume: tuple[Path, int] | None) -> None:
        """Fine-tune, with evaluations on the way."""
        stage = "fine_tuned" if phase == 0 else "fine_tuned_again"
        common = self.accelerator, self.model, self.encoded["train"], self.args, self.hooks(phase, stage)
        trained = fine_tune(*common, phase=phase, resume=resume)
        rate = trained.examples / trained.seconds if trained.seconds else None
        self.trained.append(
            {
                "stage": stage,
                "steps": trained.steps,
                "train_loss": trained.loss,  # the mean over all these steps, resumed or not
                "examples": trained.examples,  # these and the seconds are of the last leg of a resumed run
                "seconds": trained.seconds,
                "samples_per_second": rate,
            }
        )

    def record(self, stage: str, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        """Note what was measured: in the history, on the terminal and for the trackers."""
        self.history.append({"stage": stage, "epoch": epoch, "step": step, "metrics": dict(metrics)})
        values = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self.accelerator.print(f"{stage}{f', epoch {epoch}' if epoch else ''}: {values}")
        before = sum(entry["steps"] for entry in self.trained)
        self.accelerator.log({f"eval_{name}": value for name, value in metrics.items()}, step=before + step)

    def results(self) -> dict:
        """What `all_results.json` holds: final metrics first."""
        final = next((entry["metrics"] for entry in self.history[::-1] if entry["stage"] != "test"), {})
        return {
            **{f"eval_{name}": value for name, value in final.items()},
            "train_loss": self.trained[-1]["train_loss"] if self.trained else None,
            "task": self.task,
            "stages": {entry["stage"]: entry["metrics"] for entry in self.history},
            "history": self.history,
            "train": self.trained,
            "swap": self.swapped,
            "heads": self.heads or None,
            "parameters": self.model.num_parameters(),
            "processes": self.accelerator.num_processes,
            "arguments": self.arguments,
            **self.provenance,
        }

    def save_model(self, model: PreTrainedModel, folder: Path) -> None:
        """What `from_pretrained` loads."""
        model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def write_model(self) -> None:
        """Put the model as it is now into the output folder."""
        self.output.write_model(lambda folder: self.save_model(self.model, folder), weight_bytes(self.model))

    def predict(self) -> None:
        """Write predictions of the test splits, if asked to."""

    def finish(self) -> dict:
        """Write the model first, then predictions of the test splits, and the results last; returns these."""
        main = self.output and self.accelerator.is_main_process
        if main:
            self.write_model()
        head_steps.show(self)
        if head_steps.fold(self) and main:
            self.write_model()
        self.predict()
        results = self.results()
        if main:
            self.output.write_json(RESULTS, results)
            push(self.args, self.model, self.tokenizer)
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()
        return results
