"""Prediction files in the format that the GLUE server takes."""

import numpy as np

from collab_heads.training.data.glue_tasks import LAYOUTS, Task


def submission_lines(task: Task, outputs: np.ndarray) -> list[str]:
    """One line per example, after a header: its index and the predicted class or score.

    Args:
        task: classes are numbered, or spelt out where GLUE wants names; files of one's own always get names.
        outputs: [N, classes] logits, or [N] scores. STS-B's are clipped to its scale, 0 to 5.
    """
    if not task.labels:
        scores = np.clip(outputs, 0.0, 5.0) if task.name == "stsb" else outputs
        values = [f"{score:.3f}" for score in scores]
    else:
        names = task.labels if task.name is None or LAYOUTS[task.name].by_name else range(len(task.labels))
        values = [str(names[index]) for index in outputs.argmax(-1)]
    return ["index\tprediction", *(f"{index}\t{value}" for index, value in enumerate(values))]


def submission_name(task: Task, split: str) -> str:
    """The file name that GLUE wants for a test split, such as "MNLI-mm.tsv" for "test_mismatched"."""
    return "predictions.tsv" if task.name is None else LAYOUTS[task.name].submission(split)


def submission_text(task: Task, outputs: np.ndarray) -> str:
    """The lines as a file has them."""
    return "\n".join(submission_lines(task, outputs)) + "\n"
