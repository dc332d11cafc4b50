"""A process without this package: it runs what `export` wrote, and compares with what PyTorch gave.

Run as a script by `serving/test_engines_alone.py`, with a function, a folder, and a file of inputs and outputs. Only
the functions that say so import torch and transformers.
"""

import importlib.util
import json
import sys
from functools import partial
from pathlib import Path

import numpy as np

CACHES = ("cache", "past_key_values")  # since transformers 5.24, and before; a graph takes what it knows


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


def graph(folder, name="model"):
    """A function that runs a graph: name -> input, and name -> output."""
    if (folder / f"{name}.onnx").exists():
        import onnxruntime

        session = onnxruntime.InferenceSession(str(folder / f"{name}.onnx"))
        inputs, outputs = ([each.name for each in found] for found in (session.get_inputs(), session.get_outputs()))
        run = partial(session.run, None)
    else:
        import openvino

        core, file = openvino.Core(), folder / f"openvino_{name}.xml"
        compiled = core.compile_model(str(file), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        inputs, outputs = ([each.any_name for each in found] for found in (compiled.inputs, compiled.outputs))

        def run(given):
            found = compiled(given)
            return [np.array(found[name]) for name in outputs]  # copied: the engine writes there again

    return lambda given: dict(zip(outputs, run({name: given[name] for name in inputs}), strict=True))


def empty(folder, rows, path=""):
    """A cache of no tokens, under either name; cache.json has its heads and widths."""
    layers = json.loads((folder / "cache.json").read_text())["layers"]
    return {
        f"input.{cache}{path}.layers.{index}.{name}": np.zeros((rows, heads, 0, width), np.float32)
        for cache in CACHES
        for index, (heads, *widths) in enumerate(layers)
        for name, width in zip(("keys", "values"), widths, strict=True)
    }


def cached(found):
    """The cache that a graph returns, as its inputs of the next step."""
    return {name.replace("output.", "input.", 1): value for name, value in found.items() if name.startswith("output.")}


def continued(folder, given):
    """Decode greedily."""
    run, tokens, rows = graph(folder), given["input_ids"], len(given["input_ids"])
    cache, found, seen = empty(folder, rows), tokens, 0
    for _ in range(given["sequences"].shape[1] - tokens.shape[1]):
        fed = {"input_ids": tokens, "attention_mask": np.ones((rows, seen + tokens.shape[1]), np.int64)}
        fed["position_ids"] = np.tile(np.arange(seen, seen + tokens.shape[1]), (rows, 1))
        outputs = run(fed | cache)
        cache, seen = cached(outputs), seen + tokens.shape[1]
        tokens = outputs["logits"][:, -1:].argmax(-1)
        found = np.concatenate([found, tokens], axis=1)
    return found


def translated(folder, given):
    """Decode greedily, from keys and values that the encoder computes once."""
    encoder, decoder, rows = graph(folder, "encoder"), graph(folder, "decode"), len(given["input_ids"])
    states = encoder({"input_ids": given["input_ids"], "attention_mask": given["attention_mask"]})
    source = {
        "attention_mask": given["attention_mask"],
        "encoder_outputs.last_hidden_state": states["last_hidden_state"],
    }
    for name, value in states.items():
        kind, _, index = name.partition("_")
        if index.isdigit():
            source |= {f"input.{cache}.cross_attention_cache.layers.{index}.{kind}s": value for cache in CACHES}
    cache = empty(folder, rows, ".self_attention_cache")
    found = tokens = given["sequences"][:, :1]
    for _ in range(given["sequences"].shape[1] - 1):
        outputs = decoder({"decoder_input_ids": tokens} | source | cache)
        cache, tokens = cached(outputs), outputs["logits"][:, -1:].argmax(-1)
        found = np.concatenate([found, tokens], axis=1)
    return found


continued_onnx = continued_openvino = continued
translated_onnx = translated_openvino = translated


def continued_ctranslate2(folder, given):
    import ctranslate2

    engine, tokens = ctranslate2.Generator(str(folder)), given["input_ids"]
    new = given["sequences"].shape[1] - tokens.shape[1]
    texts = [[f"<{token}>" for token in row] for row in tokens]
    results = engine.generate_batch(
        texts, max_length=new, min_length=new, sampling_topk=1, include_prompt_in_result=False
    )
    return np.concatenate([tokens, np.array([each.sequences_ids[0] for each in results])], axis=1)


def greedy(folder, given, logits):
    """Continue each text alone; `logits` takes new tokens and their first place, and gives those after the last one."""
    found = []
    for text in given["input_ids"].tolist():
        new = text
        while len(text) < given["sequences"].shape[1]:
            new = [int(np.argmax(logits(new, len(text) - len(new))))]
            text = text + new
        found.append(text)
    return np.array(found)


def continued_gguf(folder, given):
    import llama_cpp

    engine = llama_cpp.Llama(str(folder / "model.gguf"), logits_all=True, verbose=False)

    def logits(tokens, begin):
        engine.n_tokens = begin
        engine.eval(tokens)
        return engine.scores[engine.n_tokens - 1].copy()

    found = greedy(folder, given, logits)
    engine.close()
    return found


def method_in_executorch(folder):
    from executorch.runtime import Runtime

    return Runtime.get().load_program(folder / "model.pte").load_method("forward").execute


def encoded_executorch(folder, given):
    import torch

    names = json.loads((folder / "export.json").read_text())["components"]["model"]["metadata"]["kwargs"]
    run = method_in_executorch(folder)
    pairs = [slice(at, at + 2) for at in range(0, len(given["expected"]), 2)]  # it takes two rows
    inputs = ([torch.from_numpy(given[name][rows]) for name in names] for rows in pairs)
    return np.concatenate([run(each)[0].numpy().copy() for each in inputs])


def continued_executorch(folder, given):
    import torch

    run = method_in_executorch(folder)
    return greedy(
        folder, given, lambda new, at: run([torch.tensor([new]), torch.arange(at, at + len(new))])[0][0, -1].numpy()
    )


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


def generated(auto, folder, given):
    """A stock checkpoint that generates greedily."""
    import torch
    import transformers

    inputs = {name: torch.from_numpy(given[name]) for name in ("input_ids", "attention_mask")}
    new = given["sequences"].shape[1] - (given["input_ids"].shape[1] if auto == "AutoModelForCausalLM" else 1)
    model = getattr(transformers, auto).from_pretrained(str(folder))
    options = {"do_sample": False, "num_beams": 1, "min_new_tokens": new, "max_new_tokens": new}
    return model.generate(**inputs, **options).numpy()


continued_transformers = partial(generated, "AutoModelForCausalLM")
translated_transformers = partial(generated, "AutoModelForSeq2SeqLM")


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
    without = {"onnx": 2, "openvino": 2, "ctranslate2": 2, "gguf": 2, "executorch": 1}.get(what.split("_")[1], 0)
    assert not any(importlib.util.find_spec(name) for name in ("transformers", "torch")[:without])
