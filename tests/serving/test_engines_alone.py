"""Exported models run in virtual environments without this package, and in those without PyTorch, too.

A virtual environment here has links to the packages that are installed, but for some.
"""

import importlib.util
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

pytestmark = pytest.mark.slow

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
    "translated": lambda: MarianMTModel(MarianConfig(**SMALL, init_std=0.1)),
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
        (target / "engines.pth").write_text("\n".join(places_of("llama_cpp", "executorch")))
        return place / "bin" / "python"

    return make


def places_of(*engines):
    """The folders of engines that are installed apart from the other packages."""
    found = [spec for spec in map(importlib.util.find_spec, engines) if spec is not None]
    places = {str(Path(place).parent) for spec in found for place in spec.submodule_search_locations or ()}
    return sorted(places - {sysconfig.get_path("purelib")})


def check_alone(python, what, folder, given, cwd):
    call = [python, "-I", engines_alone.__file__, what, folder, given]
    subprocess.run([str(each) for each in call], check=True, cwd=cwd, timeout=120)


ENGINES = ("onnx", "openvino", "ctranslate2")
OTHERS = {"gguf": ("llama_cpp", "uniform"), "executorch": ("executorch", "free")}  # module, shape of plans


def given_to(model, shape, file):
    """Compress a model, and store what it reads and gives for the process that runs it alone."""
    tokens = torch.randint(1, 60, (8, 7), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    labels = {"labels": tokens} if model.config.is_encoder_decoder else {}
    with torch.enable_grad():
        compress(model, [batch | labels] * 4, 0.6 if shape == "free" else 0.85, refine_steps=0, shape=shape)
    given = {name: tensor.numpy() for name, tensor in batch.items()}
    if model.can_generate():
        options = {"do_sample": False, "num_beams": 1, "min_new_tokens": 6, "max_new_tokens": 6}
        given["sequences"] = model.generate(**batch, **options).numpy()
        assert len(np.unique(given["sequences"][:, -6:], axis=0)) > 1  # of other inputs
    else:
        given["expected"] = model(**batch).last_hidden_state.numpy()
    np.savez(file, **given)
    return batch


def build(kind):
    """A seeded model whose outputs depend on what it reads."""
    torch.manual_seed(0)
    model = MODELS[kind]().eval()
    for name, parameter in model.named_parameters():
        if kind != "translated" or "encoder_attn" in name:  # else tied embeddings repeat one token
            parameter.data.mul_(10 if kind == "translated" else 2)
    return model


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_an_engine_runs_a_compressed_model_alone(kind, engine, tmp_path, python_without):
    model = build(kind)
    batch = given_to(model, "free", tmp_path / "given.npz")
    export(model, tmp_path / "out", engine, batches=[batch])
    python = python_without("torch", "transformers")
    check_alone(python, f"{kind}_{engine}", tmp_path / "out", tmp_path / "given.npz", tmp_path)


@pytest.mark.parametrize(
    "engine, kind", [("gguf", "continued"), ("executorch", "continued"), ("executorch", "encoded")]
)
@torch.no_grad()
def test_an_engine_that_comes_apart_runs_it_alone(engine, kind, tmp_path, python_without):
    """The program of ExecuTorch takes tensors of PyTorch."""
    module, shape = OTHERS[engine]
    pytest.importorskip(module)
    model = build(kind)
    batch = given_to(model, shape, tmp_path / "given.npz")
    export(model, tmp_path / "out", engine, batches=[{name: tensor[:2] for name, tensor in batch.items()}])
    python = python_without("transformers", *(["torch"] if engine == "gguf" else []))
    check_alone(python, f"{kind}_{engine}", tmp_path / "out", tmp_path / "given.npz", tmp_path)


@pytest.mark.parametrize(
    "kind, to", [("encoded", "onnx"), ("encoded", "openvino"), *((kind, "transformers") for kind in MODELS)]
)
@torch.no_grad()
def test_transformers_runs_a_compressed_model_alone(kind, to, tmp_path, python_without):
    model = build(kind)
    batch = given_to(model, "uniform" if to == "transformers" else "free", tmp_path / "given.npz")
    export(model, tmp_path / "out", to, batches=[batch])
    what = f"{kind}_transformers" if to == "transformers" else "encoded_exported"
    check_alone(python_without(), what, tmp_path / "out", tmp_path / "given.npz", tmp_path)
