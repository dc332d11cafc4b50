"""The estimate of a swap counts what is fitted: steps, kinds, values, and the widths that are measured."""

import pytest
import torch
from transformers import BertConfig, BertModel

from collab_heads import swap_to_collaborative
from collab_heads.base import estimates
from collab_heads.base.progress import showing_bars
from collab_heads.collaborative import estimate as estimating
from collab_heads.collaborative.estimate import estimate_swap
from collab_heads.collaborative.swap import plan_change
from collab_heads.errors import CalibrationError
from collab_heads.model.opened import opened
from collab_heads.running.speed import Speed

SPEED = Speed(positions=1000, rows=100, batches=4, longest=10, seconds=2.0, product=1e-9, product_alone=1e-9)


def bert():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 100}
    return BertModel(BertConfig(**sizes, num_hidden_layers=2)).eval()


@pytest.fixture
def estimated(monkeypatch):
    """The seconds of a swap with `SPEED`."""
    monkeypatch.setattr(estimating, "measure_speed", lambda model, batches: SPEED)
    model = bert()

    def seconds(width=16, value=None, kind="shared", steps=100, balanced=False, sites=None):
        with opened(model) as layers:
            plans = plan_change(layers, sites, width, value, kind)
            return estimate_swap(model, [{"input_ids": 1}], *plans, steps, is_balanced=balanced).seconds

    return seconds


def test_what_takes_longer_is_said_to(estimated):
    shared, heads = estimated(), estimated(kind="per_head")
    assert shared > heads > estimated(kind="per_head", steps=10)
    assert estimated(balanced=True) > shared and estimated(value=16) > shared and estimated(width=24) > shared
    # a pass with moments, 1.7 ms and the products of 100 steps at two sites, and the outputs of the recorded calls
    step = 1.7e-3 + 3.4 * 32**2 * 160 * 1e-9
    moments = 0.4 * 2 * 2 * 32**2 * 1000 * 1e-9
    assert heads == pytest.approx(2.0 + moments + 2 * 100 * step + 0.35 * 2.0)
    assert estimated(kind="per_head", sites="encoder.layer.0.attention.self") == pytest.approx(
        2.0 + moments / 2 + 100 * step + 0.35 * 2.0
    )
    assert estimated(width=None) == pytest.approx(2.0)  # nothing is fitted
    assert shared == pytest.approx(heads + 0.5 * 2 * 100 * step + 500e-9 * 2 * 16 * 32**2)
    of_outputs = 0.4 * 2 * 32**2 * 1000 * 1e-9
    assert estimated(width=None, value=16) == pytest.approx(2.0 + of_outputs + 72e-9 * 2 * 32**3)


def test_batches_that_are_none_are_left_to_the_work():
    with opened(model := bert()) as layers, pytest.raises(CalibrationError, match="batches is empty"):
        estimate_swap(model, [], *plan_change(layers, None, 16, None, "shared"), 1, is_balanced=False)


def test_a_swap_has_a_line_where_its_batches_can_be_read_twice(monkeypatch, capsys):
    monkeypatch.setattr(estimates, "LEAST", 0.0)
    batches = [{"input_ids": torch.arange(5, 69).view(4, 16)}] * 4
    for given, said in ((batches, 1), (iter(batches), 0), (None, 0)):
        with showing_bars(True):
            swap_to_collaborative(bert(), dim_shared_query_key=16, batches=given, refine_steps=1)
        lines = [line for line in capsys.readouterr().err.splitlines() if ": about" in line]
        assert len(lines) == said and all(line.startswith("swap: about ") and "GB" in line for line in lines)
