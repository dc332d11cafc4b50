import gc
import logging

import pytest
import torch
import transformers

from families import FAMILIES, KINDS, each


@pytest.fixture(autouse=True, scope="session")
def quiet():
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    gc.collect()
    gc.freeze()  # what the imports made stays: Accelerate collects garbage after every training, 0.6 s with all of it


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
