import pytest
from training_fixtures import bert, bilingual, files, fresh_accelerate, marian, parse  # noqa: F401
from transformers.utils import logging


@pytest.fixture(autouse=True)
def verbosity():
    """A demo silences transformers for its process."""
    before = logging.get_verbosity()
    yield
    logging.set_verbosity(before)
