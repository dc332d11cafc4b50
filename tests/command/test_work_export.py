"""collab-heads export: what is missing is said before the model is loaded."""

import sys

import commands
import pytest

from collab_heads.base.extras import MissingPackageError
from collab_heads.command import serving
from collab_heads.errors import ArgumentError


@pytest.mark.parametrize(
    "flags, module, error, message",
    [
        (("--to", "onnx"), "onnxruntime", MissingPackageError, "exports to onnx need onnxruntime: pip install"),
        (("--to", "openvino"), "openvino", MissingPackageError, "exports to openvino need openvino: pip install"),
        (("--to", "ctranslate2"), "ctranslate2", MissingPackageError, "need ctranslate2: pip install"),
        (("--to", "gguf"), "llama_cpp", MissingPackageError, "exports to gguf need .*llama-cpp-python: pip install"),
        (("--to", "transformers", "--int8"), "none", ArgumentError, "transformers takes no weights of eight bits"),
        (
            ("--to", "onnx", "--per_layer"),
            "none",
            ArgumentError,
            "--per_layer: only --to transformers has configs of lay",
        ),
    ],
)
def test_what_is_missing_is_said_before_a_model_is_loaded(flags, module, error, message, bert, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(serving, "load", lambda args: pytest.fail("it is loaded"))
    with pytest.raises(error, match=message):
        commands.run("export", bert, *flags, "--output_dir", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_layers_with_sizes_of_their_own(bert, tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr(serving, "export", lambda model, folder, to, **options: seen.update(options, to=to))
    commands.run("export", bert, "--to", "transformers", "--per_layer", "--output_dir", tmp_path / "out")
    assert seen["per_layer"] and not seen["int8"] and seen["to"] == "transformers"


def test_an_export_is_that_of_the_library(bert, tmp_path, capsys):
    report = commands.run("export", bert, "--to", "transformers", "--output_dir", tmp_path / "out")
    assert report.difference == 0 and str(report) in capsys.readouterr().out
    assert {"model.safetensors", "tokenizer.json"} <= {file.name for file in (tmp_path / "out").iterdir()}
