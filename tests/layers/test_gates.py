"""Hard Concrete gates against their closed forms: distribution, rule, exact zeros and ones."""

import math

import pytest
import torch

from collab_heads.layers import gates
from collab_heads.layers.gates import INIT_LOG_ALPHA, HeadGates, threshold
from collab_heads.sites.state import GateState

SAMPLES = 40_000
SAMPLING_NOISE = 0.013  # five standard errors of a mean of that many numbers in [0, 1], at most
STATES = (GateState(), GateState(temperature=2 / 3), GateState(temperature=1.0, stretch=(-0.5, 1.2)))
LOG_ALPHAS = (-2.0, -0.3, 0.0, 0.4, 1.5)


def learned(*log_alpha, state=STATES[0]) -> HeadGates:
    made = HeadGates(state, len(log_alpha)).eval()
    made.log_alpha.data = torch.tensor(log_alpha)
    return made


def fixed(*alive) -> HeadGates:
    made = HeadGates(GateState("fixed"), len(alive)).eval()
    made.alive.copy_(torch.tensor(alive))
    return made


def logit(p):
    return math.log(p / (1 - p))


def closed_forms(log_alpha, state):
    """P(gate = 0), P(gate = 1) and the mean of a gate, from the distribution function of the binary Concrete."""
    low, high = state.stretch

    def below(gate):  # P(stretched sample <= gate): s <= (gate - low) / (high - low), and s grows with u
        return 1 / (1 + math.exp(log_alpha - state.temperature * logit((gate - low) / (high - low))))

    steps = [(i + 0.5) / 10_000 for i in range(10_000)]
    return below(0.0), 1 - below(1.0), sum(1 - below(step) for step in steps) / len(steps)


@pytest.mark.parametrize("state", STATES, ids=str)
def test_distribution_of_samples(state):
    made, many = learned(*LOG_ALPHAS, state=state), learned(*LOG_ALPHAS * SAMPLES, state=state).train()
    torch.manual_seed(0)
    with torch.no_grad():
        drawn = many().unflatten(0, (SAMPLES, -1))
    assert 0 <= drawn.min() and drawn.max() <= 1
    expected = torch.tensor([closed_forms(log_alpha, state) for log_alpha in LOG_ALPHAS]).T
    found = (drawn == 0).float().mean(0), (drawn == 1).float().mean(0), drawn.mean(0)
    for name, ours, theirs in zip(("P(0)", "P(1)", "mean"), found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=SAMPLING_NOISE, msg=name)
    torch.testing.assert_close(made.open_probability(), 1 - expected[0])


@pytest.mark.parametrize(
    "state", (*STATES, GateState("learned", 0.5, (-0.05, 1.5)), GateState("learned", 0.2, (-0.3, 1.01))), ids=str
)
def test_threshold_is_where_0_and_1_are_as_likely(state):
    zero, one, _ = closed_forms(threshold(state), state)
    assert zero == pytest.approx(one, abs=1e-12)
    nearly_closed, nearly_open = threshold(state) - 1e-3, threshold(state) + 1e-3
    zero, one, _ = closed_forms(nearly_closed, state)
    assert zero > one
    made = learned(nearly_closed, threshold(state) - 1e-6, nearly_open, state=state)
    assert made.is_open().tolist() == [False, False, True]


def test_threshold_of_symmetric_stretches_is_exactly_0():
    for low in (-0.1, -0.2, -0.3, -1 / 3):
        for temperature in (0.33, 2 / 3, 5.0):
            assert threshold(GateState("learned", temperature, (low, 1 - low))) == 0.0
    assert learned(0.0, 1e-30, -1e-30).is_open().tolist() == [False, True, False]


def test_values_of_evaluation():
    log_alpha = (-9.0, -1.0, 0.0, 0.5, 1.0, math.log(11) - 1e-3, math.log(11) + 1e-6, 2.5, 9.0)
    values = learned(*log_alpha)()
    assert values[:3].tolist() == [0.0, 0.0, 0.0]
    expected = [1.2 / (1 + math.exp(-a)) - 0.1 for a in log_alpha[3:6]]
    assert values[3:6].tolist() == pytest.approx(expected, abs=1e-6)  # float32
    assert (values[3:6] < 1).all()
    assert values[6:].tolist() == [1.0, 1.0, 1.0]
    assert INIT_LOG_ALPHA > math.log(11)


@pytest.mark.parametrize("kind", ("learned", "subset"))
@pytest.mark.parametrize(
    "temperature, stretch", ((0.33, (-0.1, 1.1)), (1.0, (-0.1, 1.001)), (4.0, (-1.0, 1.1)), (0.5, (-0.001, 1.9)))
)
def test_gates_start_open(temperature, stretch, kind):
    """And exactly 1, whatever the stretch and the temperature; also those that a checkpoint lacks."""
    made = HeadGates(GateState(kind, temperature, stretch), 3).eval()
    assert made().tolist() == [1.0] * 3 and made.is_open().all()
    made.log_alpha.data.fill_(-9.0)
    made.reset()
    assert made().tolist() == [1.0] * 3 and made.is_open().all()


def test_evaluation_has_no_noise_and_training_has():
    made = learned(0.3, 0.5)
    assert torch.equal(made(), made())
    made.train()
    torch.manual_seed(0)  # two draws may be clipped to the same 0 and 1, ten are not
    assert len({tuple(made().tolist()) for _ in range(10)}) > 1
    assert made.values().tolist() == learned(0.3, 0.5)().tolist()  # reports in training do not sample


def test_fixed_gates():
    made = fixed(1, 0, 1)
    for mode in (True, False):
        assert made.train(mode)().tolist() == [1.0, 0.0, 1.0]
    assert made.is_open().tolist() == [True, False, True]
    assert made.open_probability().tolist() == [1.0, 0.0, 1.0]
    assert list(made.parameters()) == []
    assert made.num_heads == 3


def test_bfloat16_gates_are_sampled_in_float32(monkeypatch):
    """The largest u below 1 is 1 in bfloat16, whose logarithm is infinite; and steps near 1 are far too coarse."""
    made = learned(0.5, 0.5).to(torch.bfloat16).train()
    for u in (0.0, 1.0, 1 - 1e-7):
        monkeypatch.setattr(torch, "rand_like", lambda tensor, u=u: torch.full_like(tensor, u))
        made.log_alpha.grad = None
        gate = made()
        gate.sum().backward()
        assert gate.dtype == torch.float32
        assert gate.tolist() == [float(u > 0)] * 2
        assert torch.isfinite(made.log_alpha.grad).all()
    monkeypatch.setattr(torch, "rand_like", lambda tensor: torch.full_like(tensor, 0.501))
    exact = 1 / (1 + math.exp(-(logit(0.501) + 0.5) / 0.33)) * 1.2 - 0.1
    assert made()[0].item() == pytest.approx(exact, abs=1e-5)  # bfloat16 is off by 2e-3
    assert made.eval()().dtype == torch.float32


def test_sure_gates_stay_sure_whatever_is_drawn(monkeypatch):
    made = learned(-20.0, 20.0).train()
    for u in (0.0, 1.0):
        monkeypatch.setattr(torch, "rand_like", lambda tensor, u=u: torch.full_like(tensor, u))
        assert made().tolist() == [0.0, 1.0]


def test_samples_are_differentiable_where_they_are_not_clipped(monkeypatch):
    made = learned(0.2).train()
    monkeypatch.setattr(torch, "rand_like", lambda tensor: torch.full_like(tensor, 0.4))
    made().sum().backward()
    s = 1 / (1 + math.exp(-(logit(0.4) + 0.2) / 0.33))
    assert made.log_alpha.grad.item() == pytest.approx(1.2 * s * (1 - s) / 0.33, rel=1e-5)
    made.log_alpha.grad = None
    monkeypatch.setattr(torch, "rand_like", lambda tensor: torch.full_like(tensor, 0.999))
    made().sum().backward()
    assert made.log_alpha.grad.item() == 0


def test_open_probability_is_differentiable():
    made = learned(0.2)
    made.open_probability().sum().backward()
    p = 1 - closed_forms(0.2, STATES[0])[0]
    assert made.log_alpha.grad.item() == pytest.approx(p * (1 - p), rel=1e-5)


@pytest.mark.parametrize("trained", (True, False))
def test_keeping_heads(trained):
    made = learned(0.1, 0.2, 0.3, 0.4).requires_grad_(trained)
    made.keep_heads([0, 3])
    assert made.log_alpha.tolist() == pytest.approx([0.1, 0.4])
    assert made.log_alpha.requires_grad == trained
    assert made.num_heads == 2
    held = fixed(1, 0, 0, 1)
    held.keep_heads([1, 3])
    assert held.alive.tolist() == [0.0, 1.0]
    assert "alive" in dict(held.named_buffers())


def test_reset_opens():
    for made in (learned(-1.0, 0.2), fixed(0, 1)):
        made.reset()
        assert made().tolist() == [1.0, 1.0]


def test_margin_keeps_logits_finite():
    assert 0 < gates.MARGIN < 1e-5
    assert torch.tensor(1 - gates.MARGIN) < 1  # in float32
