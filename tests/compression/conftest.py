import pytest

from families import FAMILIES, LAYOUTS

BY_DEFAULT = ("bert",)  # the others in make test-slow: planning takes a second each


@pytest.fixture(params=[pytest.param(name, marks=[] if name in BY_DEFAULT else [pytest.mark.slow]) for name in LAYOUTS])
def family(request):
    """Siblings differ in names alone, which the contract covers."""
    return FAMILIES[request.param]
