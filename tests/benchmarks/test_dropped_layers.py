"""The benchmark of dropped layers: states are compared at the same depth, and training brings them nearer."""

import importlib

import pytest
import torch
from pages import ROOT
from transformers import BertConfig, BertModel

from collab_heads.distillation.processes import Processes


@pytest.fixture
def dropped(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("dropped_layers")


@pytest.fixture
def original():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 4}
    return BertModel(BertConfig(vocab_size=50, **sizes)).eval()


@pytest.fixture
def batches():
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(5, 50, (4, 7), generator=generator)} for _ in range(9)]


def test_states_are_those_at_the_same_share_of_the_layers(dropped, original, batches):
    small, numbered = dropped.with_layers(original, (0, 1)), [*enumerate(batches)]
    gap = dropped.LayerGap.measured(small, original, Processes.found(None, None, True), numbered, 1.0)
    first, second, _ = gap.run(original, 0, batches[0])
    states = original(**batches[0], output_hidden_states=True).hidden_states
    assert torch.equal(first.rows, states[2].flatten(0, 1)) and torch.equal(second.rows, states[4].flatten(0, 1))
    whole = dropped.with_layers(original, range(4))
    gap = dropped.LayerGap.measured(whole, original, Processes.found(None, None, True), numbered, 1.0)
    assert gap.error(numbered).total(1.0) == 0


def test_the_layers_that_are_kept_move_the_output_least(dropped, original, batches):
    with torch.no_grad():  # a layer that adds hardly anything
        for projection in (original.encoder.layer[1].attention.output.dense, original.encoder.layer[1].output.dense):
            projection.weight.zero_()
    assert dropped.nearest(original, 3, batches) == (0, 2, 3)


@pytest.mark.slow
def test_training_brings_the_model_nearer(dropped, original, batches):
    errors = []
    for steps in (1, 40):
        small = dropped.with_layers(original, (1, 3))
        errors.append(dropped.distilled(small, original, batches, steps, 0.01))
    assert errors[1] < 0.9 * errors[0]
