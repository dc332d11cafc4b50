"""Budgets that cannot be reached are refused before anything is measured."""

from dataclasses import replace

import pytest
from compressing import batches_of

from collab_heads import CompressionPlan, compress, plan
from collab_heads.base.option_values import MODEL_SHAPES
from collab_heads.compression import plan as planning
from collab_heads.compression.budgets import budgets_of
from collab_heads.compression.measures import COUNTED
from collab_heads.compression.plan import counted, plan_of
from collab_heads.errors import ArgumentError
from families import FAMILIES

BERT = FAMILIES["bert"]
TOO_SMALL = {  # options of `compress` -> what is said
    "share": ({"budget": 0.01, "parts": "values"}, r"budget 0.01 of parameters is below 0\.\d+, which .* give$"),
    "shape": ({"budget": 0.01, "shape": "uniform"}, r"is below .* in the shape 'uniform'$"),
    "operations": ({"budget": 0.01, "of": "operations", "parts": "values"}, r"of operations is below 0\."),
    "size": ({"budget": "1kB"}, r"and \S+ MB at the least; fewer with bits"),
    "size with bits": ({"budget": "1kB", "bits": 8}, r"and \S+ MB at the least$"),
    "nothing of it": ({"budget": 0.5, "of": "cache", "parts": "neurons"}, "have none of it"),
}


@pytest.fixture(scope="module")
def measured():
    return plan(BERT.build(), batches_of(BERT), refine_steps=0).measured


@pytest.mark.parametrize("shape", [None, *MODEL_SHAPES])
@pytest.mark.parametrize("of", COUNTED)
def test_the_budgets_are_those_of_the_plan(measured, of, shape):
    choosing = replace(measured, options=replace(measured.options, of=of, shape=shape))
    made, found = plan_of(choosing, counted(of, shape)), budgets_of(choosing)
    assert found.least == pytest.approx(made.budgets.least, rel=1e-12, abs=1e-9)
    assert replace(found, least=0.0) == replace(made.budgets, least=0.0, shape=shape)


@pytest.mark.parametrize("options, said", TOO_SMALL.values(), ids=TOO_SMALL)
def test_compress_measures_nothing_for_a_budget_that_it_cannot_reach(options, said, monkeypatch):
    monkeypatch.setattr(planning, "measure_model", None)
    with pytest.raises(ArgumentError, match=said):
        compress(BERT.build(), batches_of(BERT), **options)


def test_nor_for_one_that_a_plan_that_was_loaded_cannot_reach(measured, tmp_path, monkeypatch):
    made = plan_of(replace(measured, options=replace(measured.options, shape="uniform")), COUNTED["parameters"])
    loaded = CompressionPlan.load(made.save(tmp_path / "plan.json"))
    monkeypatch.setattr(planning, "measure_model", None)
    with pytest.raises(ArgumentError, match="below"):
        compress(BERT.build(), batches_of(BERT), loaded.least / 2, plan=loaded)
    with pytest.raises(ArgumentError, match="another model"):
        compress(FAMILIES["distilbert"].build(), batches_of(FAMILIES["distilbert"]), 0.9, plan=loaded)
