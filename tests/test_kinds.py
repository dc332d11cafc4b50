"""A kind of query/key projection is named in its tables, and nowhere else does anybody ask which kind it is."""

import ast
from typing import get_args

import pytest
from model_runs import swap

from collab_heads import get_adapter
from collab_heads.base import option_values
from collab_heads.collaborative import score_terms
from collab_heads.contract import adapter
from collab_heads.fitting import solvers
from collab_heads.fitting.kinds import FITS
from collab_heads.layers.query_key_kinds import QUERY_KEY_KINDS
from collab_heads.sites import site, state
from collab_heads.sites.state import DIVIDED, KINDS
from families import FAMILIES
from test_imports import MODULES

TABLES = {"state", "layers.query_key_kinds", "fitting.kinds"}


def is_kind(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value in KINDS


def questions(source: str) -> list[str]:
    """Where a source compares with a kind's name, or has a table by kinds."""
    asked = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            if any(is_kind(inner) for side in (node.left, *node.comparators) for inner in ast.walk(side)):
                asked.append(ast.unparse(node))
        elif isinstance(node, ast.MatchValue) and is_kind(node.value):
            asked.append(ast.unparse(node))
        elif isinstance(node, ast.Dict) and node.keys and all(is_kind(key) for key in node.keys):
            asked.append(ast.unparse(node))
    return asked


def test_only_the_tables_know_the_names_of_the_kinds():
    asked = {name: questions(file.read_text()) for name, file in MODULES.items() if name not in TABLES}
    assert {name: where for name, where in asked.items() if where} == {}


@pytest.mark.parametrize(
    "source",
    (
        "if state.kind == 'shared': pass",
        "if 'per_head' != mixing: pass",
        "wide = mixing in ('shared', 'other')",
        "match kind:\n    case 'per_head': pass",
        "WIDTHS = {'shared': 8, 'per_head': 4}",
    ),
)
def test_a_question_is_seen(source):
    assert len(questions(source)) == 1


def test_a_default_is_no_question():
    assert questions("def swap(model, kind='shared', **options): options['kind'] = 'shared'") == []


def test_every_table_has_every_kind():
    assert tuple(QUERY_KEY_KINDS) == tuple(FITS) == KINDS
    assert DIVIDED < set(KINDS)


@pytest.mark.parametrize(
    "literal, values",
    (
        (state.QueryKeyKind, QUERY_KEY_KINDS),
        (state.QueryKeyKind, FITS),
        (state.MixingInit, state.MIXING_INITS),
        (state.GateKind, state.GATE_KINDS),
        (site.Role, site.ROLES),
        (solvers.Method, solvers.METHODS),
        (option_values.Allocation, option_values.ALLOCATIONS),
        (score_terms.Term, score_terms.TERMS),
        (adapter.Capability, adapter.CAPABILITIES),
    ),
    ids=lambda part: str(part) if get_args(part) else "table",  # no addresses: processes must agree on names
)
def test_types_say_what_is_checked(literal, values):
    """What a type checker accepts is what the checks at run time accept."""
    assert get_args(literal) == tuple(values)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if FITS[kind].is_offered])
def test_a_projection_has_the_widths_that_its_kind_promises(kind):
    """From the width that is asked for to what is stored and cached."""
    model = FAMILIES["bert"].build()
    adapter = get_adapter(model)
    site = adapter.sites(model)[0]
    weights = adapter.read(model.base_model.get_submodule(site.path))
    fit = FITS[kind]
    for asked in (1, 5, weights.dim_query_key):
        dim = fit.possible_width(asked, weights)
        assert asked <= dim <= weights.dim_query_key
        assert fit.possible_width(dim, weights) == dim
        assert kind not in DIVIDED or dim % weights.num_heads == 0
    before = sum(parameter.numel() for parameter in model.parameters())
    report = swap(model, kind, 16)
    assert {each.dim for each in report.sites} == {fit.possible_width(16, weights)}
    query_key = model.base_model.get_submodule(site.path).query_key
    assert isinstance(query_key, QUERY_KEY_KINDS[kind])
    assert query_key.state.dim * fit.parameters_per_width(weights) + (query_key.content_parameter.numel()) == sum(
        parameter.numel() for parameter in query_key.parameters()
    )
    assert sum(parameter.numel() for parameter in model.parameters()) < before
