import pytest
import translation_script
from training_fixtures import bert, bilingual, files, fresh_accelerate, marian, parse  # noqa: F401


@pytest.fixture
def pairs(tmp_path):
    """Two text files of seven pairs that the tiny Marian translates."""
    return translation_script.write_pairs(tmp_path, "dev", 7, 5)
