"""Encode the examples of a classification or regression task, and predict."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from collab_heads.base.progress import progress_bar
from collab_heads.data.batches import check_room, longest_first, with_tokens
from collab_heads.data.glue import Data
from collab_heads.data.glue_tasks import LAYOUTS, Task
from collab_heads.errors import ArgumentError
from collab_heads.running.batches import evaluating

HEADS = "ForSequenceClassification", "ForImageClassification"  # how names of such model classes end
Collator = Callable[[list], Mapping[str, torch.Tensor]]  # encoded examples -> a batch, padded


@dataclass(frozen=True)
class Labels:
    """The numbers by which the model knows the classes of a task.

    Attributes:
        order: task number -> model number; empty for regression.
    """

    order: tuple[int, ...]

    @classmethod
    def of(cls, task: Task, config: PretrainedConfig) -> "Labels":
        """Take the numbers from a trained checkpoint's config if its names are the task's, else those of the task."""
        for case in (str, str.lower):
            names = {case(str(name)): number for name, number in (config.label2id or {}).items()}
            wanted = [case(name) for name in task.labels]
            if is_trained(config) and names.keys() == set(wanted) and len(names) == len(wanted):
                return cls(tuple(int(names[name]) for name in wanted))
        return cls(tuple(range(len(task.labels))))

    def to_model(self, label: float) -> float:
        """Return the model's number of a class; a regression target is only made a float."""
        return self.order[int(label)] if self.order else float(label)

    def to_task(self, logits: np.ndarray) -> np.ndarray:
        """Return [N, C] logits in the task's order of classes; for regression [N] scores."""
        return logits[:, self.order] if self.order else logits[:, 0]


def check_head(task: Task, config: PretrainedConfig, ignore_mismatched_sizes: bool) -> None:
    """Raise ArgumentError if a trained checkpoint's head has another number of outputs than the task has labels."""
    if not is_trained(config) or ignore_mismatched_sizes or config.num_labels == task.num_labels:
        return
    have = ", ".join(str(name) for name in (config.id2label or {}).values())
    want = ", ".join(task.labels) or "one score (regression)"
    raise ArgumentError(
        f"the model's head has {config.num_labels} output(s) ({have}), the task needs {task.num_labels} ({want}): "
        "choose another model or task, or pass --ignore_mismatched_sizes to start a new head"
    )


def is_trained(config: PretrainedConfig) -> bool:
    """Return True if a checkpoint has a head that classifies texts or images."""
    return any(name.endswith(HEADS) for name in config.architectures or ())


def configure(task: Task, config: PretrainedConfig) -> Labels:
    """Write the task's labels into the config of a model that does not know them; return their numbers."""
    labels = Labels.of(task, config)
    known = is_trained(config) and {str(name).lower() for name in config.label2id or ()} == {
        n.lower() for n in task.labels
    }
    if not known:
        config.num_labels = task.num_labels
        if task.labels:
            config.id2label = dict(enumerate(task.labels))
            config.label2id = {name: number for number, name in enumerate(task.labels)}
    config.problem_type = "single_label_classification" if task.labels else "regression"
    return labels


def encode(
    data: Data, tokenizer: PreTrainedTokenizerBase, labels: Labels, max_length: int, pad: bool
) -> dict[str, Dataset]:
    """Tokenize every split, and turn labels into the model's numbers."""
    check_room("--max_length", max_length, tokenizer, len(data.task.texts) == 2)

    def tokenize(columns: Mapping[str, list]) -> dict[str, list]:
        texts = [columns[name] for name in data.task.texts]
        encoded = with_tokens(tokenizer(*texts, truncation=True, max_length=max_length), tokenizer)
        if pad:
            encoded = dict(tokenizer.pad(encoded, padding="max_length", max_length=max_length))
        if "label" not in columns:
            return encoded
        return {**encoded, "labels": [labels.to_model(label) for label in columns["label"]]}

    encoded = {}
    for split, columns in data.splits.items():
        raw = Dataset.from_dict(dict(columns))
        encoded[split] = raw.map(
            tokenize,
            batched=True,
            remove_columns=raw.column_names,
            new_fingerprint=split,  # nothing is cached: the tokenizer need not be hashed
            desc=f"tokenizing {split}",
        )
    return encoded


def predict(
    accelerator: Accelerator, model: PreTrainedModel, examples: Dataset, collate: Collator, size: int
) -> np.ndarray:
    """Return the logits of all examples, in their order, on every process: [N, C] float32.

    The mode of every module is restored.
    """
    batches = longest_first(lengths(examples), size)
    share = batches[accelerator.process_index :: accelerator.num_processes]
    rows: list[tuple[int, np.ndarray]] = []
    with evaluating(model):
        for indices in progress_bar(share, desc="evaluating", disable=not accelerator.is_main_process):
            batch = collate([{k: v for k, v in examples[i].items() if k != "labels"} for i in indices])
            logits = model(**{name: tensor.to(accelerator.device) for name, tensor in batch.items()}).logits
            rows += zip(indices, logits.float().cpu().numpy(), strict=True)
    if accelerator.num_processes > 1:
        rows = gather_object(rows)
    return np.stack([row for _, row in sorted(rows, key=lambda pair: pair[0])])


def lengths(examples: Dataset) -> list[int]:
    """Return the number of tokens of every example; images all have length 1."""
    return [len(ids) for ids in examples["input_ids"]] if "input_ids" in examples.column_names else [1] * len(examples)


def draw(examples: Dataset, count: int, seed: int) -> Dataset:
    """Return a random sample of `count` examples, drawn with the seed."""
    chosen = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed))[:count]
    return examples.select(chosen.tolist())


def calibration_batches(
    examples: Dataset, collate: Collator, size: int = 32, *, labels: bool = False
) -> Sequence[Mapping]:
    """Return batches of inputs as the model takes them, with examples of similar length together."""
    examples = examples if labels else examples.remove_columns("labels")
    indices = longest_first(lengths(examples), size)
    return [dict(collate([examples[i] for i in batch])) for batch in indices]


def submission_lines(task: Task, outputs: np.ndarray) -> list[str]:
    """Return one line per example, after a header: its index and the predicted class or score.

    Args:
        task: classes are numbered, or spelt out where GLUE wants names; the user's own files always get names.
        outputs: [N, classes] logits, or [N] scores. STS-B's are clipped to its scale, 0 to 5, and have three decimals.
    """
    if not task.labels:
        is_stsb = task.name == "stsb"
        scores = np.clip(outputs, 0.0, 5.0) if is_stsb else outputs
        values = [f"{score:.3f}" if is_stsb else f"{score:.7g}" for score in scores]  # all digits of float32
    else:
        names = task.labels if task.name is None or LAYOUTS[task.name].by_name else range(len(task.labels))
        values = [str(names[index]) for index in outputs.argmax(-1)]
    return ["index\tprediction", *(f"{index}\t{value}" for index, value in enumerate(values))]


def submission_name(task: Task, split: str) -> str:
    """Return the file name that GLUE wants for a test split, such as "MNLI-mm.tsv" for "test_mismatched"."""
    return "predictions.tsv" if task.name is None else LAYOUTS[task.name].submission(split)


def submission_text(task: Task, outputs: np.ndarray) -> str:
    return "\n".join(submission_lines(task, outputs)) + "\n"
