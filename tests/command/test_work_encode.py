"""collab-heads encode: the array that it writes is what sentence-transformers computes."""

import json
import shutil

import commands
import numpy as np
import pytest
from later import Later
from slow_cases import slow

import tiny
from collab_heads.command import main
from collab_heads.errors import ArgumentError, DataError, OutputError, UnsupportedModelError

sentence_transformers = Later("sentence_transformers", optional=True)
EMBEDDING_NOISE = 1e-5  # of embeddings of length 1, in float32; seen: 3e-7
LINES = ["", *(row["sentence1"] for row in tiny.rows(9, 1)), "the film " * 90, ""]


@pytest.fixture(scope="module")
def encoder(bert, tmp_path_factory):
    return tiny.write_modules(shutil.copytree(bert, tmp_path_factory.mktemp("encoder") / "encoder"))


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(LINES) + "\n")
    return tmp_path / "text.txt"


@pytest.mark.parametrize("to", (None, *slow("onnx", "openvino", "ctranslate2")))
def test_each_line_is_a_row(to, encoder, texts, tmp_path, capsys):
    model = encoder
    if to is not None:
        pytest.importorskip("transformers.exporters.runners")
        commands.run("export", encoder, "--to", to, "--output_dir", model := tmp_path / "served")
    found = commands.run("encode", model, texts, "--output", tmp_path / "out.npy", "--batch_size", 4)
    assert found == {"texts": len(LINES), "width": 32, "output": str(tmp_path / "out.npy")}
    assert f"{len(LINES)} embeddings of 32 numbers: {tmp_path / 'out.npy'}" in capsys.readouterr().out
    expected = sentence_transformers.SentenceTransformer(str(encoder), device="cpu").encode(LINES)
    written = np.load(tmp_path / "out.npy")
    assert written.dtype == np.float32
    np.testing.assert_allclose(written, expected, rtol=0, atol=EMBEDDING_NOISE)


def test_prompts_and_json(encoder, texts, tmp_path, capsys):
    source = shutil.copytree(encoder, tmp_path / "prompts")
    said = {"prompts": {"query": "the film "}}
    (source / "config_sentence_transformers.json").write_text(json.dumps(said))
    flags = ("--output", tmp_path / "out.npy", "--prompt_name", "query", "--json", "--quiet")
    assert main.main(["encode", *map(str, (source, texts, *flags))]) == 0
    assert json.loads(capsys.readouterr().out)["texts"] == len(LINES)
    expected = sentence_transformers.SentenceTransformer(str(source), device="cpu").encode(LINES, prompt_name="query")
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected, rtol=0, atol=EMBEDDING_NOISE)


def test_what_is_refused(bert, encoder, texts, tmp_path):
    (tmp_path / "old.npy").write_bytes(b"mine")
    for output in ("old.npy", "new.txt"):
        with pytest.raises(OutputError, match=r"must be a new file whose name ends in \.npy"):
            commands.parse("encode", encoder, texts, "--output", tmp_path / output)
    with pytest.raises(ArgumentError, match="--output is missing"):
        commands.parse("encode", encoder, texts)
    with pytest.raises(DataError, match="No such file"):
        commands.parse("encode", encoder, tmp_path / "none.txt", "--output", tmp_path / "out.npy")
    with pytest.raises(UnsupportedModelError, match="is no sentence encoder: it has no modules"):
        commands.run("encode", bert, texts, "--output", tmp_path / "out.npy")
    assert not (tmp_path / "out.npy").exists()


def test_a_sentence_encoder_is_exported_without_a_head(encoder, tmp_path):
    """As MPNet's are, whose config names a model with a head."""
    source = shutil.copytree(encoder, tmp_path / "masked")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"architectures": ["BertForMaskedLM"]}))
    commands.run("export", source, "--to", "transformers", "--output_dir", tmp_path / "stock")
    assert json.loads((tmp_path / "stock" / "config.json").read_text())["architectures"] == ["BertModel"]
