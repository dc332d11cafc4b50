import pytest

from families import FAMILIES, LAYOUTS


@pytest.fixture(params=[name for name in LAYOUTS if FAMILIES[name].padded])
def family(request):
    """Siblings differ in names alone, which the contract covers."""
    return FAMILIES[request.param]
