"""Head statistics on disk, and what they say of a head."""

import json
import os

import pytest
import torch
from heads_by_hand import EOS, ended, model_in
from model_inputs import cast
from model_sizes import HEADS, LAYERS
from safetensors.torch import load_file, save_file

from collab_heads import AttentionSite
from collab_heads.analysis import HeadStatistics, head_statistics
from collab_heads.analysis.measures import results
from collab_heads.analysis.measures.results import MEASURES
from collab_heads.errors import ArgumentError, DataError

JSON, TENSORS = "head_statistics.json", "head_statistics.safetensors"


def measured(name, change="stock", **options):
    inputs, _ = ended(name)
    return head_statistics(model_in(name, change), [cast(inputs, torch.float64)], exclude=[EOS], **options)


@pytest.fixture(scope="module")
def marian():
    return measured("marian", "mixed")


@pytest.mark.parametrize(
    "name, change",
    (
        ("marian", "mixed"),
        ("marian", "pruned"),
        ("bert", "gated"),
        ("bert-decoder", "stock"),
        ("albert-groups", "stock"),
        ("siglip", "stock"),
        ("qwen3", "pruned"),
    ),
)
def test_saved_and_loaded_is_equal(name, change, tmp_path):
    found = measured(name, change)
    found.save(tmp_path / "new" / "folder")
    again = HeadStatistics.load(tmp_path / "new" / "folder")
    assert again == found and again.sites == found.sites and again.tokens == found.tokens
    for each in (*MEASURES, "alphas"):
        ours, theirs = getattr(again, each), getattr(found, each)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[path], theirs[path]) for path in theirs)
        assert all(tensor.dtype == torch.float64 for tensor in ours.values())
    assert bool(again.alphas) == (change == "mixed")


def test_a_pipe_in_place_of_the_tensors_is_not_waited_for(marian, tmp_path):
    marian.save(tmp_path)
    (tmp_path / TENSORS).unlink()
    os.mkfifo(tmp_path / TENSORS)
    with pytest.raises(DataError, match=f"{TENSORS} is a named pipe, no file"):
        HeadStatistics.load(tmp_path)


def test_what_differs_is_not_equal(marian):
    path = marian.sites[0].path
    other = HeadStatistics(**{**vars(marian), "l2": marian.l2 | {path: marian.l2[path] + 1e-12}})
    assert other != marian and marian != 3


def test_only_what_was_measured_is_saved(tmp_path):
    found = measured("bert", measures="l2")
    found.save(tmp_path)
    assert set(load_file(tmp_path / TENSORS)) == {f"encoder.{layer}.self_attn.l2" for layer in range(LAYERS)}
    assert HeadStatistics.load(tmp_path) == found and found.measures == ("l2",)


def test_names_and_nesting(marian, tmp_path):
    marian.save(tmp_path)
    tensors, described = load_file(tmp_path / TENSORS), json.loads((tmp_path / JSON).read_text())
    places = {
        "enc-self": ("encoder", "self_attn"),
        "dec-self": ("decoder", "self_attn"),
        "dec-enc": ("decoder", "enc_attn"),
    }
    expected = {}
    for site in marian.sites:
        stack, attention = places[site.role]
        for name in (*MEASURES, "alphas"):
            if name == "first_token" and site.role == "dec-enc":
                continue
            tensor = getattr(marian, name)[site.path]
            expected[f"{stack}.{site.layer}.{attention}.{name}"] = tensor
            assert described[stack][site.layer][attention][name] == tensor.tolist()
    assert tensors.keys() == expected.keys() and len(expected) == 6 * 7 - 2
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert [set(layer) for layer in described["encoder"]] == [{"self_attn"}] * LAYERS
    assert [set(layer) for layer in described["decoder"]] == [{"self_attn", "enc_attn"}] * LAYERS
    assert described["measures"] == list(MEASURES) and described["excluded"] == [EOS]
    assert described["sites"][-1] == {
        "path": "decoder.layers.1.encoder_attn",
        "role": "dec-enc",
        "layer": 1,
        "num_heads": HEADS,
        "tokens": marian.tokens["decoder.layers.1.encoder_attn"],
        "alphas": True,
        "first_token": False,
    }


@pytest.mark.parametrize(
    "name, change, encoder, decoder",
    (
        ("bert-decoder", "stock", [], [{"self_attn", "enc_attn"}] * 2),
        ("albert", "stock", [{"self_attn"}], []),
        ("albert-groups", "stock", None, []),
        ("bert", "pruned", [set(), {"self_attn"}], []),
        ("marian", "pruned", [set(), {"self_attn"}], [set(), {"self_attn", "enc_attn"}]),
    ),
)
def test_layers_of_every_shape(name, change, encoder, decoder):
    found = measured(name, change, measures=("confidence",))
    nested = found.nested()
    assert [set(layer) for layer in nested["decoder"]] == decoder
    if encoder is None:
        layers = {site.layer for site in found.sites}  # the first that each module serves
        encoder = [{"self_attn"} if layer in layers else set() for layer in range(max(layers) + 1)]
        assert sum(map(len, encoder)) == len(found.sites) > 1
    assert [set(layer) for layer in nested["encoder"]] == encoder


def test_other_files_stay_and_old_statistics_go(marian, tmp_path):
    (tmp_path / "model.safetensors").write_text("mine")
    measured("bert").save(tmp_path)
    marian.save(tmp_path)
    assert HeadStatistics.load(tmp_path) == marian
    assert sorted(file.name for file in tmp_path.iterdir()) == [JSON, TENSORS, "model.safetensors"]


def test_a_write_that_fails_leaves_the_old_ones(marian, tmp_path, monkeypatch):
    marian.save(tmp_path)

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(results.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        measured("bert").save(tmp_path)
    assert HeadStatistics.load(tmp_path) == marian


def test_a_write_that_stops_between_the_files_shows(marian, tmp_path, monkeypatch):
    measured("bert").save(tmp_path)
    replace = results.os.replace

    def stop(old, new):
        if str(new).endswith(".json"):
            raise KeyboardInterrupt
        replace(old, new)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(results.os, "replace", stop)
        marian.save(tmp_path)
    with pytest.raises(DataError, match=JSON):
        HeadStatistics.load(tmp_path)


def damaged(folder, change):
    """One thing wrong with saved statistics."""
    described, tensors = json.loads((folder / JSON).read_text()), load_file(folder / TENSORS)
    name = next(name for name in tensors if name.endswith("confidence"))
    if change == "no description":
        (folder / JSON).unlink()
    elif change == "no tensors":
        (folder / TENSORS).unlink()
    elif change == "no JSON":
        (folder / JSON).write_text("{")
    elif change == "half a file":
        (folder / TENSORS).write_bytes((folder / TENSORS).read_bytes()[:-9])
    elif change == "newer":
        (folder / JSON).write_text(json.dumps(described | {"version": 2}))
    elif change == "no version":
        (folder / JSON).write_text(json.dumps({k: v for k, v in described.items() if k != "version"}))
    elif change == "a list":
        (folder / JSON).write_text("[]")
    elif change == "a site without layer":
        del described["sites"][0]["layer"]
        (folder / JSON).write_text(json.dumps(described))
    elif change == "a tensor missing":
        save_file({k: v for k, v in tensors.items() if k != name}, folder / TENSORS)
    elif change == "alphas missing":
        save_file({k: v for k, v in tensors.items() if not k.endswith("alphas")}, folder / TENSORS)
    elif change == "another shape":
        save_file(tensors | {name: tensors[name][:-1].clone()}, folder / TENSORS)


@pytest.mark.parametrize(
    "change, fragment",
    (
        ("no description", JSON),
        ("no tensors", TENSORS),
        ("no JSON", JSON),
        ("half a file", TENSORS),
        ("newer", "version 2"),
        ("no version", "version"),
        ("a list", JSON),
        ("a site without layer", "layer"),
        ("a tensor missing", "incomplete"),
        ("alphas missing", "incomplete"),
        ("another shape", "of 4 heads"),
    ),
)
def test_damaged_statistics_are_refused(change, fragment, marian, tmp_path):
    marian.save(tmp_path)
    damaged(tmp_path, change)
    with pytest.raises(DataError, match=fragment):
        HeadStatistics.load(tmp_path)


def test_distances():
    sites = tuple(AttentionSite(f"layers.{i}", "enc-self", i, heads) for i, heads in enumerate((3, 1)))
    l2 = {"layers.0": torch.tensor([[0.0, 1, 5], [1, 0, 2], [5, 2, 0]]), "layers.1": torch.zeros(1, 1)}
    found = HeadStatistics(sites, ("l2",), (), {site.path: 1 for site in sites}, l2=l2)
    assert found.distance("layers.0").tolist() == [3.0, 1.5, 3.5]
    assert found.distance("layers.1").tolist() == [0.0]
    assert "of any kind" in str(found)
    assert [line.split()[-1] for line in str(found).split("\n")[2:4]] == ["2.667", "-"]
    with pytest.raises(ArgumentError, match=r"did you mean 'layers\.1'"):
        found.distance("layer.1")
    with pytest.raises(ArgumentError, match="cosine"):
        HeadStatistics(sites, ("cosine",), (), {}).distance("layers.0")
