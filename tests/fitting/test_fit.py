"""Calibration that says little or nothing: keys that are all alike, inputs that are zero."""

import pytest
import torch
from model_runs import output, sites, swap
from model_sizes import EXACT, FP32_NOISE, KINDS

import collab_heads
from collab_heads.calibration.calibrate import SiteCalibration
from collab_heads.calibration.input_moments import InputMoments
from collab_heads.fitting.kinds import FITS
from families import FAMILIES

NARROW = {"shared": 20, "per_head": 16}
SAME_DIRECTIONS = 1e-4  # roots that are equal up to the floor, and rounding beside it; differences seen: 5e-6


def one_token(model):
    """Sentences of a single token: no attention can go wrong."""
    return [{"input_ids": torch.tensor([[5], [6], [7]])}]


def one_token_again(model):
    """Sentences of one token, repeated; T5's have no positions, so its first layer sees equal inputs."""
    return [{"input_ids": torch.full((2, 4), 5)}]


def constant(model):
    """The same vector everywhere."""
    return [{"inputs_embeds": torch.ones(2, 4, model.config.hidden_size)}]


def calibrations(name):
    return (one_token, one_token_again) if name == "t5-encoder" else (one_token, one_token_again, constant)


@pytest.mark.parametrize("allocation", ("uniform", "balanced"))
@pytest.mark.parametrize("dim", ("narrow", "full"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name, batches", [(name, batches) for name in ("bert", "t5-encoder") for batches in calibrations(name)]
)
def test_keys_that_are_all_alike(name, batches, kind, dim, allocation):
    model = FAMILIES[name].build()
    before = output(model, FAMILIES[name].inputs())
    width = EXACT if dim == "full" else NARROW[kind]
    report = swap(model, kind, width, batches=batches(model), refine_steps=2, allocation=allocation)
    after = output(model, FAMILIES[name].inputs())
    assert torch.isfinite(after).all()
    if dim == "full":
        torch.testing.assert_close(after, before, rtol=0, atol=FP32_NOISE)
    else:
        errors = [site.relative_error for site in report.sites]
        assert 0 < max(errors) < 1
        assert allocation == "balanced" or min(errors) > 0


def moments(tokens):
    return InputMoments.of(tokens)


def weights():
    model = FAMILIES["bert"].build().double()
    return collab_heads.get_adapter(model).read(next(iter(sites(model).values())))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("queries", ("random", "zero"))
@pytest.mark.parametrize("keys", ("alike", "all but alike", "zero"))
def test_what_says_nothing_does_not_weight(kind, queries, keys):
    """The decomposition of the key side is then that of the weights; the query side counts as it is."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(3, 9, 32, generator=generator, dtype=torch.float64)
    key = torch.ones_like(states) * (0.0 if keys == "zero" else 3.0)
    if keys == "all but alike":
        key += 1e-9 * states
    seen = SiteCalibration(moments(states if queries == "random" else 0 * states), moments(key))
    fit = FITS[kind](weights(), seen)
    root = fit.key_root
    torch.testing.assert_close(root / root[0, 0], torch.eye(32).double(), rtol=0, atol=SAME_DIRECTIONS)
    if queries == "zero" and kind == "shared":
        torch.testing.assert_close(fit.query_root, torch.eye(32).double(), rtol=0, atol=0)
    else:
        assert torch.isfinite(fit.query_root).all()


def test_keys_that_differ_weight_as_before():
    """What is added against rounding does not show where there is something to see."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(3, 9, 32, generator=generator, dtype=torch.float64)
    shifted = FITS["shared"](weights(), SiteCalibration(moments(states), moments(states + 5.0)))
    centred = FITS["shared"](weights(), SiteCalibration(moments(states), moments(states)))
    torch.testing.assert_close(shifted.key_root, centred.key_root, rtol=0, atol=SAME_DIRECTIONS)
