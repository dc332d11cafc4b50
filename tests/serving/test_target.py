"""An export leaves the process as it was: threads, streams, logging, warnings, random numbers."""

import logging
import os
import random
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.utils import logging as transformers_logging

from collab_heads import compress, export, load_exported, prune_heads
from collab_heads.errors import UnsupportedModelError
from collab_heads.serving.export import TARGETS
from collab_heads.serving.part_in_engine import in_engine
from collab_heads.serving.target import quiet
from families import FAMILIES


def state():
    """Return the state of the process, by name."""
    return {
        "threads of torch": torch.get_num_threads(),
        "default dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "torch's random numbers": torch.get_rng_state().numpy().tobytes(),
        "numpy's": str(np.random.get_state()),
        "python's": random.getstate(),
        "streams": (sys.stdout, sys.stderr),
        "warnings": list(warnings.filters),
        "logging": (logging.root.manager.disable, logging.root.level),
        "logging's handlers": [*logging.root.handlers, *logging.root.filters],
        "transformers' logging": (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()),
        "environment": dict(os.environ),
        "folder": Path.cwd(),
        "signals": signal.getsignal(signal.SIGINT),
    }


def assert_unchanged(before):
    after = state()
    assert not [name for name in before if after[name] != before[name]]


@pytest.mark.parametrize(
    "to", [pytest.param(to, marks=() if to == "transformers" else pytest.mark.slow) for to in TARGETS if to != "gguf"]
)
def test_the_process_is_left_as_it_was(to, tmp_path):
    """CTranslate2 leaves one thread to PyTorch. What is imported the first time may register itself."""
    if to == "executorch":
        pytest.importorskip("executorch", reason="ExecuTorch is not installed")
    model = FAMILIES["distilbert"].build().base_model.eval()
    export(model, tmp_path / "first", to)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        before = state()
        export(model, tmp_path / "second", to)
        if to in ("onnx", "openvino"):
            load_exported(tmp_path / "second")
        assert_unchanged(before)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
def test_changes_of_a_model_leave_the_process_as_it_was():
    family = FAMILIES["bert"]
    model = family.build()
    batches = [family.inputs() for _ in range(2)]
    before = state()
    compress(model, batches, 0.6, refine_steps=1)
    prune_heads(model, keep=2, batches=batches)
    assert_unchanged(before)


def test_an_engine_that_refuses_a_part_leaves_the_process_as_it_was():
    """OpenVINO sets the level of the root logger to errors, and restores it after a conversion that succeeds alone."""
    pytest.importorskip("openvino")
    part = torch.nn.Linear(3, 3)
    before = state()
    with pytest.raises(UnsupportedModelError, match="openvino cannot run Linear"):
        in_engine("openvino", torch.linalg.eigvalsh, [part], [torch.eye(3)], [None])
    assert_unchanged(before)


def test_two_threads_are_quiet_one_after_the_other():
    """Else the first that ends restores what the second has set, and the second what the first had."""
    before, inside, overlapped = state(), [], []

    def work():
        with quiet():
            overlapped.append(bool(inside))
            inside.append(1)
            time.sleep(0.02)
            inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlapped == [False] * 4
    assert_unchanged(before)
