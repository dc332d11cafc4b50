"""collab-heads inspect: what it says of a model, of a type, of code that comes with a model."""

import json

import commands
import pytest
import torch
from transformers import AutoTokenizer, BertModel

from collab_heads import prune_heads, supported_model_types, swap_to_alpha, swap_to_collaborative, swap_to_gated
from collab_heads.command import main
from collab_heads.errors import ArgumentError, UnsupportedModelError
from collab_heads.heads.gating import gated_sites
from collab_heads.registry import get_adapter

FIRST, SECOND = ("encoder.layer.0.attention.self", "encoder.layer.1.attention.self")


def test_a_stock_model(bert, capsys):
    found = commands.run("inspect", bert)
    said = capsys.readouterr().out
    model = BertModel.from_pretrained(bert)
    assert found.parameters == model.num_parameters() and found.totals["heads"] == 8
    assert [site.path for site in found.sites] == [FIRST, SECOND]
    assert all(site.kind == "stock" and site.query_key == site.value == 32 for site in found.sites)
    assert found.totals["parameters"] == 2 * 4 * (32 * 32 + 32) and found.totals["cache"] == 0
    assert "bert: BertAdapter" in said and "8 heads, 8,448 parameters of attention" in said


def test_every_change_is_seen_without_the_weights(bert, tmp_path, monkeypatch):
    model = BertModel.from_pretrained(bert)
    prune_heads(model, {FIRST: [2]})
    swap_to_collaborative(model, dim_shared_query_key=8, dim_value=0.5, mixing="per_head", sites=SECOND)
    swap_to_gated(model)
    swap_to_alpha(model, sites=FIRST)
    with torch.no_grad():
        for _, gates in gated_sites(model, get_adapter(model)):
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


def test_a_decoder_has_a_cache(marian):
    found = commands.run("inspect", marian)
    roles = {site.role: site.cache for site in found.sites}
    assert roles["enc-self"] == 0 and roles["dec-self"] > 0 and roles["dec-enc"] > 0
    assert found.totals["cache"] == sum(site.cache for site in found.sites)


def test_a_type_says_what_works_with_it(capsys):
    for name in ("llama", "t5"):
        adapter = commands.run("inspect", name)
        assert set(adapter.capabilities) | set(adapter.why_not) >= {"prune", "collaborative"}
    assert "cannot: collaborative: " in capsys.readouterr().out
    assert main.main(["inspect", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == supported_model_types()


def test_what_is_no_model_is_refused(tmp_path, bert):
    for name, said in (("bertt", "cannot load AutoConfig from 'bertt'"), (tmp_path, "it has no config.json")):
        with pytest.raises(ArgumentError, match=said):
            commands.run("inspect", name)


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
