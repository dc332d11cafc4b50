"""Public names say what they do and show it: docstrings, examples, and the types that they return."""

import doctest
import inspect

import pytest
import torch

import collab_heads

PUBLIC = [name for name in collab_heads.__all__ if name != "adapters"]
FUNCTIONS = [name for name in PUBLIC if inspect.isfunction(getattr(collab_heads, name))]
# every function that people begin with shows a call, with the shapes of what tensors it takes and makes
SHOWN = [
    "analyze_heads",
    "collaborative_config",
    "compress",
    "distill",
    "fold_heads",
    "head_importance",
    "head_relevance",
    "head_roles",
    "head_statistics",
    "leave_one_out",
    "most_important",
    "plan",
    "prune_heads",
    "swap_heads",
    "swap_to_alpha",
    "swap_to_collaborative",
    "swap_to_gated",
    "token_contributions",
]


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


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_a_public_function_returns_is_public(name):
    returned = inspect.signature(getattr(collab_heads, name)).return_annotation
    if inspect.isclass(returned) and returned.__module__.startswith("collab_heads"):
        assert returned.__name__ in collab_heads.__all__


@pytest.mark.parametrize("name", SHOWN)
def test_examples_in_docstrings_run(name):
    torch.manual_seed(0)
    function = getattr(collab_heads, name)
    (found,) = doctest.DocTestFinder(recurse=False).find(
        inspect.unwrap(function), name, globs={each: getattr(collab_heads, each) for each in PUBLIC}
    )
    assert found.examples, f"{name} shows no example"
    said: list[str] = []
    assert doctest.DocTestRunner().run(found, out=said.append).failed == 0, "".join(said)
