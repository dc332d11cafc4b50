"""The kind that docs/add-a-kind.md makes, by following it, goes through what a kind must go through."""

import pytest
import torch
from model_inputs import cast
from model_runs import aligned, output, swap
from pages import PAGES, run, tables_restored

from collab_heads import prune_heads
from families import FAMILIES

KIND = "orthonormal"
SOME = pytest.mark.parametrize("name", ("bert", "marian", "t5"))


@pytest.fixture
def followed(monkeypatch, tmp_path):
    """The examples of the page have run."""
    monkeypatch.chdir(tmp_path)
    with tables_restored():
        assert run(PAGES["docs/add-a-kind.md"], network=False) == []
        yield


def built(name):
    family = FAMILIES[name]
    return family.build().double().eval(), cast(family.inputs(), torch.float64)


@SOME
@pytest.mark.usefixtures("followed")
def test_it_is_exact_at_full_width_and_loads_again(name, tmp_path):
    model, inputs = built(name)
    before = output(model, inputs)
    swap(model, KIND, None)
    torch.testing.assert_close(output(model, inputs), before, rtol=0, atol=1e-9)
    model.save_pretrained(tmp_path / "saved")
    loaded = type(model).from_pretrained(tmp_path / "saved", dtype=torch.float64).eval()
    assert torch.equal(output(aligned(loaded), inputs), output(aligned(model), inputs))


@SOME
@pytest.mark.usefixtures("followed")
def test_narrow_and_with_fewer_heads_it_computes_what_per_head_does(name):
    outputs = []
    for kind in (KIND, "per_head"):
        model, inputs = built(name)
        path = swap(model, kind, 16).sites[0].path
        prune_heads(model, heads={path: [0]})
        outputs.append(output(model, inputs))
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-9)


def test_without_the_page_there_is_no_such_kind():
    with pytest.raises(ValueError, match=f"unknown kind '{KIND}'"):
        swap(built("bert")[0], KIND, 16)
