"""What users see says what it does: every public name, and the public methods that are ours."""

import inspect

import pytest

import collab_heads

PUBLIC = [name for name in collab_heads.__all__ if name != "adapters"]


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_a_docstring(name):
    named = getattr(collab_heads, name)
    assert inspect.getdoc(named), name
    members = vars(named) if inspect.isclass(named) else {}
    without = [
        member
        for member, value in members.items()
        if not member.startswith("_") and inspect.isfunction(value) and not inspect.getdoc(getattr(named, member))
    ]
    assert without == []
