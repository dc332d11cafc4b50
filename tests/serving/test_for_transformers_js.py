"""The target transformers.js: names and layout; test_in_node.py runs such a folder there."""

import re

import numpy as np
import pytest
import torch

from collab_heads import export, get_adapter, prune_heads
from collab_heads.errors import UnsupportedModelError
from collab_heads.serving import for_transformers_js
from families import FAMILIES

pytest.importorskip("transformers.exporters.runners", reason="exports of graphs need transformers 5.23")
onnx = pytest.importorskip("onnx")
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


@pytest.mark.slow
def test_what_a_decoder_shares_with_its_encoder_counts(tmp_path, monkeypatch):
    model = FAMILIES["marian"].build().eval()
    export(model, tmp_path / "served", "transformers.js")
    decoder = onnx.load(tmp_path / "served/onnx/decoder_model_merged.onnx")
    weights = sum(len(each.raw_data) for each in decoder.graph.initializer)
    monkeypatch.setattr(for_transformers_js, "MOST", weights)
    export(model, tmp_path / "fits", "transformers.js")
    monkeypatch.setattr(for_transformers_js, "MOST", weights - 1)
    with pytest.raises(UnsupportedModelError, match="one file holds 2"):
        export(model, tmp_path / "refused", "transformers.js")


@pytest.mark.slow
@pytest.mark.parametrize("name", ("marian", "t5"))
def test_a_decoder_makes_the_keys_of_its_source(name, tmp_path):
    """One token after the other, with what the library passes on, as PyTorch's greedy search."""
    model = FAMILIES[name].build().eval()
    heads = model.config.num_attention_heads
    prune_heads(model, heads={"dec-enc": [[0], *[[]] * (len(get_adapter(model).sites(model)) // 3 - 1)]})
    export(model, tmp_path / "served", "transformers.js")
    files = {each.name for each in (tmp_path / "served/onnx").iterdir()}
    assert files == {"encoder_model.onnx", "decoder_model_merged.onnx"} and heads > 1
    assert "AutoModelForSeq2SeqLM" in (tmp_path / "served/README.md").read_text()
    encoder, decoder = (onnxruntime.InferenceSession(tmp_path / "served/onnx" / file) for file in sorted(files)[::-1])
    ids = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 1, 1]])
    source = {"input_ids": ids.numpy(), "attention_mask": (ids != 1).long().numpy()}
    (states,) = encoder.run(None, source)
    shapes = {each.name: each.shape for each in decoder.get_inputs()}
    caches = [each for each in shapes if each.startswith("past_key_values")]
    assert shapes.keys() - caches == {"input_ids", "encoder_attention_mask", "encoder_hidden_states"}
    assert all(re.fullmatch(r"past_key_values\.\d\.decoder\.(key|value)", each) for each in caches)
    past = {each: np.zeros([2, shapes[each][1], 0, shapes[each][3]], dtype=np.float32) for each in caches}
    outputs = [each.name for each in decoder.get_outputs()]
    tokens, read = torch.tensor([[model.config.decoder_start_token_id]] * 2), []
    for token in (tokens, torch.tensor([[4], [7]]), torch.tensor([[9], [3]])):
        read.append(token)
        given = {"input_ids": token.numpy(), "encoder_attention_mask": source["attention_mask"]}
        found = decoder.run(None, given | {"encoder_hidden_states": states} | past)
        found = dict(zip(outputs, found, strict=True))
        past = {name.replace("present", "past_key_values"): each for name, each in found.items() if "present" in name}
        with torch.no_grad():
            inputs = {each: torch.tensor(value) for each, value in source.items()}
            expected = model(**inputs, decoder_input_ids=torch.cat(read, 1)).logits[:, -1:]
        torch.testing.assert_close(torch.tensor(found["logits"]), expected, rtol=0, atol=ENGINE_NOISE)


@pytest.mark.parametrize(
    ("name", "expected"),
    (
        ("input.past_key_values.layers.11.keys", "past_key_values.11.key"),
        ("output.cache.layers.0.values", "present.0.value"),
        ("input_ids", "input_ids"),
        ("input.past_key_values.self_attention_cache.layers.0.keys", "past_key_values.0.decoder.key"),
        ("input.past_key_values.cross_attention_cache.layers.0.keys", None),
    ),
)
def test_names(name, expected):
    assert for_transformers_js.renamed(name) == (expected or name)
