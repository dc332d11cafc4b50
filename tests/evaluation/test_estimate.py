"""The estimate of an evaluation: answers of all examples, and the first ones in turns."""

import pytest
import torch

from collab_heads.evaluation import estimate as estimating
from collab_heads.evaluation.estimate import estimate_evaluation
from collab_heads.evaluation.task import Limits
from collab_heads.evaluation.tasks import Similarity


def test_it_counts_texts_and_turns(monkeypatch):
    """Half of the answers of ten examples are read at a time; each time takes two seconds of this clock."""
    turns, asked = iter(range(0, 100, 2)), []
    monkeypatch.setattr(estimating.time, "perf_counter", lambda: float(next(turns)))
    monkeypatch.setattr(Similarity, "answers", lambda task, model, tokenizer: asked.append(len(task)))
    texts = [[f"text {number}" for number in range(10)], [f"other {number}" for number in range(10)], ["1"] * 10]
    task, model = Similarity(texts, "here", Limits(5, 8)), torch.nn.Linear(1, 1)
    found = estimate_evaluation(task, model, None, [0.5, 0.25])
    assert asked == [5, 5] and task.ROUNDS > 1
    assert found.seconds == pytest.approx(2 * 2 * 1.75 + 2 * (1 + task.ROUNDS) * (1.5 + 1.25))
