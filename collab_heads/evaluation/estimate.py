"""Estimate the time of an evaluation from that of its first examples."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from collab_heads.base.estimates import Estimate
from collab_heads.evaluation.task import Task
from collab_heads.running.batches import evaluating


def estimate_evaluation(task: Task, model: PreTrainedModel, tokenizer: Any, times: Sequence[float]) -> Estimate:
    """Estimate what it takes to score a model, and others in turns with it.

    Args:
        task: the task with its examples.
        model: the original.
        tokenizer: its tokenizer.
        times: those of the others, as shares of the original's.
    """
    first = task.first(task.limits.batch_size)
    with evaluating(model):
        first.answers(model, tokenizer)  # the first time is slower
        started = time.perf_counter()
        first.answers(model, tokenizer)
        seconds = time.perf_counter() - started
    answers = seconds * characters(task) / characters(first) * (1 + sum(times))
    turns = seconds * (1 + task.ROUNDS) * sum(1 + each for each in times)
    return Estimate(answers + turns, 0.0, torch.get_num_threads())


def characters(task: Task) -> int:
    """Return the length of the texts of a task, each counted once."""
    return sum(map(len, {text for column in task.columns[task.TEXTS] for text in column}))
