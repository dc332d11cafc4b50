"""Checkpoints whose heads transformers 4 removed: `pruned_heads` in the config, and smaller projections."""

import json

import pytest
import torch
from model_runs import aligned, output
from safetensors.torch import load_file, save_file

import collab_heads
from collab_heads import prune_heads
from collab_heads.errors import ConfigError
from families import FAMILIES

PRUNED = ("bert", "distilbert", "albert-groups", "gpt2", "vit", "mpnet", "esm")  # among those that it could prune
REMOVED = [[0, 2], [], [1], []]


def of_transformers_4(model, folder, pruned):
    """Save a pruned model as transformers 4 did: without our record and ties, and with its entry in the config."""
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    save_file(load_file(path), path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    for name in ("collab_heads", "transformers_weights", "fusion_config", "auto_map"):
        del config[name]
    (folder / "config.json").write_text(json.dumps(config | {"pruned_heads": pruned}))


@pytest.mark.parametrize("name", [PRUNED[0], *(pytest.param(each, marks=pytest.mark.slow) for each in PRUNED[1:])])
def test_it_loads_as_prune_heads_makes_it(name, tmp_path):
    family = FAMILIES[name]
    model = family.build().eval()
    count = len(collab_heads.get_adapter(model).sites(model))
    role = next(iter(family.roles))
    prune_heads(model, heads={role: REMOVED[:count]})
    of_transformers_4(model, tmp_path, {str(i): heads for i, heads in enumerate(REMOVED[:count]) if heads})
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert loaded.config.collab_heads == model.config.collab_heads and not hasattr(loaded.config, "pruned_heads")
    assert torch.equal(output(aligned(loaded), family.inputs()), output(aligned(model), family.inputs()))
    loaded.save_pretrained(tmp_path / "again")
    again = type(model).from_pretrained(tmp_path / "again").eval()
    assert torch.equal(output(aligned(again), family.inputs()), output(aligned(model), family.inputs()))


def test_the_base_model_of_a_task_model_loads_too(tmp_path):
    model = FAMILIES["bert"].build().eval()
    prune_heads(model, heads={"enc-self": [[0, 2], []]})
    of_transformers_4(model, tmp_path, {"0": [0, 2]})
    loaded = FAMILIES["bert"].base.from_pretrained(tmp_path)
    assert loaded.encoder.layer[0].attention.self.query.weight.shape == (16, 32)


@pytest.mark.parametrize("pruned", [{}, {"1": []}])
def test_an_entry_without_heads_is_ignored(pruned):
    config = FAMILIES["bert"].build().config
    config.pruned_heads = pruned
    FAMILIES["bert"].base(config)
    assert not hasattr(config, "collab_heads")


@pytest.mark.parametrize(
    "pruned",
    [
        {"2": [0]},
        {"-1": [0]},
        {"0": [4]},
        {"0": 1},
        {"x": [0]},
        [0],
        {"0": [True]},
        "all",
        {"0": ["1"]},
        {"9" * 5000: [0]},
    ],
)
def test_what_does_not_fit_is_named(pruned):
    config = FAMILIES["bert"].build().config
    config.pruned_heads = pruned
    with pytest.raises(ConfigError, match="pruned_heads"):
        FAMILIES["bert"].base(config)


def test_families_that_transformers_did_not_prune_and_two_records_are_refused():
    config = FAMILIES["marian"].build().config
    config.pruned_heads = {"0": [0]}
    with pytest.raises(ConfigError, match=r"pruned_heads is \{'0': \[0\]\}, expected none in this family"):
        FAMILIES["marian"].base(config)
    model = FAMILIES["bert"].build()
    prune_heads(model, heads={"enc-self": [[0, 2], []]})
    model.config.pruned_heads = {"0": [0]}
    with pytest.raises(ConfigError, match=r"none beside config\.collab_heads"):
        FAMILIES["bert"].base(model.config)
