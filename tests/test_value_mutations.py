"""Broken versions of narrower values that their tests must catch: each is put in place and seen to fail."""

from dataclasses import replace

import pytest
import test_value_contract as contract
import torch
from model_sizes import WITH_VALUES

from collab_heads.calibration import input_moments
from collab_heads.collaborative import replacement
from collab_heads.fitting import values
from collab_heads.layers import attention
from collab_heads.layers.values import read_values, write_values
from collab_heads.model import apply_state
from families import FAMILIES, LAYOUTS

BIASED = [name for name in LAYOUTS if FAMILIES[name].biased]


def changed_output(monkeypatch, change):
    def write(value, output, weights):
        write_values(value, output, replace(weights, output=change(weights.output)))

    monkeypatch.setattr(apply_state, "write_values", write)


def columns_of_another_head(monkeypatch):
    changed_output(monkeypatch, lambda output: output.roll(output.shape[1] // 4, dims=1))


def transposed_columns(monkeypatch):
    """Dimension by dimension, as packed values are not."""
    changed_output(monkeypatch, lambda output: output.unflatten(1, (4, -1)).mT.flatten(1))


def rows_of_the_old_basis(monkeypatch):
    def write(value, output, weights):
        write_values(value, output, replace(weights, value=value.weight.detach()))

    monkeypatch.setattr(apply_state, "write_values", write)


def value_bias_in_the_old_basis(monkeypatch):
    def write(value, output, weights):
        write_values(value, output, replace(weights, value_bias=value.bias.detach()))

    monkeypatch.setattr(apply_state, "write_values", write)


@pytest.mark.parametrize(
    "mutation, name",
    [(m, n) for m in (columns_of_another_head, transposed_columns, rows_of_the_old_basis) for n in LAYOUTS]
    + [(value_bias_in_the_old_basis, name) for name in BIASED],
)
def test_a_wrong_basis_is_caught(mutation, name, monkeypatch):
    mutation(monkeypatch)
    with pytest.raises(AssertionError):
        contract.assert_lossless(FAMILIES[name], WITH_VALUES[LAYOUTS.index(name) % len(WITH_VALUES)], "sdpa")


def bias_mean_dropped(monkeypatch):
    stock = values.head_moments

    def head_moments(*args, **kwargs):
        return replace(stock(*args, **kwargs), mean=torch.zeros_like(stock(*args, **kwargs).mean))

    monkeypatch.setattr(replacement, "head_moments", head_moments)


def padding_counted(monkeypatch):
    """What heads put out at padding is taken into the moments."""
    stock = replacement.fit_values

    def fit_values(plan, seen):
        return stock(plan, PADDED.pop(plan.site.path).finished())

    def hear(self, projection, args):
        PADDED.setdefault(self.site.path, input_moments.RunningMoments()).add(args[0], None)
        heard(self, projection, args)

    heard = input_moments.OutputListener.hear
    monkeypatch.setattr(input_moments.OutputListener, "hear", hear)
    monkeypatch.setattr(replacement, "fit_values", fit_values)


PADDED = {}


@pytest.mark.parametrize("mutation", (bias_mean_dropped, padding_counted))
def test_a_wrong_mean_is_caught(mutation, monkeypatch):
    mutation(monkeypatch)
    monkeypatch.setattr(values, "DOUBT", 0.0)
    with pytest.raises(AssertionError):
        contract.assert_predicted("bert", contract.FIRST)


def test_alphas_left_in_place_are_caught(monkeypatch):
    """W_O's columns are changed, and the alphas of the old basis applied to them."""

    def read(value, output):
        return replace(read_values(value, output), output=output.weight.detach())

    monkeypatch.setattr(replacement, "read_values", read)
    with pytest.raises(AssertionError):
        contract.test_gates_and_alphas_stay("bert", "gated")


def test_a_slice_that_is_forgotten_is_caught(monkeypatch):
    """Values that were padded for a fused backend must be cut again."""
    pad = torch.nn.functional.pad

    class Padding:
        @staticmethod
        def pad(tensor, widths):
            return pad(tensor, (widths[1], 0))  # on the wrong side

    monkeypatch.setattr(attention, "F", Padding)
    with pytest.raises(AssertionError):
        contract.contract.test_backends_agree_when_narrow(FAMILIES["bert"], "stock+values")


def test_values_that_are_not_rebuilt_are_caught(monkeypatch, tmp_path):
    monkeypatch.setattr(apply_state, "keep_value_rows", lambda *args: None)
    with pytest.raises((AssertionError, AttributeError, RuntimeError)):  # transformers names the sizes that differ
        contract.test_save_and_load("bert", "stock+values", tmp_path)
