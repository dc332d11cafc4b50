"""What runs by default: every forward of an attention has a family of its own, and siblings repeat one."""

import ast
import inspect
import textwrap

from model_runs import sites

from collab_heads import get_adapter
from families import FAMILIES, each

REPRESENTATIVES = [name for name, family in FAMILIES.items() if family.like is None and family.beside is None]
SIBLINGS = [name for name, family in FAMILIES.items() if family.like is not None]
NEAR = [name for name, family in FAMILIES.items() if family.beside is not None]


def forwards(name: str) -> dict[str, str]:
    """role -> code of the stock attention's forward, without comments."""
    model = FAMILIES[name].build()
    roles = {site.path: site.role for site in get_adapter(model).sites(model)}
    sources = {roles[path]: inspect.getsource(type(module).forward) for path, module in sites(model).items()}
    return {role: ast.dump(ast.parse(textwrap.dedent(source))) for role, source in sources.items()}


def test_siblings_share_a_forward():
    """Line by line, role by role, all that they have; and nobody is a sibling's sibling."""
    for name in SIBLINGS:
        assert FAMILIES[name].like in REPRESENTATIVES
        assert forwards(name).items() <= forwards(FAMILIES[name].like).items(), name


def test_no_forward_is_left_to_the_slow_tests():
    """Whatever a family can be asked for by default, one of its forward can."""
    for trait in ("padded", "generates", "biased"):
        for name in SIBLINGS:
            assert not getattr(FAMILIES[name], trait) or getattr(FAMILIES[FAMILIES[name].like], trait), name


def test_siblings_are_marked_slow():
    marks = {case.values: [mark.name for mark in case.marks] for case in each((name, 3) for name in FAMILIES)}
    assert {name for (name, _), names in marks.items() if not names} == set(REPRESENTATIVES)
    assert {name for (name, _), names in marks.items() if names == ["slow"]} == {*SIBLINGS, *NEAR}
    assert [case.values for case in each(["bert", "roberta"])] == [("bert",), ("roberta",)]
