"""collab-heads inspect: what it says of a model, of a type, of code that comes with a model."""

import json
import os
import shutil
import socket
import threading

import commands
import huggingface_hub
import pytest
import torch
from opening import gates_in
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, BertModel

from collab_heads import (
    prune_heads,
    prune_neurons,
    supported_model_types,
    swap_to_alpha,
    swap_to_collaborative,
    swap_to_gated,
)
from collab_heads.command import main
from collab_heads.errors import ArgumentError, DataError, NonFiniteError, UnsupportedModelError

FIRST, SECOND = ("encoder.layer.0.attention.self", "encoder.layer.1.attention.self")


def test_a_stock_model(bert, capsys):
    found = commands.run("inspect", bert)
    said = capsys.readouterr().out
    model = BertModel.from_pretrained(bert)
    assert found.parameters == model.num_parameters() and found.totals["heads"] == 8
    assert [site.path for site in found.sites] == [FIRST, SECOND]
    assert all(site.kind == "stock" and site.query_key == site.value == 32 for site in found.sites)
    assert found.totals["parameters"] == 2 * 4 * (32 * 32 + 32) and found.totals["cache"] == 0
    assert "bert: attention of the roles enc-self, dec-self, dec-enc (BertAdapter)" in said
    assert (
        "possible: queries and keys that heads share, narrower queries and keys, narrower values, fewer heads" in said
    )
    assert "role site heads query/key width value width parameters" in " ".join(said.split())  # and nothing that is "-"
    assert "8 heads, 8,448 parameters of attention" in said


def test_feed_forward_blocks_have_a_table_of_their_own(bert, tmp_path, capsys):
    model = BertModel.from_pretrained(bert)
    inner = model.config.intermediate_size
    prune_neurons(model, [{"input_ids": torch.arange(3, 27).view(3, 8)}], keep={"encoder.layer.1": 8})
    model.save_pretrained(tmp_path)
    found = commands.run("inspect", tmp_path)
    assert [(block.path, block.role, block.neurons, block.neurons_before) for block in found.blocks] == [
        ("encoder.layer.0", "enc-ffn", inner, inner),
        ("encoder.layer.1", "enc-ffn", 8, inner),
    ]
    assert found.blocks[1].parameters == 2 * 8 * 32 + 8 + 32
    assert found.totals["neurons"] == inner + 8 and found.parameters == model.num_parameters()
    said = capsys.readouterr().out
    assert f"8 of {inner}" in said and f"{inner + 8} neurons of {2 * inner}" in said
    json.dumps(found.to_dict())


def test_every_change_is_seen_without_the_weights(bert, tmp_path, monkeypatch):
    model = BertModel.from_pretrained(bert)
    prune_heads(model, heads={FIRST: [2]})
    swap_to_collaborative(model, dim_shared_query_key=8, dim_value=0.5, kind="per_head", sites=SECOND)
    swap_to_gated(model)
    swap_to_alpha(model, sites=FIRST)
    with torch.no_grad():
        for _, gates in gates_in(model):
            gates.log_alpha[-1] = -9.0
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(BertModel, "from_pretrained", None)
    first, second = commands.run("inspect", tmp_path).sites
    assert (first.heads, first.heads_before, first.kept, first.kind, first.alphas) == (3, 4, (0, 1, 3), "stock", True)
    assert (first.gates, first.open) == ("learned", (0, 1)) and (first.query_key, first.value) == (24, 24)
    assert (second.kind, second.query_key, second.value, second.alphas) == ("per_head", 16, 16, False)
    assert second.open == (0, 1, 2)
    found = commands.run("inspect", tmp_path).to_dict()
    assert json.loads(json.dumps(found))["totals"]["heads_before"] == 8
    (tmp_path / "model.safetensors").unlink()
    assert commands.run("inspect", tmp_path).sites[0].open is None


def test_a_decoder_has_a_cache(marian, capsys):
    found = commands.run("inspect", marian)
    assert "cache/token" in capsys.readouterr().out
    roles = {site.role: site.cache for site in found.sites}
    assert roles["enc-self"] == 0 and roles["dec-self"] > 0 and roles["dec-enc"] > 0
    assert found.totals["cache"] == sum(site.cache for site in found.sites)


def test_a_type_says_what_works_with_it(capsys):
    for name in ("llama", "t5"):
        adapter = commands.run("inspect", name)
        assert set(adapter.capabilities) | set(adapter.why_not) >= {"prune", "collaborative"}
    assert "not possible: queries and keys that heads share: rotary positions" in capsys.readouterr().out
    assert main.main(["inspect", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == supported_model_types()


def test_what_is_no_model_is_refused(tmp_path, bert):
    for name, said in (("bertt", "cannot load AutoConfig from 'bertt'"), (tmp_path, "it has no config.json")):
        with pytest.raises(ArgumentError, match=said):
            commands.run("inspect", name)
    with pytest.raises(ArgumentError, match=r"there is no folder '\./small'"):
        commands.run("inspect", "./small")


@pytest.mark.parametrize("command", ("inspect", "fold"))
@pytest.mark.parametrize("trusted", ((), ("--trust_remote_code",)))
def test_attention_that_comes_with_the_model_is_refused_in_a_sentence_of_its_own(command, trusted, tmp_path, bert):
    own = tmp_path / "own"
    own.mkdir()
    code = "from transformers import BertConfig, BertModel\nclass OwnConfig(BertConfig):\n    model_type = 'own-bert'\n"
    code += "class OwnModel(BertModel):\n    config_class = OwnConfig\n"
    (own / "own.py").write_text(code)
    config = json.loads((bert / "config.json").read_text()) | {"model_type": "own-bert", "architectures": ["OwnModel"]}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    (own / "config.json").write_text(json.dumps(config))
    AutoTokenizer.from_pretrained(bert).save_pretrained(own)
    out = ("--output_dir", tmp_path / "out") if command == "fold" else ()
    with pytest.raises(
        UnsupportedModelError, match=r"'own-bert' .* its attention is code that comes with the model, no a"
    ):
        commands.run(command, own, *trusted, *out)


@pytest.fixture
def gated(bert, tmp_path):
    """A folder of a model with gates."""
    model = BertModel.from_pretrained(bert)
    swap_to_gated(model)
    model.save_pretrained(tmp_path / "gated")
    return tmp_path / "gated"


def damage(folder, how):
    file = folder / "model.safetensors"
    tensors, content = load_file(file), file.read_bytes()
    file.unlink()
    name = next(name for name in tensors if name.endswith("log_alpha"))
    if how == "folder":
        file.mkdir()
    elif how == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        file.write_bytes(b"")
    elif how == "text":
        file.write_text("a model")
    elif how == "shape":
        save_file(tensors | {name: torch.ones(7)}, file)
    elif how == "name":
        tensors[name.replace("log_alpha", "alive")] = tensors.pop(name)
        save_file(tensors, file)
    else:
        save_file(tensors | {name: torch.full((4,), torch.nan)}, file)


@pytest.mark.parametrize(
    ("how", "error", "said"),
    (
        ("folder", DataError, "model.safetensors holds no weights, or is damaged"),
        ("cut", DataError, "model.safetensors holds no weights, or is damaged"),
        ("empty", DataError, "model.safetensors holds no weights, or is damaged"),
        ("text", DataError, "model.safetensors holds no weights, or is damaged"),
        ("shape", DataError, "encoder.layer.0.attention.self: what is stored are gates of something else"),
        ("name", DataError, "encoder.layer.0.attention.self: what is stored are gates of something else"),
        ("NaN", NonFiniteError, "encoder.layer.0.attention.self: its gates contain NaN or inf"),
    ),
)
def test_gates_that_cannot_be_read(how, error, said, gated):
    damage(gated, how)
    with pytest.raises(error, match=said):
        commands.run("inspect", gated)


@pytest.mark.parametrize(
    ("entries", "said"),
    (
        ([], "Should have a `model_type` key"),
        (5, "cannot load AutoConfig"),
        ({"architectures": 5}, "its architectures are 5, must be a list of names"),
        ({"architectures": [5]}, r"its architectures are \[5\]"),
        ({"architectures": "BertModel"}, "its architectures are 'BertModel'"),
        ({"architectures": ["T5Model"]}, "cannot load T5Model"),
        ({"num_attention_heads": 0}, "cannot load BertModel .* ZeroDivisionError"),
        ({"num_attention_heads": 5}, "is not a multiple of the number of attention heads"),
        ({"hidden_size": "32"}, "'hidden_size' expected int, got str"),
        ({"hidden_size": -32}, "cannot load BertModel .* negative dimension"),
        ({"hidden_act": "none"}, "cannot load BertModel .* KeyError 'none'"),
        ({"model_type": ["bert"]}, "cannot load AutoConfig"),
        ({"auto_map": 5}, "cannot load AutoConfig"),
    ),
    ids=str,
)
def test_configs_that_are_no_configs(entries, said, bert, tmp_path):
    config = json.loads((bert / "config.json").read_text())
    config = config | {"architectures": ["BertModel"]} | entries if isinstance(entries, dict) else entries
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArgumentError, match=said):
        commands.run("inspect", tmp_path)
    if isinstance(entries, dict):
        AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path)
    with pytest.raises(ArgumentError, match=r"cannot load|its architectures"):
        commands.run("fold", tmp_path, "--output_dir", tmp_path / "out")


def test_a_dtype_that_torch_lacks_is_refused_before_the_work(bert, tmp_path):
    shutil.copytree(bert, tmp_path / "odd")
    config = json.loads((bert / "config.json").read_text()) | {"dtype": 5}
    (tmp_path / "odd" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArgumentError, match=r"the dtype in its config.json is 5"):
        commands.run("fold", tmp_path / "odd", "--output_dir", tmp_path / "out")


def test_a_config_that_is_a_pipe_is_none(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ArgumentError, match=r"holds no model: it has no config.json"):
        commands.run("inspect", tmp_path)


@pytest.fixture
def asked(monkeypatch):
    """The hosts that this thread asks for, none of which there is; threads that other tests left ask, too."""
    hosts, here = [], threading.get_ident()

    def missing(host, *args, **options):
        if threading.get_ident() == here:
            hosts.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", missing)
    monkeypatch.setattr("collab_heads.saving.loading.is_offline_mode", lambda: False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    huggingface_hub.utils.build_hf_headers()  # the first of a process asks for a list of agents
    hosts.clear()
    return hosts


@pytest.mark.parametrize("command", ("inspect", "fold"))
def test_a_hub_that_cannot_be_reached_is_asked_once(command, asked, tmp_path):
    out = ("--output_dir", tmp_path / "out") if command == "fold" else ()
    with pytest.raises(
        ArgumentError, match=r"there is no folder 'no-such-model', and the Hub cannot be asked for it: .*not kn"
    ):
        commands.run(command, "no-such-model", *out)
    assert len(asked) == 1


def test_a_type_without_an_adapter_is_looked_up_nowhere(asked):
    with pytest.raises(UnsupportedModelError, match="model type 'falcon' is not supported"):
        commands.run("inspect", "falcon")
    assert not asked
