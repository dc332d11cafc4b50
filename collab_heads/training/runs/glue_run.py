"""One run of `run_glue.py`: how classifiers are loaded, fed and measured."""

import numpy as np
import torch
from accelerate.utils import set_seed
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

from collab_heads.errors import ArgumentError, NonFiniteError
from collab_heads.training.data.classification import (
    calibration_batches,
    check_head,
    configure,
    draw,
    encode,
    is_trained,
    predict,
)
from collab_heads.training.data.metrics import classification_metric, glue_metric, regression_metric
from collab_heads.training.data.submission import submission_name, submission_text
from collab_heads.training.flags.arguments import trains
from collab_heads.training.runs.loading import load_or_explain
from collab_heads.training.runs.run import Run
from collab_heads.training.storage.output import PREDICTIONS


class GlueRun(Run):
    """A `Run` of sequence classification or regression; `data` is a `collab_heads.training.data.glue.Data`."""

    name = "glue"

    def load(self) -> None:
        """Load config, tokenizer and model, and encode the data."""
        args, task = self.args, self.data.task
        self.task = task.name
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
        self.check_model()
        if self.tokenizer.pad_token is None:
            raise ArgumentError(
                f"the tokenizer of {tokenizer_source!r} has no padding token, so batches cannot be made"
            )
        if not (args.collaborative or self.starts_trained or trains(args)):
            raise ArgumentError(
                "--num_train_epochs 0 measures a trained model, and this one has no classification head"
            )
        length = min(args.max_length, self.tokenizer.model_max_length)
        self.encoded = encode(self.data, self.tokenizer, self.labels, length, args.pad_to_max_length)
        multiple = 8 if self.accelerator.mixed_precision != "no" else None
        self.collate = DataCollatorWithPadding(self.tokenizer, pad_to_multiple_of=multiple)
        metric = {"classification": classification_metric, "regression": regression_metric}.get(task.metric)
        self.metric = metric() if metric else glue_metric(task.metric)

    def weight(self, batch):
        """The loss is a mean over examples."""
        return len(batch["labels"])

    def samples(self, count, *, labels):
        """Batches of training examples of like length, drawn by the seed."""
        drawn = draw(self.encoded["train"], count, self.args.seed)
        return calibration_batches(drawn, self.collate, labels=labels)

    def validation(self, *, own=False):
        """Batches of the first validation split."""
        examples, size = self.encoded[self.data.named("validation")[0]], self.args.per_device_eval_batch_size
        for first in range(0, len(examples), size):
            yield self.collate([examples[i] for i in range(first, min(first + size, len(examples)))])

    def evaluate(self, stage, epoch=0, step=0, model=None):
        """Measure every validation split and note the result."""
        metrics = {}
        for split in self.data.named("validation"):
            outputs = self.outputs(split, model)
            predictions = outputs.argmax(-1) if self.data.task.labels else outputs
            references = self.data.splits[split]["label"]
            suffix = "_mm" if split.endswith("mismatched") else ""
            found = self.metric.compute(predictions=predictions, references=references)
            metrics |= {name + suffix: float(value) for name, value in found.items()}
        self.record(stage, epoch, step, metrics)

    def outputs(self, split: str, model=None) -> np.ndarray:
        """Logits or scores of a split, classes in the task's order."""
        size = self.args.per_device_eval_batch_size
        logits = predict(self.accelerator, model or self.model, self.encoded[split], self.collate, size)
        if not np.isfinite(logits).all():  # an argmax would hide it
            bad = int((~np.isfinite(logits)).any(axis=1).sum())
            raise NonFiniteError(f"{split}: the model's outputs for {bad} of {len(logits)} examples are NaN or inf")
        return self.labels.to_task(logits)

    def predict(self):
        """Write predictions of the test splits as the GLUE server takes them."""
        tests = {split: self.outputs(split) for split in self.data.named("test")}
        if tests and self.output_dir and self.accelerator.is_main_process:
            texts = {submission_name(self.data.task, split): rows for split, rows in tests.items()}
            for name, rows in texts.items():
                self.output.write(f"{PREDICTIONS}/{name}", submission_text(self.data.task, rows).encode("utf-8"))
            names = ", ".join(texts)
            self.accelerator.print(f"predictions: {self.output_dir / PREDICTIONS} ({names})")
