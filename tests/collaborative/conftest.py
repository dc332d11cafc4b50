import pytest

from families import FAMILIES, LAYOUTS


@pytest.fixture(params=LAYOUTS)
def family(request):
    """Siblings differ in names alone, which the contract covers."""
    return FAMILIES[request.param]
