"""A process without this package: it runs what `export` wrote, and compares with what PyTorch gave.

Run as a script by `serving/test_engines_alone.py`, with a function, a folder, and a file of inputs and outputs. Only
the functions that say so import torch and transformers.
"""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np


def encoded_onnx(folder, given):
    import onnxruntime

    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    names = {each.name for each in session.get_inputs()}
    return session.run(None, {name: value for name, value in given.items() if name in names})[0]


def encoded_openvino(folder, given):
    import openvino

    model = openvino.Core().compile_model(str(next(folder.glob("*.xml"))), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    names = {name for each in model.inputs for name in each.names}
    return model({name: value for name, value in given.items() if name in names})[0]


def encoded_ctranslate2(folder, given):
    import ctranslate2

    engine = ctranslate2.Encoder(str(folder))
    rows = [
        row[mask.astype(bool)].tolist() for row, mask in zip(given["input_ids"], given["attention_mask"], strict=True)
    ]
    return np.array(engine.forward_batch(rows).last_hidden_state)


def continued_onnx(folder, given):
    """Decode greedily; cache.json has the heads and widths of the cache."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    layers = json.loads((folder / "cache.json").read_text())["layers"]
    tokens, rows = given["input_ids"], len(given["input_ids"])
    cache = {}
    for index, (heads, *widths) in enumerate(layers):
        for name, width in zip(("keys", "values"), widths, strict=True):
            cache[f"past_key_values.layers.{index}.{name}"] = np.zeros((rows, heads, 0, width), np.float32)
    found, seen, new = tokens, 0, given["sequences"].shape[1] - tokens.shape[1]
    for _ in range(new):
        fed = {"input_ids": tokens, "attention_mask": np.ones((rows, seen + tokens.shape[1]), np.int64)}
        fed["position_ids"] = np.tile(np.arange(seen, seen + tokens.shape[1]), (rows, 1))
        fed |= {f"input.{name}": value for name, value in cache.items()}
        logits, *cached = session.run(None, fed)
        cache = {
            each.name.removeprefix("output."): value
            for each, value in zip(session.get_outputs()[1:], cached, strict=True)
        }
        seen += tokens.shape[1]
        tokens = logits[:, -1:].argmax(-1)
        found = np.concatenate([found, tokens], axis=1)
    return found


def continued_ctranslate2(folder, given):
    import ctranslate2

    engine, tokens = ctranslate2.Generator(str(folder)), given["input_ids"]
    new = given["sequences"].shape[1] - tokens.shape[1]
    texts = [[f"<{token}>" for token in row] for row in tokens]
    results = engine.generate_batch(
        texts, max_length=new, min_length=new, sampling_topk=1, include_prompt_in_result=False
    )
    return np.concatenate([tokens, np.array([each.sequences_ids[0] for each in results])], axis=1)


def encoded_exported(folder, given):
    """Graphs, as transformers loads them."""
    import torch
    from transformers.exporters.base import ExportedModel

    inputs = {name: torch.from_numpy(given[name]) for name in ("input_ids", "attention_mask")}
    return ExportedModel.from_pretrained(str(folder), device="cpu", **options(folder))(**inputs)[0].numpy()


def options(folder):
    """OpenVINO takes less than float32 by default."""
    is_openvino = any(folder.glob("*.xml"))
    return {"config": {"INFERENCE_PRECISION_HINT": "f32"}} if is_openvino else {}


def encoded_transformers(folder, given):
    """A stock checkpoint."""
    import torch
    from transformers import AutoModel

    inputs = {name: torch.from_numpy(given[name]) for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        return AutoModel.from_pretrained(str(folder))(**inputs)[0].numpy()


def translated_ctranslate2(folder, given):
    import ctranslate2

    engine, count = ctranslate2.Translator(str(folder)), given["sequences"].shape[1] - 1
    texts = [[f"<{token}>" for token in row] for row in given["input_ids"]]
    results = engine.translate_batch(texts, beam_size=1, max_decoding_length=count, min_decoding_length=count)
    found = [[int(token.strip("<>")) for token in each.hypotheses[0]] for each in results]
    return np.concatenate([given["sequences"][:, :1], np.array(found)], axis=1)


if __name__ == "__main__":
    what, folder, file = sys.argv[1:]
    given = dict(np.load(file))
    found = globals()[what](Path(folder), given)
    if "sequences" in given:
        assert (found == given["sequences"]).all(), (found, given["sequences"])
    else:
        np.testing.assert_allclose(found, given["expected"], rtol=0, atol=1e-5 * np.abs(given["expected"]).max())
    assert importlib.util.find_spec("collab_heads") is None
    without = {"torch", "transformers"} if what.split("_")[1] in ("onnx", "openvino", "ctranslate2") else set()
    assert not any(importlib.util.find_spec(name) for name in without)
