"""Configs of others in which layers have sizes of their own (`per_layer_config`): read, checked, left alone."""

import json
import logging

import pytest
import torch
from changed_heads import change_heads
from model_runs import aligned, output
from opening import layers_of
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, Gemma4TextConfig, LlamaConfig, MistralConfig, MistralForCausalLM
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from collab_heads import compress, export, inspect
from collab_heads.errors import ConfigError
from collab_heads.saving.layer_configs import LAYERS, MOST, SIZES
from families import FAMILIES

pytest.importorskip("transformers.integrations.heterogeneity", reason="per_layer_config came with transformers 5.23")

UNEVEN = {"0": {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 20}}
UNEVEN |= {"1": {"num_attention_heads": 2, "intermediate_size": 30}}
NEURONS = {"1": {"intermediate_size": 20}}
STRANGERS = {"llama": (LlamaDecoderLayer, UNEVEN), "bert": (BertLayer, NEURONS)}


def write_config(folder, entries):
    config = json.loads((folder / "config.json").read_text()) | entries
    (folder / "config.json").write_text(json.dumps(config))


def by_hand(name, folder):
    """Write a model with stock layers of other sizes, without a line of this package, and return it."""
    layer_class, sizes = STRANGERS[name]
    model = FAMILIES[name].build().eval()
    layers = model.base_model.get_submodule("encoder.layer" if name == "bert" else "layers")
    torch.manual_seed(1)
    for number, entries in sizes.items():
        config = type(model.config)(**{**model.config.to_dict(), "head_dim": 8, **entries})
        config._attn_implementation = model.config._attn_implementation
        layers[int(number)] = layer_class(config, int(number)).eval()
        for parameter in layers[int(number)].parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    write_config(folder, {LAYERS: sizes})
    return model


@pytest.fixture(params=STRANGERS)
def strangers(request, tmp_path):
    """A folder that others wrote, its model, and the family."""
    return tmp_path / "folder", by_hand(request.param, tmp_path / "folder"), FAMILIES[request.param]


@torch.no_grad()
def test_it_loads_and_saves_and_loads_to_the_bit(strangers, tmp_path, caplog):
    folder, model, family = strangers
    with caplog.at_level(logging.WARNING):
        loaded = type(model).from_pretrained(folder).eval()
    assert "collab_heads imported" not in caplog.text  # such a folder has no ties, and needs none
    expected = output(aligned(model), family.inputs())
    assert torch.equal(output(aligned(loaded), family.inputs()), expected)
    assert not loaded.config.is_heterogeneous and not hasattr(loaded, SIZES) and not hasattr(loaded.config, SIZES)
    loaded.save_pretrained(tmp_path / "again")
    assert LAYERS not in json.loads((tmp_path / "again" / "config.json").read_text())
    again = type(model).from_pretrained(tmp_path / "again").eval()
    assert torch.equal(output(aligned(again), family.inputs()), expected)
    base = AutoModel.from_pretrained(folder)
    assert all(
        torch.equal(weight, loaded.state_dict()[f"{loaded.base_model_prefix}.{name}"])
        for name, weight in base.state_dict().items()
        if "pooler" not in name
    )


def test_an_export_is_the_folder_again(strangers, tmp_path):
    folder, model, _ = strangers
    export(type(model).from_pretrained(folder), tmp_path / "again", "transformers", per_layer=True)
    before, after = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "again"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    of_both = [AutoConfig.from_pretrained(each) for each in (folder, tmp_path / "again")]
    names = layers_of(model).adapter.layer_sizes
    sizes = [[[getattr(each, name) for name in names] for each in config.per_layer_config] for config in of_both]
    assert sizes[0] == sizes[1]


def test_it_is_inspected_compressed_and_gated(strangers):
    folder, model, family = strangers
    assert "20 of 37" in str(inspect(folder))
    loaded = type(model).from_pretrained(folder).eval()
    compress(loaded, [family.inputs()], 0.8, refine_steps=0)
    assert loaded.num_parameters() < model.num_parameters()
    change_heads(type(model).from_pretrained(folder), "gated")


def test_a_config_made_in_python_is_built():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = MistralConfig(**sizes, **heads, per_layer_config=UNEVEN, allow_global_per_layer_attribute_access=True)
    first, second = MistralForCausalLM(config).model.layers
    assert (first.self_attn.q_proj.out_features, first.self_attn.k_proj.out_features) == (16, 8)
    assert (second.self_attn.q_proj.out_features, second.self_attn.k_proj.out_features) == (16, 16)
    assert (first.mlp.up_proj.out_features, second.mlp.up_proj.out_features) == (20, 30)
    assert "allow_global" not in config.to_json_string()


def test_a_config_that_is_refused_stays_as_it_is():
    """Else the second model from it would have even layers."""
    config = MistralConfig(num_hidden_layers=2, per_layer_config={"1": {"num_attention_heads": 3}})
    for _ in range(2):
        with pytest.raises(ConfigError, match="layer 1, num_attention_heads is 3, expected a multiple"):
            MistralForCausalLM(config)


def test_more_heads_than_the_config_says_for_all():
    """Llama's config wants a number of heads that divides the width: 3 key heads with 2 heads each would be 6 of 32."""
    config = FAMILIES["llama"].build().config
    config.update({"num_attention_heads": 1, "num_key_value_heads": 1})
    config.per_layer_config = {"0": {"num_attention_heads": 3, "num_key_value_heads": 3},
                               "1": {"num_attention_heads": 2}}  # fmt: skip
    model = FAMILIES["llama"].base(config)
    assert model.config.num_attention_heads == 8
    assert [layer.self_attn.q_proj.out_features for layer in model.layers] == [3 * 8, 2 * 8]
    assert [layer.self_attn.k_proj.out_features for layer in model.layers] == [3 * 8, 8]
    model(torch.ones(1, 4, dtype=torch.long))


ENTRY = {"intermediate_size": 20}
HEADS = "layer 0, num_attention_heads is"
WRONG = {
    "a list": ([1], r"per_layer_config is \[1\]"),
    "a name": ({"x": {}}, "a layer in config.per_layer_config is 'x'"),
    "a layer too many": ({"2": ENTRY}, "per_layer_config is '2', expected each of the layers 0 to 1"),
    "a layer below": ({"-1": ENTRY}, "is '-1'"),
    "a long number": ({"9" * 5000: ENTRY}, "is '9999"),
    "a layer twice": ({"0": ENTRY, "00": ENTRY}, "is '00'.*once"),
    "no entries": ({"0": 5}, "of layer 0 is 5"),
    "none": ({"0": {"intermediate_size": 0}}, "layer 0, intermediate_size is 0"),
    "negative": ({"1": {"intermediate_size": -3}}, "layer 1, intermediate_size is -3"),
    "absurd": ({"0": {"intermediate_size": 1 << 40}}, "layer 0, intermediate_size is 1099511627776"),
    "text": ({"0": {"intermediate_size": "20"}}, "layer 0, intermediate_size is '20'"),
    "a bool": ({"0": {"intermediate_size": True}}, "layer 0, intermediate_size is True"),
    "a float": ({"0": {"intermediate_size": 20.0}}, r"layer 0, intermediate_size is 20\.0"),
    "null": ({"0": {"intermediate_size": None}}, "layer 0, intermediate_size is None"),
    "uneven groups": ({"0": {"num_attention_heads": 3}}, f"{HEADS} 3, expected a multiple of its num_key_value"),
    "absurd heads": ({"0": {"num_attention_heads": 1 << 20}}, f"{HEADS} 1048576, expected at most {MOST}"),
    "another width": ({"0": {"hidden_size": 16}}, "layer 0, hidden_size is 16, expected none: layers can"),
    "heads of a width": ({"1": {"head_dim": 4}}, "layer 1, head_dim is 4"),
    "a part left out": ({"0": {"skip": ["attention"]}}, r"layer 0, skip is \['attention'\]"),
    "a wrong skip": ({"0": {"skip": 5}}, "per_layer_config is .*skip.* iterable"),
    "unknown": ({"0": {"foo": 1}}, r"per_layer_config is .*'foo'"),
    "fewer neurons than weights": ({"1": {"intermediate_size": 9}}, "layer 1 has .*intermediate_size 9 by the config"),
    "fewer heads": ({"1": {"num_attention_heads": 2}}, r"layer 1 has num_attention_heads 2.* q_proj|o_proj"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_named(what, tmp_path):
    entries, message = WRONG[what]
    FAMILIES["llama"].build().save_pretrained(tmp_path)
    write_config(tmp_path, {LAYERS: entries})
    with pytest.raises(ConfigError, match=message):
        FAMILIES["llama"].base.from_pretrained(tmp_path)


def test_a_layer_without_sizes_must_fit_too(tmp_path):
    model = by_hand("llama", tmp_path)
    write_config(tmp_path, {LAYERS: {"1": UNEVEN["1"]}})
    with pytest.raises(ConfigError, match=r"layer 0 has num_attention_heads 4, .* and model\.layers\.0\..* missing or"):
        type(model).from_pretrained(tmp_path)


def test_heads_whose_width_no_entry_says(tmp_path):
    """Stock layers of Qwen2 with fewer heads have wider ones, where the config has no `head_dim`."""
    FAMILIES["qwen2"].build().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("head_dim") == 8
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_config(tmp_path, {LAYERS: {"0": {"num_attention_heads": 2, "num_key_value_heads": 1}}})
    with pytest.raises(ConfigError, match=r"layer 0, num_attention_heads is 2, expected 4, since .* head_dim"):
        FAMILIES["qwen2"].base.from_pretrained(tmp_path)


def test_sizes_beside_our_record(tmp_path):
    model = by_hand("bert", tmp_path / "folder")
    type(model).from_pretrained(tmp_path / "folder").save_pretrained(tmp_path / "ours")
    write_config(tmp_path / "ours", {LAYERS: NEURONS})
    with pytest.raises(ConfigError, match=r"none beside config\.collab_heads"):
        type(model).from_pretrained(tmp_path / "ours")


def test_a_file_that_lets_stock_build_even_layers(tmp_path):
    """Saved by a process that read what is ambiguous: the layers are those of the config all the same."""
    model = by_hand("llama", tmp_path)
    write_config(tmp_path, {"allow_global_per_layer_attribute_access": True})
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.model.layers[0].mlp.up_proj.out_features == 20
    loaded.save_pretrained(tmp_path / "again")
    assert "allow_global" not in (tmp_path / "again" / "config.json").read_text()


def test_configs_of_stock_are_left_alone(tmp_path):
    """Gemma 4 says there how wide the heads of its layers are; a Llama config only read stays what it is."""
    config = Gemma4TextConfig(num_hidden_layers=6)
    assert config.is_heterogeneous
    config.save_pretrained(tmp_path / "gemma")
    again = AutoConfig.from_pretrained(tmp_path / "gemma")
    assert again.to_dict()[LAYERS] == config.to_dict()[LAYERS] and again.is_heterogeneous
    LlamaConfig(num_hidden_layers=2).save_pretrained(tmp_path / "llama")
    write_config(tmp_path / "llama", {LAYERS: UNEVEN})
    config, unused = AutoConfig.from_pretrained(tmp_path / "llama", return_unused_kwargs=True)
    assert [each.num_attention_heads for each in config.per_layer_config] == [2, 2] and unused == {}
    with pytest.raises(RuntimeError, match="per-layer attribute"):
        _ = config.num_attention_heads


def test_families_without_such_layers_are_left_to_stock():
    config = FAMILIES["vit"].build().config
    config.per_layer_config = {"0": {"intermediate_size": 20}}
    with pytest.raises(RuntimeError, match="per-layer attribute"):
        FAMILIES["vit"].base(config)
    assert config.is_heterogeneous


def test_weights_of_others_without_metadata(tmp_path):
    model = by_hand("bert", tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path), path)
    assert type(model).from_pretrained(tmp_path).config.collab_heads
