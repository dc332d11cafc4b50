"""Whatever is drawn meanwhile, all generators go on as if nobody had."""

import random

import numpy as np
import pytest
import torch
from later import Later

steps = Later("collab_heads.training.loop.steps")


def drawn() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


@pytest.mark.parametrize("fails", (False, True))
def test_nothing_is_used_up(fails):
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = drawn()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    try:
        with steps.random_states_kept():
            assert drawn() == expected
            drawn()
            torch.manual_seed(3)
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert drawn() == expected
