"""When a distillation stops early."""

from types import SimpleNamespace

import pytest

from collab_heads.distillation.distill import Distillation


@pytest.mark.parametrize(
    "totals, is_stale",
    (
        ((0.056,), False),
        ((0.056, 0.066, 0.069, 0.068, 0.065), False),  # falling again, after steps that were too large
        ((0.056, 0.066, 0.067, 0.068, 0.069), False),
        ((0.056, 0.066, 0.067, 0.068, 0.069, 0.070), True),
        ((0.056, 0.050, 0.040, 0.041, 0.042, 0.043), False),
        ((0.056, 0.050, 0.040, 0.041, 0.042, 0.043, 0.044), True),
    ),
)
def test_it_stops_when_training_brings_nothing_more(totals, is_stale):
    """The error before training does not count."""
    history = [(30 * i, SimpleNamespace(total=lambda weight, total=total: total)) for i, total in enumerate(totals)]
    training = object.__new__(Distillation)
    training.options = SimpleNamespace(patience=4, output_weight=1.0)
    best = 30 * min(range(len(totals)), key=totals.__getitem__)
    assert training.is_stale(SimpleNamespace(history=history, best_step=best)) is is_stale
