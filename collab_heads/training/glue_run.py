"""One run of `run_glue.py`: fine-tune, swap, evaluate, save; in phases, each of which can be gone on with."""

from argparse import Namespace
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

from collab_heads.collaborative.terms import restrict_scores
from collab_heads.errors import ArgumentError, NonFiniteError
from collab_heads.training import swapping
from collab_heads.training.arguments import fingerprint
from collab_heads.training.checkpoint import go_on_from, write_json
from collab_heads.training.classification import (
    calibration_batches,
    check_head,
    configure,
    draw,
    encode,
    is_trained,
    predict,
)
from collab_heads.training.glue import Data
from collab_heads.training.loading import digest, load_or_explain
from collab_heads.training.loop import Hooks, fine_tune, num_steps
from collab_heads.training.metrics import classification_metric, glue_metric, regression_metric
from collab_heads.training.output import PREDICTIONS, RESULTS, check_output, clear_output, provenance
from collab_heads.training.submission import submission_name, write_submissions


class GlueRun:
    """Everything that the phases of a run share.

    Making one reads and checks all input; nothing is written before `run`.

    Args:
        args: the parsed flags.
        data: task and examples.
        accelerator: made with `step_scheduler_with_optimizer=False`.

    Raises:
        CollabHeadsError: on input that cannot work; nothing has been written.
    """

    def __init__(self, args: Namespace, data: Data, accelerator: Accelerator):
        self.args, self.data, self.accelerator = args, data, accelerator
        self.output_dir = Path(args.output_dir) if args.output_dir else None
        precision = accelerator.mixed_precision  # also from `accelerate launch` or its config
        self.arguments = {**fingerprint(args), "mixed_precision": precision, "data": digest(data)}
        self.provenance = provenance()
        self.checkpoint, self.progress = go_on_from(args, self.arguments, accelerator.num_processes)
        if self.output_dir:
            own = self.checkpoint is not None and self.checkpoint.resolve().parent == self.output_dir.resolve()
            sources = [args.model_name_or_path, args.tokenizer_name]
            check_output(self.output_dir, overwrite=args.overwrite_output_dir, resume=own, sources=sources)
        self.history: list[dict] = self.progress.get("history", [])
        self.swapped: dict | None = self.progress.get("swap")
        self.trained: list[dict] = self.progress.get("trained", [])
        self.load()

    def load(self) -> None:
        """Load config, tokenizer and model, and encode the data."""
        args, task = self.args, self.data.task
        source = str(self.checkpoint or args.model_name_or_path)
        remote = {"trust_remote_code": args.trust_remote_code}
        config = load_or_explain(AutoConfig, source, **remote)
        check_head(task, config, args.ignore_mismatched_sizes)
        self.starts_trained = is_trained(config) and config.num_labels == task.num_labels
        self.labels = configure(task, config)
        tokenizer_source = str(self.checkpoint or args.tokenizer_name or source)
        self.tokenizer = load_or_explain(
            AutoTokenizer, tokenizer_source, use_fast=not args.use_slow_tokenizer, **remote
        )
        backend = {"attn_implementation": args.attn_implementation} if args.attn_implementation else {}
        set_seed(args.seed)  # a new head is random
        self.model = load_or_explain(
            AutoModelForSequenceClassification,
            source,
            config=config,
            dtype=torch.float32,  # a checkpoint in half precision would train in it, and lose small updates
            ignore_mismatched_sizes=args.ignore_mismatched_sizes,
            **backend,
            **remote,
        )
        if self.checkpoint is None:
            swapping.check_model(args, self.model)
        if self.tokenizer.pad_token is None:
            raise ArgumentError(
                f"the tokenizer of {tokenizer_source!r} has no padding token, so batches cannot be made"
            )
        if not (args.collaborative or self.starts_trained or num_steps(args, 1)):
            raise ArgumentError(
                "--num_train_epochs 0 measures a trained model, and this one has no classification head"
            )
        length = min(args.max_length, self.tokenizer.model_max_length)
        self.encoded = encode(self.data, self.tokenizer, self.labels, length, args.pad_to_max_length)
        multiple = 8 if self.accelerator.mixed_precision != "no" else None
        self.collate = DataCollatorWithPadding(self.tokenizer, pad_to_multiple_of=multiple)
        metric = {"classification": classification_metric, "regression": regression_metric}.get(task.metric)
        self.metric = metric() if metric else glue_metric(task.metric)

    def run(self) -> dict:
        """Go through the phases and write model, predictions and results.

        Returns:
            What `all_results.json` holds.
        """
        args, main = self.args, self.accelerator.is_main_process
        self.accelerator.wait_for_everyone()  # no process reads any more what the first may clear
        if self.output_dir and main:
            if args.overwrite_output_dir and self.checkpoint is None:
                clear_output(self.output_dir)
            self.output_dir.mkdir(parents=True, exist_ok=True)
        self.accelerator.wait_for_everyone()
        if args.with_tracking:
            settings = {k: v for k, v in self.arguments.items() if isinstance(v, int | float | str | bool)}
            self.accelerator.init_trackers("glue", settings)
        self.model.to(self.accelerator.device)
        plan = swapping.phases(args)
        start = self.progress.get("phase", 0)
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
            if trains:
                self.train(phase, resumed)
        results = self.results()
        self.finish(results)
        return results

    def restrict(self) -> None:
        """Ablate the score, if asked to."""
        if self.args.score_terms != "both":
            restrict_scores(self.model, self.args.score_terms)

    def swap(self) -> None:
        """Swap, calibrated on training examples, and evaluate what came out."""
        args, calibration = self.args, None
        if args.calibration_samples:
            drawn = draw(self.encoded["train"], args.calibration_samples, args.seed)
            calibration = calibration_batches(drawn, self.collate)
        report = swapping.swap_everywhere(self.accelerator, args, self.model, calibration)
        self.accelerator.print(report)
        self.swapped = swapping.summary(report)
        self.restrict()
        self.evaluate("swapped")

    def train(self, phase: int, resume: tuple[Path, int] | None) -> None:
        """Fine-tune, with an evaluation after every epoch."""
        stage = "fine_tuned" if phase == 0 else "fine_tuned_again"
        hooks = Hooks(
            collate=self.collate,
            weight=lambda batch: len(batch["labels"]),
            evaluate=lambda model, epoch, step: self.evaluate(stage, epoch, step, model),
            save_model=self.save_model,
            progress=lambda: {
                "arguments": self.arguments,
                "history": self.history,
                "swap": self.swapped,
                "trained": self.trained,
            },
        )
        trained = fine_tune(
            self.accelerator, self.model, self.encoded["train"], self.args, hooks, phase=phase, resume=resume
        )
        rate = trained.examples / trained.seconds if trained.seconds else None
        self.trained.append(
            {
                "stage": stage,
                "steps": trained.steps,
                "examples": trained.examples,  # these and the seconds are of the last leg of a resumed run
                "seconds": trained.seconds,
                "samples_per_second": rate,
            }
        )

    def evaluate(self, stage: str, epoch: int = 0, step: int = 0, model=None) -> None:
        """Measure every validation split and note the result."""
        metrics = {}
        for split in self.data.named("validation"):
            outputs = self.outputs(split, model)
            predictions = outputs.argmax(-1) if self.data.task.labels else outputs
            references = self.data.splits[split]["label"]
            suffix = "_mm" if split.endswith("mismatched") else ""
            found = self.metric.compute(predictions=predictions, references=references)
            metrics |= {name + suffix: float(value) for name, value in found.items()}
        self.history.append({"stage": stage, "epoch": epoch, "step": step, "metrics": metrics})
        values = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self.accelerator.print(f"{stage}{f', epoch {epoch}' if epoch else ''}: {values}")
        before = sum(entry["steps"] for entry in self.trained)
        self.accelerator.log({f"eval_{name}": value for name, value in metrics.items()}, step=before + step)

    def outputs(self, split: str, model=None) -> np.ndarray:
        """Logits or scores of a split, classes in the task's order."""
        size = self.args.per_device_eval_batch_size
        logits = predict(self.accelerator, model or self.model, self.encoded[split], self.collate, size)
        if not np.isfinite(logits).all():  # an argmax would hide it
            bad = int((~np.isfinite(logits)).any(axis=1).sum())
            raise NonFiniteError(f"{split}: the model's outputs for {bad} of {len(logits)} examples are NaN or inf")
        return self.labels.to_task(logits)

    def results(self) -> dict:
        """What `all_results.json` holds: final metrics first."""
        final = self.history[-1]["metrics"] if self.history else {}
        return {
            **{f"eval_{name}": value for name, value in final.items()},
            "task": self.data.task.name,
            "stages": {entry["stage"]: entry["metrics"] for entry in self.history},
            "history": self.history,
            "train": self.trained,
            "swap": self.swapped,
            "parameters": self.model.num_parameters(),
            "processes": self.accelerator.num_processes,
            "arguments": self.arguments,
            **self.provenance,
        }

    def save_model(self, model, folder: Path) -> None:
        """What `from_pretrained` loads."""
        model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def finish(self, results: dict) -> None:
        """Write the model first, then predictions of the test splits, and the results last."""
        if self.output_dir and self.accelerator.is_main_process:
            self.save_model(self.model, self.output_dir)
        tests = {split: self.outputs(split) for split in self.data.named("test")}
        if self.output_dir and self.accelerator.is_main_process:
            if tests:
                write_submissions(self.output_dir / PREDICTIONS, self.data.task, tests)
                names = ", ".join(submission_name(self.data.task, split) for split in tests)
                self.accelerator.print(f"predictions: {self.output_dir / PREDICTIONS} ({names})")
            write_json(self.output_dir / RESULTS, results)
            if self.args.push_to_hub:
                name = self.args.hub_model_id or self.output_dir.name
                self.model.push_to_hub(name, token=self.args.hub_token)
                self.tokenizer.push_to_hub(name, token=self.args.hub_token)
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()
