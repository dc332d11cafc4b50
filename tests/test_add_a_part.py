"""The part that docs/add-a-part.md makes, by following it, is planned, fitted, timed, stored and reported."""

import json

import pytest
import torch
from compressing import batches_of
from model_runs import aligned, output
from pages import PAGES, run, tables_restored
from slow_cases import slow

from collab_heads import compress, plan
from families import FAMILIES

PART = "even_heads"
QUICK = {"refine_steps": 0, "parts": (PART, "values")}
SOME = pytest.mark.parametrize("name", ("bert", *slow("marian"), "qwen3"))


@pytest.fixture
def followed(monkeypatch, tmp_path):
    """The examples of the page have run."""
    monkeypatch.chdir(tmp_path)
    with tables_restored():
        assert run(PAGES["docs/add-a-part.md"], network=False) == []
        yield


@SOME
@pytest.mark.usefixtures("followed")
def test_its_budget_is_kept_and_the_result_loads_again(name, tmp_path):
    family = FAMILIES[name]
    model = family.build()
    report = compress(model, batches_of(family), 0.6, **QUICK)
    counts = [site.sizes[PART] for site in report.sites]
    assert all(after % 2 == 0 for _, after in counts) and any(after < before for before, after in counts)
    assert report.costs["parameters"].share <= 0.6
    assert "even heads" in str(report) and f"{PART}_after" in json.dumps(report.to_dict())
    model.save_pretrained(tmp_path / "saved")
    loaded = aligned(type(model).from_pretrained(tmp_path / "saved").eval())
    assert torch.equal(output(loaded, family.inputs()), output(model.eval(), family.inputs()))


@pytest.mark.slow
@pytest.mark.usefixtures("followed")
def test_it_is_planned_by_operations_and_by_time():
    for measure in ("operations", "time"):
        model = FAMILIES["bert"].build()  # on a busy machine smaller sites may be no faster, once
        made = [plan(model, batches_of(FAMILIES["bert"]), of=measure, **QUICK) for _ in range(3)]
        assert min(each.least for each in made) < 1 and "even heads" in str(made[0])


def test_without_the_page_there_is_no_such_part():
    with pytest.raises(ValueError, match=f"unknown part '{PART}'"):
        plan(FAMILIES["bert"].build(), batches_of(FAMILIES["bert"]), **QUICK)
