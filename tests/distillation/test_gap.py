"""The gap between two models, by hand: every part's squared error, relative to how much it varies in the original."""

import copy

import pytest
import torch

from collab_heads.distillation.gap import Gap
from collab_heads.distillation.processes import Processes
from collab_heads.running.outputs import Output
from families import FAMILIES

FP32_NOISE = 1e-5  # relative: the same batches in portions, summed in another order
OUTPUT_WEIGHT = 0.5


def parts_of(model, batch) -> list[torch.Tensor]:
    """The rows that count of every layer, and the logits, in float64."""
    with torch.no_grad():
        found = model(**batch, output_hidden_states=True)
    mask = batch["attention_mask"].bool()
    return [*(states[mask].double() for states in found.hidden_states[1:]), found.logits.double()]


def squared(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The mean over rows."""
    return (one - other).square().sum(-1).mean()


def divergence(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Twice the mean over rows, of the distributions that logits stand for."""
    one, other = one.log_softmax(-1), other.log_softmax(-1)
    return 2 * (one.exp() * (one - other)).sum(-1).mean()


def expected(model, original, measured, batches) -> torch.Tensor:
    """The error of every part on some batches, relative to what the original's layers vary on the measured ones."""
    scales = [squared(rows, rows.mean(0)) for rows in joined(original, measured)[:-1]]
    pairs = list(zip(joined(original, batches), joined(model, batches), strict=True))
    layers = [squared(*pair) / scale for pair, scale in zip(pairs, scales, strict=False)]
    return torch.stack([*layers, divergence(*pairs[-1])])


def joined(model, batches) -> list[torch.Tensor]:
    return [torch.cat(rows) for rows in zip(*(parts_of(model, batch) for batch in batches), strict=True)]


@pytest.fixture
def gap(pair, batches):
    return Gap.measured(*pair, Processes(1, 0, torch.device("cpu"), "no"), list(enumerate(batches[:3])), OUTPUT_WEIGHT)


def test_the_held_out_error_is_relative_to_what_the_original_varies(gap, pair, batches):
    *layers, output = expected(*pair, batches[:3], batches[3:5])
    found = gap.error(list(enumerate(batches[3:5])))
    assert found.hidden == pytest.approx(float(sum(layers) / len(layers)), rel=FP32_NOISE)
    assert found.output == pytest.approx(float(output), rel=FP32_NOISE)


def test_an_error_that_rounds_to_less_than_zero_is_zero(gap, batches, monkeypatch):
    """As that of an exact swap: a report takes its root."""
    monkeypatch.setattr(Output, "squared_gap", lambda original, changed: 0 * changed.rows.sum() - 1e-9)
    found = gap.error(list(enumerate(batches[3:5])))
    assert (found.hidden, found.output) == (0, 0)


def test_so_is_what_is_made_small(gap, pair, batches):
    *layers, output = expected(*pair, batches[:3], batches[5:6])
    loss, _ = gap.backward(5, batches[5])
    assert loss == pytest.approx(float(sum(layers) / len(layers) + OUTPUT_WEIGHT * output), rel=FP32_NOISE)


def test_a_token_of_outlying_norm_does_not_decide_alone():
    """The states of one token are a thousand times as long: its error counts as if they were as long as usual."""
    original = FAMILIES["llama"].build().eval()
    with torch.no_grad():
        original.get_input_embeddings().weight[7] *= 1e4
    model = copy.deepcopy(original)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(0.9)
    inputs = {"input_ids": torch.tensor([[7, *range(10, 21)]]).repeat(3, 1)}
    with torch.no_grad():
        first, second = (each(**inputs, output_hidden_states=True).hidden_states[1:] for each in (original, model))
    errors = []
    for rows, others in zip(first, second, strict=True):
        rows, others = rows.flatten(0, 1).double(), others.flatten(0, 1).double()
        norms = rows.norm(dim=1, keepdim=True)
        factors = torch.where(norms > 10 * norms.median(), norms.median() / norms, 1.0)
        shorter = rows * factors
        errors.append(squared(shorter, others * factors) / squared(shorter, shorter.mean(0)))
        assert (factors < 0.1).sum() == (3 if len(errors) < len(first) else 0)  # the last states are normalized
    gap = Gap.measured(model, original, Processes(1, 0, torch.device("cpu"), "no"), [(0, inputs)], OUTPUT_WEIGHT)
    assert gap.error([(0, inputs)]).hidden == pytest.approx(float(sum(errors) / len(errors)), rel=FP32_NOISE)
