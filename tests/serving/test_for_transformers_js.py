"""The target transformers.js: names and layout; test_in_node.py runs such a folder there."""

import pytest
import torch

from collab_heads import export, prune_heads
from collab_heads.errors import UnsupportedModelError
from collab_heads.serving import for_transformers_js
from families import FAMILIES

pytest.importorskip("transformers.exporters.runners", reason="exports of graphs need transformers 5.23")
onnxruntime = pytest.importorskip("onnxruntime")
ENGINE_NOISE = 1e-4  # of logits in another engine, in float32; seen: 1e-6


@pytest.fixture(scope="module")
def decoder():
    """A GPT-2 with one head less in its first layer."""
    model = FAMILIES["gpt2"].build().eval()
    heads = model.config.num_attention_heads
    prune_heads(model, heads={"dec-self": [[0], *[[]] * (model.config.num_hidden_layers - 1)]})
    assert heads > 1
    return model


@pytest.mark.slow
def test_a_decoder_has_the_names_of_the_hub(decoder, tmp_path):
    report = export(decoder, tmp_path / "served", "transformers.js")
    assert report.agreeing == 1 and "transformers.js: " in str(report)
    written = {each.name for each in (tmp_path / "served").iterdir()}
    assert {"onnx", "config.json", "generation_config.json"} <= written and not {"export.json", "cache.json"} & written
    assert [each.name for each in (tmp_path / "served/onnx").iterdir()] == ["model.onnx"]
    assert "AutoModelForCausalLM" in (tmp_path / "served/README.md").read_text()
    session = onnxruntime.InferenceSession(tmp_path / "served/onnx/model.onnx")
    shapes = {each.name: each.shape for each in session.get_inputs()}
    layers, heads = decoder.config.num_hidden_layers, decoder.config.num_attention_heads
    names = {f"past_key_values.{layer}.{array}" for layer in range(layers) for array in ("key", "value")}
    assert names == {name for name in shapes if "." in name}
    for name in names:
        batch, count, _, width = shapes[name]
        assert batch == "batch_size" and count == heads - (".0." in name) and isinstance(width, int)
    assert {each.name for each in session.get_outputs()} == {
        "logits",
        *(name.replace("past_key_values", "present") for name in names),
    }
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    empty = {name: torch.zeros(1, shapes[name][1], 0, shapes[name][3]).numpy() for name in names}
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": torch.arange(5)[None]}
    found = session.run(["logits"], {**{name: value.numpy() for name, value in inputs.items()}, **empty})[0]
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(found), decoder(ids).logits, rtol=0, atol=ENGINE_NOISE)


@pytest.mark.slow
def test_a_graph_that_no_file_holds_is_refused(decoder, tmp_path, monkeypatch):
    monkeypatch.setattr(for_transformers_js, "MOST", 1000)
    with pytest.raises(UnsupportedModelError, match="one file holds 2: give weights fewer bits, or choose to='onnx'"):
        export(decoder, tmp_path / "served", "transformers.js")
    assert not list(tmp_path.iterdir())


def test_an_encoder_decoder_is_refused_before_the_work(tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"transformers\.js: .* is an encoder-decoder"):
        export(FAMILIES["marian"].build().eval(), tmp_path / "served", "transformers.js")


@pytest.mark.parametrize(
    ("name", "expected"),
    (
        ("input.past_key_values.layers.11.keys", "past_key_values.11.key"),
        ("output.cache.layers.0.values", "present.0.value"),
        ("input_ids", "input_ids"),
        ("input.past_key_values.self_attention_cache.layers.0.keys", None),
    ),
)
def test_names(name, expected):
    assert for_transformers_js.renamed(name) == (expected or name)
