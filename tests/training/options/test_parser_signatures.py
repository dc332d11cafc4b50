"""Flags have the types and defaults of the options that they set; an option has one default, wherever it is taken."""

import inspect
from collections import defaultdict

import pytest
from public_names import functions

import collab_heads
from collab_heads.command.main import parser
from collab_heads.training.options.parser import options_of
from collab_heads.training.options.value_types import count, positive, seed

OPTIONS = (
    ("compress", "compression.compress", collab_heads.compress, {}),
    ("swap", "collaborative.swap", collab_heads.swap_to_collaborative, {"tol": "decomposition_tol"}),
    ("prune", "heads.prune", collab_heads.prune_heads, {"criterion": "head_selection"}),
    ("analyze", "analysis.analyze", collab_heads.analyze_heads, {"num_examples": "examples"}),
)
OTHERWISE = {
    "parts",
    "prefixes",
    "compare_with",
    "data",
    "plan",
    "sentences",
}  # a flag that is not given is None; another thing


@pytest.mark.parametrize(("command", "module", "function", "flags"), OPTIONS, ids=[each[0] for each in OPTIONS])
def test_flags_have_the_defaults_of_the_signature(command, module, function, flags):
    parameters = inspect.signature(function).parameters
    declared = {name: each.default for name, each in parameters.items() if each.default is not inspect.Parameter.empty}
    assert {name: each.default for name, each in options_of(module, function.__name__).items()} == declared
    known = {action.dest: action.default for action in parser(command)._actions}
    shared = {name: flags.get(name, name) for name in declared if flags.get(name, name) in known}
    assert len(shared) >= (1 if command == "prune" else 2)
    assert {name: known[flag] for name, flag in shared.items() if name not in OTHERWISE} == {
        name: declared[name] for name in shared if name not in OTHERWISE
    }


def test_texts_are_parsed_as_the_annotations_say():
    options = options_of("compression.compress", "compress")
    assert (options["refine_steps"].parse, options["max_error"].parse, options["seed"].parse) == (count, positive, seed)
    assert options["sites"].several and not options["of"].several
    assert options_of("trainer.head_training", "HeadTraining")["gate_lr"].default == 0.1


# One word, several defaults, each for a reason.
SEVERAL_DEFAULTS = {
    "kind": "a swap gives the paper's layer; what compress gives is to be fast",
    "criterion": "head_importance is the paper's measure; prune_heads is to work without labels",
    "data": "the name of what was analyzed; the examples of evaluate, which a function does without",
    "measures": "of head_statistics and of head_worth, which has others, one of them on request only",
    "parts": "of a report, of a site that is compressed, of heads that change places",
}


def test_an_option_has_one_default():
    defaults = defaultdict(set)
    for function in functions().values():
        for parameter in inspect.signature(function).parameters.values():
            if parameter.default is not inspect.Parameter.empty:
                defaults[parameter.name].add(repr(parameter.default))
    assert {name for name, found in defaults.items() if len(found) > 1} == set(SEVERAL_DEFAULTS)
