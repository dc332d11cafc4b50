"""What a signature says of an argument is what is accepted, and said of what is not."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from collab_heads import AttentionAdapter, compress, register, swap_to_gated
from collab_heads.base.arguments import checking_arguments
from collab_heads.errors import LONGEST, ArgumentError, UnsupportedModelError
from collab_heads.heads.criteria import Random
from collab_heads.training import HeadRotation, HeadTraining
from families import FAMILIES

if TYPE_CHECKING:
    from decimal import Decimal


@checking_arguments
def public(
    folder: str | Path = "x",
    names: str | Iterable[str] | None = None,
    counts: Sequence[int] | None = None,
    metrics: Mapping[str, float] | None = None,
    kind: Literal["a", "b"] = "a",
    evaluate: Callable[[PreTrainedModel], float] = len,
    keep: bool = False,
    seed: int = 0,
    scores: Mapping[str, torch.Tensor] | None = None,
    batches: Iterable[Mapping] = (),
    unknown: "Decimal | None" = None,
    written: "int | Sequence[str]" = 0,
) -> str:
    """Do nothing."""
    return "done"


@pytest.mark.parametrize(
    "given",
    (
        {"folder": Path("x")},
        {"names": ["a"], "counts": range(3), "metrics": {"loss": np.float32(1)}},
        {"names": (each for each in [1, 2])},  # what can be read once is not read here
        {"kind": "c", "seed": "x", "scores": {"a": [1.0]}, "batches": 3},  # which are checked where more is known
        {"evaluate": str.upper, "keep": True, "unknown": object(), "written": [1]},
    ),
)
def test_what_is_accepted(given):
    assert public(**given) == "done"


@pytest.mark.parametrize(
    ("given", "said"),
    (
        ({"folder": None}, "folder must be a text or a path, not None"),
        ({"folder": b"x"}, "folder must be a text or a path, not b'x'"),
        ({"names": [1]}, r"names must be a text, a list \(a text\) or None, not \[1\]"),
        ({"counts": 3}, r"counts must be a list \(a whole number\) or None, not 3"),
        ({"counts": [{}]}, "counts must be"),
        ({"metrics": {"loss": None}}, r"metrics must be a dict \(a text -> a number\) or None, not {'loss': None}"),
        ({"kind": []}, r"kind must be one of a, b, not \[\]"),
        ({"evaluate": 1}, "evaluate must be a function, not 1"),
        ({"keep": 1}, "keep must be True or False, not 1"),
        ({"scores": 1}, "scores must be a dict"),
    ),
)
def test_what_is_refused(given, said):
    with pytest.raises(ArgumentError, match=said):
        public(**given)


def test_numbers_of_numpy_become_those_of_python():
    @checking_arguments
    def given(share: float, counts: Sequence[int], sizes: Mapping[str, int], seed: int = 0, *more: int) -> list:
        return [share, counts, sizes, seed, *more]

    # exact in half precision
    found = given(np.float16(0.5), (np.int64(8), 4), {"a": np.uint8(1), "b": 2}, np.int32(3), np.int64(9))
    assert repr(found) == "[0.5, (8, 4), {'a': 1, 'b': 2}, 3, 9]"
    counts = [1, 2]
    assert given(1, counts, {})[1] is counts


def test_so_do_those_that_classes_are_given():
    settings = HeadRotation(policy="random", count=np.int64(2), seed=np.int64(3)).settings()
    assert settings == HeadRotation(policy="random", count=2, seed=3).settings()
    assert type(Random(seed=np.uint8(3)).seed) is int
    with pytest.raises(ArgumentError, match="gate_lr must be a number, not tensor"):
        HeadTraining(gate_lr=torch.tensor(0.1))


def test_too_many_and_too_few_are_what_python_says():
    with pytest.raises(TypeError, match=r"public\(\) got an unexpected keyword argument 'other'"):
        public(other=1)
    with pytest.raises(TypeError, match=r"compress\(\) missing 2 required positional arguments: 'model' and 'batches'"):
        compress()


def test_signatures_stay():
    assert list(inspect.signature(swap_to_gated).parameters)[:2] == ["model", "adapter"]
    assert swap_to_gated.__name__ == "swap_to_gated" and "Put Hard Concrete gates" in swap_to_gated.__doc__
    assert swap_to_gated.__annotations__["return"].__name__ == "GateReport"


def test_no_model_is_said_as_ever():
    with pytest.raises(UnsupportedModelError, match="expected a transformers PreTrainedModel, got NoneType"):
        swap_to_gated(None)


class NeedsMore(AttentionAdapter):
    model_types = ("of-a-test",)

    def __init__(self, more: Any):
        self.more = more


@pytest.mark.parametrize(
    ("adapter", "said"),
    (
        (None, "must be a class of AttentionAdapter, not None"),
        (int, "must be a class of AttentionAdapter, not <class 'int'>"),
        (AttentionAdapter(), "must be a class of AttentionAdapter"),
        (AttentionAdapter, r"AttentionAdapter.model_types must be a tuple of model types, .*, not \(\)"),
        (type("Odd", (AttentionAdapter,), {"model_types": "bert"}), "Odd.model_types must be a tuple .* not 'bert'"),
        (type("Odd", (AttentionAdapter,), {"model_types": (5,)}), r"Odd.model_types .* not \(5,\)"),
        (NeedsMore, "NeedsMore cannot be made without arguments"),
    ),
)
def test_adapters_that_cannot_be_registered(adapter, said):
    with pytest.raises(ArgumentError, match=said):
        register(adapter)


def test_a_type_may_be_defined_after_the_function_that_names_it():
    @checking_arguments
    def act(count: "Sequence[int]") -> "DefinedLater": ...

    global DefinedLater
    DefinedLater = int
    with pytest.raises(ArgumentError, match="count must be a list"):
        act(3)


def test_a_tensor_without_dimensions_is_no_list():
    for scalar in (torch.tensor(3), np.array(3)):
        for call in (
            lambda value: swap_to_gated(FAMILIES["bert"].build(), sites=value),
            lambda value: HeadRotation(policy="random", roles=value),
        ):
            with pytest.raises(ArgumentError, match="3"):
                call(scalar)


def test_the_middle_of_a_long_message_is_left_out():
    said = str(ArgumentError(f"budget {list(range(5000))} must be a number"))
    assert len(said) <= LONGEST and said.startswith("budget [0, 1") and said.endswith("4999] must be a number")
