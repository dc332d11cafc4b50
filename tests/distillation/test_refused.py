"""What cannot be distilled is said, and the model is left as it was."""

import copy
import sys

import pytest
import torch
from distilling import changed_pair, random_batches
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification
from unchanged import refused

from collab_heads import distill, prune_heads
from collab_heads.base.extras import MissingPackageError
from collab_heads.distillation.distill import Distillation
from collab_heads.errors import (
    ArgumentError,
    CalibrationError,
    ModelStateError,
    NonFiniteError,
    OutputError,
    UnsupportedModelError,
)
from families import FAMILIES

OPTIONS = {
    "steps": (0, -1, True, 2.5, "10"),
    "learning_rate": (0, -1e-3, float("nan"), float("inf"), True, "1e-3"),
    "output_weight": (-1, float("nan"), "1"),
    "evaluate_every": (0, 1.5),
    "checkpoint_every": (0, True),
    "patience": (0, None),
    "seed": (-1, 1.0),
    "mixed_precision": ("fp16", "bf17"),
    "accelerator": ("cpu",),
}


@pytest.mark.parametrize("name, value", [(name, value) for name, values in OPTIONS.items() for value in values])
def test_options_that_cannot_be(name, value, pair, batches):
    model, original = pair
    with refused(model, ArgumentError, name):
        distill(model, original, batches, **{name: value})


def wider():
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 37}
    return BertForSequenceClassification(BertConfig(vocab_size=61, max_position_embeddings=64, **sizes))


ORIGINALS = {
    "the same object": (lambda model: model, ArgumentError, "one object"),
    "another class": (lambda model: FAMILIES["bert"].build().bert, ArgumentError, "BertForSequenceClassification"),
    "another size": (lambda model: wider(), ArgumentError, "num_hidden_layers 2 and 3"),
    "compiled": (lambda model: torch.compile(FAMILIES["bert"].build()), UnsupportedModelError, "OptimizedModule"),
    "no model": (lambda model: None, UnsupportedModelError, "NoneType"),
}


@pytest.mark.parametrize("kind", ORIGINALS)
def test_originals_that_cannot_be(kind, pair, batches):
    model, _ = pair
    make, error, said = ORIGINALS[kind]
    with refused(model, error, said):
        distill(model, make(model), batches)


def test_a_wrapped_model(pair, batches):
    model, original = pair
    with refused(model, UnsupportedModelError, "DataParallel"):
        distill(torch.nn.DataParallel(model), original, batches)


def test_weights_that_both_models_hold(pair, batches):
    model, original = pair
    original.bert.encoder.layer[0].attention.output.dense = model.bert.encoder.layer[0].attention.output.dense
    with refused(model, ArgumentError, "share bert.encoder.layer.0.attention.output.dense"):
        distill(model, original, batches)


def test_a_weight_that_serves_two_sites(pair, batches):
    model, original = pair
    layers = model.bert.encoder.layer
    layers[1].attention.self.value = layers[0].attention.self.value
    with refused(model, ModelStateError, "is the value projection of"):
        distill(model, original, batches)


def test_nothing_was_changed(batches):
    model, original = FAMILIES["bert"].build(), FAMILIES["bert"].build()
    with refused(model, ArgumentError, "nothing in this BertForSequenceClassification was changed"):
        distill(model, original, batches)


def test_nothing_is_left_of_what_was_changed():
    """An output projection without a bias has no weights once all heads are gone."""
    model = FAMILIES["qwen2"].build()
    original = copy.deepcopy(model)
    prune_heads(model, heads={"layers.1.self_attn": range(4)})
    with refused(model, ArgumentError, "has no weights left to train: layers.1.self_attn"):
        distill(model, original, [FAMILIES["qwen2"].inputs()])


def test_float16(pair, batches):
    model, original = pair[0].half(), pair[1].half()
    with refused(model, ArgumentError, "torch.float16", "model.float()"):
        distill(model, original, batches)


def empty(batch):
    return {name: tensor[:0] for name, tensor in batch.items()}


BATCHES = {
    "none": (lambda batches: [], "empty"),
    "no iterable": (lambda batches: 3, "int"),
    "one batch alone": (lambda batches: batches[0], "expected an iterable of input dicts"),
    "no dict": (lambda batches: [batches[0], [1]], "batch 1 is a list"),
    "no rows": (lambda batches: [batches[0], empty(batches[1])], "batch 1 holds no examples"),
    "padding only": (
        lambda batches: [batches[0] | {"attention_mask": batches[0]["attention_mask"] * 0}],
        "batch 0 holds no tokens",
    ),
    "lists": (lambda batches: [{"input_ids": [[3, 4]]}], "batch 0 holds no tensors"),
    "out of the vocabulary": (
        lambda batches: [*batches[:5], batches[5] | {"input_ids": batches[5]["input_ids"] + 100}],
        "cannot take batch 5",
    ),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_batches_that_cannot_be(kind, pair, batches):
    model, original = pair
    make, said = BATCHES[kind]
    with refused(model, CalibrationError, said):
        distill(model, original, make(batches), steps=20)


class Failing(torch.utils.data.Dataset):
    """Examples, the sixth of which cannot be read."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        if index == 6:
            raise OSError("the disk is gone")
        return {name: tensor[0] for name, tensor in random_batches(1)[0].items()}


def test_a_loader_that_fails(pair):
    model, original = pair
    with refused(model, CalibrationError, "batch 3 cannot be read: OSError: the disk is gone"):
        distill(model, original, DataLoader(Failing(), batch_size=2))


def test_a_loader_is_listed_once(pair):
    model, original = pair

    class Whole(Failing):
        def __len__(self):
            return 5

    report = distill(model, original, DataLoader(Whole(), batch_size=2), steps=3)
    assert report.after.hidden < report.before.hidden and report.batches == 3


@pytest.mark.parametrize("step", (0, 3))
def test_nan_on_the_way(step, pair, batches, monkeypatch):
    """The model is as it was, also after some good steps."""
    model, original = pair
    stock, count = Distillation.take_step, []

    def poisoned(self, progress):
        if len(count) == step:
            self.weights.trained[next(iter(self.weights.trained))].data.fill_(float("nan"))
        count.append(1)
        return stock(self, progress)

    monkeypatch.setattr(Distillation, "take_step", poisoned)
    with refused(model, NonFiniteError, "the gap to the original is nan on training batch"):
        distill(model, original, batches, steps=10)
    assert len(count) == step + 1


def test_an_original_that_puts_out_nan(pair, batches):
    model, original = pair
    original.classifier.weight.data.fill_(float("nan"))
    with refused(model, NonFiniteError, "held-out batch 7"):
        distill(model, original, batches)


def test_an_interruption(pair, batches, monkeypatch):
    model, original = pair
    stock = Distillation.evaluate

    def interrupted(self, progress):
        if progress.step:
            raise KeyboardInterrupt
        stock(self, progress)

    monkeypatch.setattr(Distillation, "evaluate", interrupted)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(KeyboardInterrupt):
        distill(model, original, batches, steps=10)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_accelerate_is_missing(pair, batches, monkeypatch):
    model, original = pair
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with refused(model, MissingPackageError, "distillations need accelerate: pip install accelerate"):
        distill(model, original, batches)


def test_an_output_folder_that_is_a_file(pair, batches, tmp_path):
    """It shows before anything is trained."""
    model, original = pair
    (tmp_path / "file").write_text("mine")
    original.forward = None  # not callable: no step is taken
    with refused(model, OutputError, "file"):
        distill(model, original, batches, steps=4, output_dir=tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_deep_copy_before_the_swap_is_an_original(batches):
    model = FAMILIES["bert"].build()
    original = copy.deepcopy(model)
    changed, _ = changed_pair()
    assert distill(changed, original, batches, steps=2).steps == 2


@pytest.mark.slow
def test_what_is_frozen_stays_as_it_is(pair, batches):
    model, original = pair
    frozen = {name: p for name, p in model.named_parameters() if "attention.output" in name}
    for parameter in frozen.values():
        parameter.requires_grad_(False)
    before = {name: parameter.clone() for name, parameter in frozen.items()}
    report = distill(model, original, batches, steps=20, learning_rate=0.01)
    assert report.best_step > 0
    assert all(torch.equal(parameter, before[name]) for name, parameter in frozen.items())
    model.requires_grad_(False)
    with refused(model, ArgumentError, "is frozen", "model.requires_grad_(True)"):
        distill(model, original, batches)


def test_how_outputs_are_returned_may_differ(pair, batches):
    model, original = pair
    model.config.return_dict, original.config.output_hidden_states = False, True
    assert distill(model, original, batches, steps=2).steps == 2
