"""Exported models run in virtual environments without this package, and in those without PyTorch, too.

A virtual environment here has links to the packages that are installed, but for some.
"""

import subprocess
import sysconfig
import venv
from pathlib import Path

import engines_alone
import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, MarianConfig, MarianMTModel

from collab_heads import compress, export

pytest.importorskip("transformers.exporters.runners", reason="exports of graphs need transformers 5.23")

SMALL = {"vocab_size": 64, "pad_token_id": 63, "decoder_start_token_id": 63, "eos_token_id": 0, "d_model": 64}
SMALL |= {f"{stack}_{name}": n for stack in ("encoder", "decoder") for name, n in (("layers", 2), ("ffn_dim", 64))}
SMALL |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "forced_eos_token_id": None}
LAYERS = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "encoded": lambda: BertModel(BertConfig(**LAYERS, intermediate_size=64)),
    "continued": lambda: GPT2LMHeadModel(
        GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=64, bos_token_id=0, eos_token_id=0)
    ),
    "translated": lambda: MarianMTModel(MarianConfig(**SMALL)),
}


@pytest.fixture(scope="module")
def python_without(tmp_path_factory):
    """Make a virtual environment without some packages, and return its Python."""

    def make(*packages):
        place = tmp_path_factory.mktemp("environment")
        venv.create(place, symlinks=True)
        variables = {"base": str(place), "platbase": str(place)}
        target = Path(sysconfig.get_path("purelib", "venv", variables))
        for installed in Path(sysconfig.get_path("purelib")).iterdir():
            name = installed.name.replace("-", "_")
            if not name.startswith(("collab_heads", "__editable__", "_editable", *packages)):
                (target / installed.name).symlink_to(installed)
        return place / "bin" / "python"

    return make


def check_alone(python, what, folder, given, cwd):
    call = [python, "-I", engines_alone.__file__, what, folder, given]
    subprocess.run([str(each) for each in call], check=True, cwd=cwd, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [
        "encoded_onnx",
        "encoded_openvino",
        "encoded_ctranslate2",
        "continued_onnx",
        "continued_ctranslate2",
        "translated_ctranslate2",
    ],
)
@torch.no_grad()
def test_an_engine_runs_a_compressed_model_alone(what, tmp_path, python_without):
    kind, engine = what.split("_")
    torch.manual_seed(0)
    model = MODELS[kind]().eval()
    for parameter in model.parameters():
        parameter.mul_(2)
    tokens = torch.randint(1, 60, (3, 7), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    with torch.enable_grad():
        compress(model, [batch] * 4, 0.6, refine_steps=0)
    export(model, tmp_path / "out", engine, batches=[batch])
    given = {name: tensor.numpy() for name, tensor in batch.items()}
    if kind == "encoded":
        given["expected"] = model(**batch).last_hidden_state.numpy()
    else:
        options = {"do_sample": False, "num_beams": 1, "min_new_tokens": 6, "max_new_tokens": 6}
        given["sequences"] = model.generate(**batch, **options).numpy()
    np.savez(tmp_path / "given.npz", **given)
    python = python_without("torch", "transformers")
    check_alone(python, what, tmp_path / "out", tmp_path / "given.npz", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("to", ("onnx", "openvino", "transformers"))
@torch.no_grad()
def test_transformers_runs_a_compressed_model_alone(to, tmp_path, python_without):
    torch.manual_seed(0)
    model = MODELS["encoded"]().eval()
    tokens = torch.randint(1, 60, (3, 7), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    with torch.enable_grad():
        compress(model, [batch] * 4, 0.75, refine_steps=0, shape="uniform" if to == "transformers" else "free")
    export(model, tmp_path / "out", to, batches=[batch])
    given = {name: tensor.numpy() for name, tensor in batch.items()}
    np.savez(tmp_path / "given.npz", **given, expected=model(**batch).last_hidden_state.numpy())
    what = "encoded_transformers" if to == "transformers" else "encoded_exported"
    check_alone(python_without(), what, tmp_path / "out", tmp_path / "given.npz", tmp_path)
