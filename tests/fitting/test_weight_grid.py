"""Weights on a grid: the nearest points, GPTQ beside exact least squares, and what is refused."""

import itertools

import pytest
import torch

from collab_heads.base.option_values import BITS
from collab_heads.errors import ArgumentError, NonFiniteError
from collab_heads.fitting.weight_grid import RIDGE, SHARES, gptq, nearest_on_grid
from collab_heads.layers.weight_grid import BLOCK, codes_of, num_blocks

ROUNDING = 1e-8  # float64; differences seen: 2e-13


def weights(outputs=6, inputs=80, seed=0):
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moments(inputs, tokens=400, seed=1):
    """Second moments of inputs of which each has something of the others."""
    generator = torch.Generator().manual_seed(seed)
    seen = torch.randn(tokens, inputs, generator=generator, dtype=torch.float64)
    seen = seen @ torch.randn(inputs, inputs, generator=generator, dtype=torch.float64)
    return seen.mT @ seen / tokens


def lost(weight, found, second):
    missing = weight - found.weight().to(weight)
    return float((missing @ second * missing).sum())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("inputs", [1, 31, 32, 80])
def test_codes_fit_their_bits_and_scales_their_blocks(bits, inputs):
    for found in (nearest_on_grid(weights(inputs=inputs), bits), gptq(weights(inputs=inputs), moments(inputs), bits)):
        assert found.codes.shape == (6, inputs) and found.codes.dtype == torch.int8
        assert found.scales.shape == (6, num_blocks(inputs, bits)) and found.scales.dtype == torch.float16
        assert codes_of(bits)[0] <= int(found.codes.min()) and int(found.codes.max()) < 2 ** (bits - 1)
        assert found.num_bytes == 6 * (-(-inputs // BLOCK) * 4 * bits + 2 * num_blocks(inputs, bits))


@pytest.mark.parametrize("bits", BITS)
def test_each_block_gets_the_best_of_the_scales(bits):
    weight = weights()
    found = nearest_on_grid(weight, bits).weight().double()
    size = weight.shape[1] if bits == 8 else BLOCK  # whose inputs share a scale
    for row, block in itertools.product(range(len(weight)), range(-(-weight.shape[1] // size))):
        own = slice(block * size, (block + 1) * size)
        wanted, errors = weight[row, own], []
        extreme = max(wanted.tolist(), key=abs)
        for share in [each for each in SHARES if bits != 8 or each <= 1]:
            extreme = -abs(extreme) if bits == 8 else extreme
            scale = float(torch.tensor(extreme * share / codes_of(bits)[0]).half())
            points = scale * torch.tensor(codes_of(bits), dtype=torch.float64)
            errors.append(float((wanted[:, None] - points).abs().min(1).values.square().sum()))
        assert float((found[row, own] - wanted).square().sum()) == pytest.approx(min(errors), rel=ROUNDING)


def test_weights_on_the_grid_stay():
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (5, 64), generator=generator)
    codes[:, ::BLOCK] = -8  # what gives a block its scale
    weight = codes * torch.tensor([0.25, -0.5]).repeat_interleave(BLOCK)
    for found in (nearest_on_grid(weight, 4), gptq(weight, moments(64), 4)):
        assert torch.equal(found.weight(), weight)


@pytest.mark.parametrize("bits", BITS)
def test_gptq_makes_up_for_each_input_by_least_squares(bits):
    """Given the codes of the first inputs, the next ones are those of the best weights for what is left."""
    weight, second = weights(inputs=40), moments(40)
    found = gptq(weight, second, bits)
    regular = second + RIDGE * second.diagonal().mean() * torch.eye(40, dtype=torch.float64)
    size = 40 if bits == 8 else BLOCK
    ours, scales = found.weight().double(), found.scales.double().repeat_interleave(size, dim=1)[:, :40]
    for place in range(1, 40):
        done, rest = slice(place), slice(place, None)
        missing = (weight[:, done] - ours[:, done]) @ regular[done, rest]
        best = weight[:, rest] + torch.linalg.solve(regular[rest, rest], missing.mT).mT
        code = (best[:, 0] / scales[:, place]).round().clamp(codes_of(bits)[0], codes_of(bits)[-1])
        assert torch.equal(code.to(torch.int8), found.codes[:, place])


@pytest.mark.parametrize("bits", BITS)
def test_gptq_changes_outputs_less_than_rounding(bits):
    weight, second = weights(), moments(80)
    assert lost(weight, gptq(weight, second, bits), second) < 0.7 * lost(weight, nearest_on_grid(weight, bits), second)


def test_more_bits_are_nearer():
    errors = [float((nearest_on_grid(weights(), bits).weight() - weights()).square().sum()) for bits in BITS]
    assert errors == sorted(errors, reverse=True) and errors[-1] < errors[0] / 100


def test_blocks_of_zeros_and_inputs_that_are_always_zero():
    weight, second = weights(inputs=64), moments(64)
    weight[:, :BLOCK] = 0
    second[40], second[:, 40] = 0, 0
    for found in (nearest_on_grid(weight, 4), gptq(weight, second, 4), gptq(weight, torch.zeros_like(second), 4)):
        assert torch.equal(found.weight()[:, :BLOCK], torch.zeros(6, BLOCK)) and found.weight().isfinite().all()


def test_tiny_weights_have_no_scale():
    """Half precision holds nothing below 6e-8."""
    assert torch.equal(nearest_on_grid(torch.full((1, 32), 1e-9), 4).weight(), torch.zeros(1, 32))


@pytest.mark.parametrize("bits", [0, 5, 16, "4", True])
def test_other_bits_are_refused(bits):
    with pytest.raises(ArgumentError, match=r"bits=.*: a weight has 3, 4 or 8 bits"):
        nearest_on_grid(weights(), bits)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1e9])
def test_weights_without_a_scale_are_refused(number):
    weight = weights().index_fill(1, torch.tensor(3), number)
    with pytest.raises(NonFiniteError, match="no scale"):
        nearest_on_grid(weight, 4)
    with pytest.raises(NonFiniteError, match="no scale"):
        gptq(weight, moments(80), 4)


def test_moments_that_do_not_fit_are_refused():
    with pytest.raises(ArgumentError, match=r"second: \[40, 40\] moments for weights \[6, 80\], not \[80, 80\]"):
        gptq(weights(), moments(40), 4)
    with pytest.raises(NonFiniteError, match="NaN or inf"):
        gptq(weights(), moments(80).fill_(float("inf")), 4)


def test_rows_of_eight_bits_reach_the_last_code():
    """So CTranslate2, which takes the largest weight of a row for 127, finds the same codes."""
    found = nearest_on_grid(weights(outputs=50), 8)
    assert (found.codes.abs().amax(1) == 127).all() and (found.scales > 0).all()
