"""Weights on a grid are packed and unpacked, and their codes and scales are found again."""

import pytest
import torch
from torch import nn

from collab_heads.base.option_values import BITS
from collab_heads.fitting.weight_grid import gptq, nearest_on_grid
from collab_heads.layers import weight_grid
from collab_heads.layers.weight_grid import (
    BLOCK,
    WEIGHT_BITS,
    GridWeights,
    bits_of,
    codes_of,
    grid_bytes,
    leave_grids,
    on_grid,
)

WIDTHS = (1, 31, 32, 80)


def weights(inputs, outputs=6):
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(inputs))


def grids(inputs, bits):
    """Weights on a grid, rounded and by GPTQ, whose codes need not reach the ends of their range."""
    rows = torch.randn(64, inputs, generator=torch.Generator().manual_seed(1))
    return nearest_on_grid(weights(inputs), bits), gptq(weights(inputs), rows.mT @ rows, bits)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("inputs", WIDTHS)
def test_packed_codes_take_as_many_bytes_as_they_should_and_come_back(bits, inputs):
    for grid in grids(inputs, bits):
        packed = grid.packed()
        assert packed.dtype == torch.uint8 and packed.shape == (6, -(-inputs // BLOCK) * 4 * bits)
        assert packed.nbytes + grid.scales.nbytes == grid.num_bytes == grid_bytes(6, inputs, bits)
        again = GridWeights.unpacked(packed, grid.scales, inputs)
        assert again.bits == bits and torch.equal(again.codes, grid.codes)


def test_codes_are_packed_in_the_order_that_is_described():
    codes = torch.zeros(1, 32, dtype=torch.int8)
    codes[0, :3] = torch.tensor([-4, 3, 1])  # stored as 0, 7, 5
    packed = GridWeights(codes, torch.ones(1, 1).half(), 3).packed()
    zeros = sum(4 << (3 * place) for place in range(3, 8))  # a code of 0 is stored as 4
    first = 0 | 7 << 3 | 5 << 6 | zeros
    assert packed[0, :3].tolist() == [first & 255, first >> 8 & 255, first >> 16]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("inputs", WIDTHS)
def test_codes_and_scales_are_found_again(bits, inputs):
    for grid in grids(inputs, bits):
        weight = grid.weight()
        found = GridWeights.of(weight, bits)
        assert torch.equal(found.weight(), weight) and set(found.codes.unique().tolist()) <= set(codes_of(bits))


@pytest.mark.parametrize("bits", BITS)
def test_of_zeros_and_constants_too(bits):
    weight = torch.zeros(3, 64)
    weight[1], weight[2, 32:] = 0.25, -3.0
    assert torch.equal(GridWeights.of(weight, bits).weight(), weight)


@pytest.mark.parametrize("row", [0, 40])  # the first rows are tried first
@pytest.mark.parametrize("other", [1.0001, float("nan"), float("inf")])
def test_weights_that_left_the_grid_have_none(row, other):
    weight = nearest_on_grid(weights(64, outputs=41), 4).weight()
    assert GridWeights.of(weight, 4) is not None
    weight[row] *= other
    assert GridWeights.of(weight, 4) is None


def test_many_rows_are_packed_in_several_goes(monkeypatch):
    grid = nearest_on_grid(weights(80, outputs=50), 3)
    whole = grid.packed()
    monkeypatch.setattr(weight_grid, "PACKED", 7 * 80)
    assert torch.equal(grid.packed(), whole)
    assert torch.equal(GridWeights.unpacked(whole, grid.scales, 80).codes, grid.codes)


def test_a_weight_without_elements_has_none():
    assert GridWeights.of(torch.zeros(0, 32), 4) is None
    empty = nn.Linear(32, 0)
    setattr(empty, WEIGHT_BITS, 4)
    assert bits_of(empty) is None


def test_other_shapes_are_refused():
    grid = grids(80, 4)[0]
    packed = grid.packed()
    for codes, scales, inputs in (
        (packed[:, :-1], grid.scales, 80),
        (packed, grid.scales[:, :-1], 80),
        (packed[:-1], grid.scales, 80),
        (packed, grid.scales, 64),
        (packed[:, :24], grid.scales, 80),  # as if of 2 bits
    ):
        with pytest.raises(ValueError, match="are not those of weights with"):
            GridWeights.unpacked(codes, scales, inputs)


def test_modules_know_their_bits_until_they_leave():
    model = nn.ModuleDict(
        {"tied": nn.Embedding(5, 32), "head": nn.Linear(32, 5, bias=False), "other": nn.Linear(32, 4)}
    )
    model["head"].weight = model["tied"].weight
    for module in model.values():
        module.weight.data = nearest_on_grid(module.weight.detach(), 4).weight()
        setattr(module, WEIGHT_BITS, 4)
    model["other"].half()
    found = {name: grid for name, _, grid in on_grid(model)}
    assert found.keys() == {"tied", "other"} and found["other"] is None  # no room for products there
    assert torch.equal(found["tied"].weight(), model["tied"].weight)
    leave_grids(model)
    assert not list(on_grid(model)) and bits_of(model["head"]) is None
