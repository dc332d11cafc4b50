"""The value that groups what a user asked for names what the public call takes."""

import inspect
from dataclasses import MISSING, fields

import pytest

from collab_heads import AttentionSite, analyze_heads
from collab_heads.analysis.options import PARTS, AnalysisOptions, check_parts
from collab_heads.errors import ArgumentError
from collab_heads.heads.history import HeadHistory, Moment
from collab_heads.heads.penalty.parts import PenaltyOptions
from collab_heads.training import HeadPenalty


def options(**given):
    """Options as `analyze_heads` makes them, with the defaults of its signature."""
    parameters = inspect.signature(analyze_heads).parameters
    return AnalysisOptions(**{each.name: parameters[each.name].default for each in fields(AnalysisOptions)} | given)


@pytest.mark.parametrize("call, of_call", ((analyze_heads, AnalysisOptions), (HeadPenalty, PenaltyOptions)))
def test_options_have_the_names_of_the_call_and_no_other_defaults(call, of_call):
    parameters = inspect.signature(call).parameters.values()
    asked = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
    found = {each.name: each.default for each in fields(of_call)}
    assert found.keys() == asked.keys()
    assert {name: asked[name] for name, value in found.items() if value is not MISSING} == {
        name: value for name, value in found.items() if value is not MISSING
    }


@pytest.mark.parametrize(
    "has_source, has_labels, evaluate, left_out, notes",
    (
        (True, True, len, set(), 0),
        (True, False, len, {"gradient"}, 1),
        (False, True, len, {"contributions"}, 0),
        (False, False, None, {"contributions", "gradient", "ablation"}, 2),
    ),
)
def test_parts_that_model_and_data_allow(has_source, has_labels, evaluate, left_out, notes):
    parts, said = options(evaluate=evaluate).choose(has_labels, has_source)
    assert parts == tuple(part for part in PARTS if part not in left_out)
    assert len(said) == notes
    if evaluate is None:  # without labels there is no loss that heads could be left out of
        assert said[-1].startswith(
            "heads were not left out: pass evaluate (on the command line --evaluate with --task)"
        )
        _, said = options(evaluate=None).choose(True, has_source)
        assert "or ask for the ablation" in said[-1]
        assert "or --parts ablation, in a training --analyze_ablation)" in said[-1]


def test_parts_that_are_asked_for():
    assert options(parts=("ablation",)).choose(True, False) == (("ablation",), [])
    assert options(parts=("ablation",), evaluate=len).choose(False, False) == (("ablation",), [])
    for part, said in (("gradient", "of the loss, and the batches have no labels"), ("ablation", "pass evaluate")):
        with pytest.raises(ArgumentError, match=f"part '{part}'.*{said}"):
            options(parts=("statistics", part)).choose(False, False)
    with pytest.raises(ArgumentError, match="only encoder-decoders"):
        options(parts=("contributions",)).choose(True, False)
    assert check_parts("roles") == ("roles",)
    assert check_parts(iter(["roles", "gradient"])) == ("roles", "gradient")
    assert check_parts(None) is None
    for wrong, message in (([], "parts is empty"), ("role", "did you mean 'roles'"), (["gradients"], "gradient")):
        with pytest.raises(ArgumentError, match=message):
            check_parts(wrong)


def test_a_history_without_gates_is_refused():
    history = HeadHistory((AttentionSite("one", "enc-self", 0, 2),), {"one": (0, 1)})
    with pytest.raises(ArgumentError, match="gate_history has no 'gates' at any step"):
        options(gate_history=history)
    gates = {"gates": {"one": [0.5, 1.0]}}
    assert options(gate_history=history.record(Moment(0, 0, "training"), gates)).gate_history.moments
