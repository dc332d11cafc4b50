import contextlib
import gc
import logging
import os
import subprocess
import sys

gc.disable()  # until the tests are collected: importing and collecting took half as long again
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported: no test waits for a network

import psutil
import pytest
import torch
import transformers
from model_sizes import KINDS
from unhooked import take_off_hooks

from collab_heads.contract.registry import all_adapters
from families import FAMILIES, cannot_share, each, is_left_to_slow

all_adapters()  # tests change the registry and put back what was there: it is full before the first one

pytest_plugins = ("slow_cases", "slow_share", "unaligned")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Not every family is asked for everything: by default, and where heads cannot share queries and keys, ever."""
    for item in items:
        if is_left_to_slow(parameters(item), core=item.get_closest_marker("core") is not None):
            item.add_marker(pytest.mark.slow)
    if gone := [item for item in items if cannot_share(parameters(item))]:
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if not cannot_share(parameters(item))]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    gc.freeze()  # what the imports made stays: Accelerate collects garbage after every training, 0.6 s with all of it
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Say how a process of tests died: a signal that ends it leaves no traceback."""
    if error:
        process = node.gateway._io.popen
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        code, free = process.returncode, psutil.virtual_memory().available >> 20
        print(f"\n{node.gateway.id} ended with exit code {code} (-9: signal 9), {free} MiB free", file=sys.stderr)


def parameters(item):
    """What a test is parametrised with."""
    return item.callspec.params.values() if hasattr(item, "callspec") else ()


@pytest.fixture(autouse=True, scope="session")
def quiet():
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def one_thread():
    """Leave torch one thread for the next test: more, which CTranslate2 sets, would make it, and its copies, wait."""
    yield
    torch.set_num_threads(1)


@pytest.fixture
def two_threads(monkeypatch):
    """As many as a user has who has set nothing."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def without_hooks(monkeypatch):
    """From here on transformers is as it was before the package was imported."""
    take_off_hooks(monkeypatch)


@pytest.fixture(params=each(FAMILIES))
def family(request):
    return FAMILIES[request.param]


@pytest.fixture(params=each(name for name, family in FAMILIES.items() if family.generates))
def generator_family(request):
    return FAMILIES[request.param]


@pytest.fixture(params=each(name for name, family in FAMILIES.items() if family.padded))
def padded_family(request):
    return FAMILIES[request.param]


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def warnings_logged(caplog):
    logger = logging.getLogger("transformers")
    type(logger).warning_once.cache_clear()  # what another test has heard is said again
    before, logger.propagate = logger.propagate, False  # else said twice where CI is set
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.propagate = before
