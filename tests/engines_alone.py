"""A process with an engine and numpy alone: it runs what `export` wrote, and compares with what PyTorch gave.

Run as a script by `serving/test_engines_alone.py`, with a function, a folder, and a file of inputs and outputs. It
imports nothing of the package, and neither torch nor transformers.
"""

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
    assert not {"torch", "transformers", "collab_heads"} & set(sys.modules)
