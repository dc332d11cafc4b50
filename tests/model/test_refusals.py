"""A Linear, or a weight, that serves two places would change at both: refused by name, before anything changes."""

import pytest
from changed_heads import gate, output_projections
from model_inputs import batch
from model_runs import sites, swap
from unchanged import refused

from collab_heads import fold_heads, prune_heads, rotate_heads, swap_to_alpha, swap_to_collaborative, swap_to_gated
from collab_heads.errors import ModelStateError
from families import FAMILIES

FIRST, SECOND = "encoder.layer.0.attention.self", "encoder.layer.1.attention.self"


def share(name):
    def spoil(model):
        first, second = sites(model).values()
        setattr(second, name, getattr(first, name))

    spoil.__name__ = f"one {name}"
    return spoil


def tie(name):
    """Two modules, one parameter."""

    def spoil(model):
        first, second = sites(model).values()
        getattr(second, name).weight = getattr(first, name).weight

    spoil.__name__ = f"one weight of {name}"
    return spoil


def share_output(model):
    model.bert.encoder.layer[1].attention.output.dense = output_projections(model)[FIRST]


def query_is_key(model):
    module = sites(model)[SECOND]
    module.key = module.query


def remove(model):
    prune_heads(model, heads={SECOND: [0]})


def exchange(model):
    rotate_heads(model, [((SECOND, 0), (SECOND, 1))])


def narrow(model):
    swap_to_collaborative(model, dim_shared_query_key=16, sites=SECOND)


def calibrated(model):
    swap_to_collaborative(model, dim_shared_query_key=16, batches=[batch()], refine_steps=1)


BOTH, ALONE = (FIRST, SECOND), (SECOND, "query", "key")
CASES = [
    *((remove, spoil, BOTH) for spoil in (*map(share, ("query", "key", "value")), tie("value"), share_output)),
    *((exchange, spoil, BOTH) for spoil in (*map(share, ("query", "key", "value")), tie("query"))),
    *((narrow, spoil, BOTH) for spoil in (share("query"), share("key"), tie("key"))),
    (calibrated, share("query"), BOTH),
    *((call, share_output, BOTH) for call in (swap_to_gated, swap_to_alpha)),
    *((call, query_is_key, ALONE) for call in (remove, exchange)),
]


@pytest.mark.parametrize("call, spoil, places", CASES, ids=[f"{c.__name__}-{s.__name__}" for c, s, _ in CASES])
def test_shared_projections(call, spoil, places):
    model = FAMILIES["bert"].build()
    spoil(model)
    with refused(model, ModelStateError, *places, "would change both", "copy.deepcopy"):
        call(model)


@pytest.mark.parametrize("call", (prune_heads, fold_heads))
def test_outputs_that_are_shared_after_gating(call):
    model = FAMILIES["bert"].build()
    gate(model, empty=False)
    share_output(model)
    with refused(model, ModelStateError, *BOTH, "output projection"):
        call(model)


def test_what_does_not_change_may_be_shared():
    """Values beside a swap of queries and keys; one projection for queries and keys of a site, which the swap reads."""
    model = FAMILIES["bert"].build()
    share("value")(model)
    query_is_key(model)
    swap(model, "shared")
    swap_to_gated(model)
