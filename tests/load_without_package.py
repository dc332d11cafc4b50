"""A process that has never heard of collab_heads: it loads checkpoints in every way, and tells what came of it.

Run as a script by `test_without_import.py`; it imports nothing of the package or of the other tests.
"""

import json
import logging
import sys
import warnings
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

LOADED = "loaded"
# what a caller passes -> nothing of it may hide that the model is not what its class says
WAYS = {
    "plain": {},
    "eager": {"attn_implementation": "eager"},
    "sdpa": {"attn_implementation": "sdpa"},
    "bfloat16": {"dtype": torch.bfloat16},
    "device map": {"device_map": "cpu"},
    "other shapes": {"ignore_mismatched_sizes": True},
    "no safetensors": {"use_safetensors": False},
    "untrusted": {"trust_remote_code": False},
}
VERBOSITIES = {"error": transformers.logging.ERROR, "usual": transformers.logging.WARNING}


def refusals(folder: str, loaders: list[str], ways=tuple(WAYS), verbosities=tuple(VERBOSITIES)) -> dict[str, str]:
    """Way of loading -> the text of the error, or that there was none."""
    found = {}
    for name in loaders:
        for verbosity in verbosities:
            transformers.logging.set_verbosity(VERBOSITIES[verbosity])
            for way in ways:
                found[f"{name}, {way}, {verbosity}"] = refusal(
                    lambda name=name, way=way: getattr(transformers, name).from_pretrained(folder, **WAYS[way])
                )
        found[f"{name}, its config given"] = refusal(
            lambda name=name: getattr(transformers, name).from_pretrained(
                folder, config=transformers.AutoConfig.from_pretrained(folder)
            )
        )
    return found


def refusal(load) -> str:
    """The text of the error of a load, or that there was none."""
    try:
        load()
    except Exception as error:
        return str(error)
    return LOADED


def embedder(folder: str) -> str:
    """The same of sentence-transformers."""
    from sentence_transformers import SentenceTransformer

    return refusal(lambda: SentenceTransformer(folder, device="cpu"))


def first_tensor(model, inputs) -> torch.Tensor:
    """Logits or hidden states."""
    with torch.no_grad():
        result = model.eval()(**inputs)
    return next(result[name] for name in ("logits", "logits_per_text", "last_hidden_state") if name in result)


def main(request: Path) -> None:
    """Do what a file asks for: {"refused": {folder: loaders}, "embedder": folder, "trusted": {folder: auto class}}."""
    warnings.simplefilter("ignore")
    asked, told = json.loads(request.read_text()), {}
    told["refused"] = {folder: refusals(folder, loaders) for folder, loaders in asked["refused"].items()}
    if asked.get("embedder"):
        logging.disable(logging.CRITICAL)
        told["embedder"] = embedder(asked["embedder"])
        logging.disable(logging.NOTSET)
    told["imported before"] = "collab_heads" in sys.modules
    for folder, loader in asked["trusted"].items():
        model = getattr(transformers, loader).from_pretrained(folder, trust_remote_code=True)
        inputs = load_file(f"{folder}/inputs.tensors")
        save_file({"output": first_tensor(model, inputs).contiguous()}, f"{folder}/output.tensors")
        told.setdefault("classes", {})[folder] = f"{type(model).__module__}.{type(model).__name__}"
        model.save_pretrained(f"{folder}/again")
    told["imported after"] = "collab_heads" in sys.modules
    request.with_suffix(".told").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
