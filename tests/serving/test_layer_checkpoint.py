"""Stock checkpoints in which every layer has its own sizes: stock layers made of them compute the same, to the bit."""

import json
import re
import subprocess
import sys

import pytest
import torch
from changed_heads import change_heads, mix
from model_inputs import batch
from model_runs import aligned, output
from opening import layers_of
from safetensors.torch import load_file
from transformers import AutoConfig, PreTrainedModel

from collab_heads import compress, export, prune_heads, prune_neurons, swap_to_collaborative
from collab_heads.contract.registry import get_adapter, layered_model_types
from collab_heads.errors import ArgumentError, ModelStateError, UnsupportedModelError
from collab_heads.saving.layer_configs import LAYERS
from collab_heads.serving.layer_checkpoint import check_layers
from families import FAMILIES

pytest.importorskip("transformers.integrations.heterogeneity", reason="per_layer_config came with transformers 5.23")

NAMES = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "biogpt", "gpt2", "opt", "opt-350m", "modernbert")
NOISE = 2e-5  # float32, of sums in another order, of outputs up to 10; seen: 4e-6
ROTARY = ("llama", "mistral", "ministral", "qwen2", "qwen3", "gemma", "gemma3", "granite", "eurobert")


def heads_gone(model):
    """The first key head of the first site, with its heads."""
    prune_heads(model, heads={layers_of(model).attention[0].path: [0, 1]})


def any_heads_gone(model):
    """One head of the two of a key head: it comes back as zeros."""
    prune_heads(model, heads={layers_of(model).attention[0].path: [1]})


def neurons_gone(model):
    first, second = layers_of(model).feed_forwards
    prune_neurons(model, [batch()], keep={first.path: 20, second.path: 30})


def attention_gone(model, layer=0):
    prune_heads(model, heads={layers_of(model).attention[layer].path: [0, 1, 2, 3]})


def block_gone(model, layer=1):
    attention_gone(model, layer)
    prune_neurons(model, [batch()], keep={layers_of(model).feed_forwards[layer].path: 0})


def all_gone(model):
    block_gone(model, 0)
    block_gone(model, 1)


CHANGES = {
    "heads gone": heads_gone,
    "any heads gone": any_heads_gone,
    "neurons gone": neurons_gone,
    "attention gone": attention_gone,
    "block gone": block_gone,
    "all gone": all_gone,
    "gated": lambda model: change_heads(model, "gated"),
    "mixed": mix,
}
UNEVEN = ("heads gone", "neurons gone", "block gone")  # where the largest layer is larger than another one
QUICK = {("qwen3", change) for change in ("heads gone", "any heads gone", "block gone", "mixed")} | {
    ("bert", "neurons gone"),
    ("bert", "block gone"),
}
CASES = [
    pytest.param(name, change, marks=() if (name, change) in QUICK else pytest.mark.slow)
    for name in (*NAMES, *ROTARY)
    for change in CHANGES
]


def in_stock_layers(model: PreTrainedModel, folder) -> PreTrainedModel:
    """Build a model from what was written by the classes of its family alone: each layer of its own config."""
    config, adapter = AutoConfig.from_pretrained(folder), get_adapter(model)
    even = type(config)(**{name: value for name, value in read(folder).items() if name != LAYERS})
    built = type(model)(even)
    for site in adapter.sites(built):
        parent, _, number = adapter.layer_path(site.path).rpartition(".")
        layers = built.base_model.get_submodule(parent)
        own = config.per_layer_config[int(number)]
        own._attn_implementation = built.config._attn_implementation
        layers[int(number)] = type(layers[int(number)])(own, int(number))
    weights = load_file(folder / "model.safetensors")
    lost = built.load_state_dict(weights, strict=False)
    assert not lost.unexpected_keys and not any(".layer" in name or "h." in name for name in lost.missing_keys)
    built.tie_weights()
    return built.eval()


def read(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.mark.core
@pytest.mark.parametrize("name, change", CASES)
@torch.no_grad()
def test_stock_layers_compute_the_same(name, change, tmp_path):
    family = FAMILIES[name]
    model = family.build().eval()
    CHANGES[change](model)
    expected = output(aligned(model), family.inputs())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = export(model, tmp_path / "out", "transformers", per_layer=True, batches=[family.inputs()])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    written = (tmp_path / "out" / "config.json").read_text()
    assert "collab_heads" not in written and "allow_global" not in written
    is_uneven = LAYERS in read(tmp_path / "out")
    assert is_uneven or change not in UNEVEN or (name in NAMES and change == "heads gone")
    found = output(aligned(in_stock_layers(model, tmp_path / "out")), family.inputs())
    exact = change not in ("gated", "mixed", "any heads gone")  # else W_O, or what it multiplies, is another
    torch.testing.assert_close(found, expected, rtol=0, atol=0 if exact else NOISE)
    assert report.difference <= NOISE
    loaded = type(model).from_pretrained(tmp_path / "out").eval()
    assert torch.equal(output(aligned(loaded), family.inputs()), found)


def test_every_family_is_among_the_cases():
    assert {FAMILIES[name].build().config.model_type for name in (*NAMES, *ROTARY)} == set(layered_model_types())


def test_what_is_written(tmp_path):
    model = FAMILIES["llama"].build().eval()
    heads_gone(model)
    neurons_gone(model)
    report = export(model, tmp_path / "out", "transformers", per_layer=True)
    config = read(tmp_path / "out")
    assert config[LAYERS] == {
        "0": {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 20},
        "1": {"intermediate_size": 30},
    }
    sizes = [config[name] for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "head_dim")]
    assert sizes == [4, 2, 37, 8]
    assert report.notes == (
        "2 of 2 layers have sizes of their own (per_layer_config): README.md says how stock loads it",
    )


@pytest.mark.slow
def test_zeros_are_noted(tmp_path):
    model = FAMILIES["llama"].build().eval()
    any_heads_gone(model)
    block_gone(model)
    first, second, third, _ = export(model, tmp_path / "out", "transformers", per_layer=True).notes
    assert first == "layers.0.self_attn: heads of zeros: 1 of 4"
    assert (second, third) == ("layers.1.self_attn: heads of zeros: 1 of 1", "layers.1.mlp: a neuron of zeros")


def test_sizes_that_all_layers_have_are_those_of_the_config(tmp_path):
    model = FAMILIES["bert"].build().eval()
    prune_neurons(model, [FAMILIES["bert"].inputs()], keep=16)
    report = export(model, tmp_path / "out", "transformers", per_layer=True)
    assert LAYERS not in read(tmp_path / "out") and read(tmp_path / "out")["intermediate_size"] == 16
    assert not report.notes or "sizes of their own" not in str(report)


@pytest.mark.slow
def test_a_plan_for_llama_cpp_has_no_zeros(tmp_path):
    """`shape="gguf"` plans heads, key heads and neurons, but key heads may lose some of their heads."""
    family = FAMILIES["llama"]
    model = family.build().eval()
    compress(model, [family.inputs()], 0.6, refine_steps=0, shape="gguf")
    for site in layers_of(model).with_heads:
        assert len({site.groups.count(key) for key in site.groups}) == 1
    report = export(model, tmp_path / "out", "transformers", per_layer=True)
    assert LAYERS in read(tmp_path / "out") and "zeros: " not in re.sub(r"zeros: (\d+) of \1$", "", str(report))


def narrowed(model):
    options = {"kind": "per_head", "batches": [batch()], "refine_steps": 0}
    swap_to_collaborative(model, dim_shared_query_key=0.5, dim_value=0.5, **options)


@pytest.mark.parametrize("name", ["llama", "bert", *(pytest.param(each, marks=pytest.mark.slow) for each in ("gpt2",))])
def test_narrower_heads_are_refused(name, tmp_path):
    model = FAMILIES[name].build().eval()
    narrowed(model)
    with pytest.raises(ModelStateError, match=r"0\..*has narrower or shared queries.*parts=\('heads', 'neurons'\)"):
        export(model, tmp_path / "out", "transformers", per_layer=True)
    assert not list(tmp_path.iterdir())


def test_other_families_and_targets_are_refused(tmp_path):
    with pytest.raises(
        UnsupportedModelError, match=r"of type 't5', per_layer=True is for bert, biogpt, .* xlm-roberta"
    ):
        check_layers(FAMILIES["t5"].build())
    with pytest.raises(ArgumentError, match="per_layer=True: only to='transformers' has configs of layers, not 'onnx'"):
        export(FAMILIES["bert"].build(), tmp_path / "out", "onnx", per_layer=True)


ALONE = """
import sys, torch, transformers
expected = torch.load("expected.pt")
try:
    transformers.{kind}.from_pretrained("out")
    raise SystemExit("it was loaded as if its layers were even")
except RuntimeError as error:
    assert type(error).__name__ == "AmbiguousGlobalPerLayerAttributeError", error
{lines}
assert not [name for name in sys.modules if name.startswith("collab_heads")]
found = model.eval()(**expected["inputs"])[0]
torch.testing.assert_close(found, expected["output"], rtol=0, atol={noise})
if "input_ids" in expected["inputs"] and model.can_generate():
    model.generate(**expected["inputs"], max_new_tokens=3, do_sample=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ("llama", "mistral", "qwen2", "gemma3", "bert", "gpt2", "opt", "modernbert"))
@torch.no_grad()
def test_the_lines_in_the_card_load_it_without_this_package(name, tmp_path):
    family = FAMILIES[name]
    model = family.build().eval()
    heads_gone(model)
    neurons_gone(model)
    export(model, tmp_path / "out", "transformers", per_layer=True, batches=[family.inputs()])
    torch.save({"inputs": family.inputs(), "output": model(**family.inputs())[0]}, tmp_path / "expected.pt")
    card = (tmp_path / "out" / "README.md").read_text()
    lines = re.findall(r"```python\n(.*?)```", card, re.DOTALL)[1].replace("path/or/name", "out")
    code = ALONE.format(kind=type(model).__name__, lines=lines, noise=NOISE)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=200)
