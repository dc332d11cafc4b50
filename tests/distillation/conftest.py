import pytest
from distilling import changed_pair, random_batches


@pytest.fixture
def batches():
    return random_batches(10)


@pytest.fixture
def pair():
    return changed_pair()
