"""collab-heads generate: the lines that it writes are what the model generates."""

import commands
import pytest
import torch
import translation_script
from model_configs import rotary_config
from slow_cases import slow
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, MarianMTModel

import tiny
from collab_heads.errors import ArgumentError, OutputError, UnsupportedModelError


@pytest.fixture
def lines(marian, tmp_path):
    """Sentences of different lengths, and an empty line."""
    file, _ = translation_script.write_pairs(tmp_path, "dev", 7, 5)
    read = (tmp_path / file).read_text().splitlines()
    (tmp_path / "text.txt").write_text("\n".join([read[0], "", *read[1:]]) + "\n")
    return [read[0], "", *read[1:]], tmp_path / "text.txt"


@pytest.mark.parametrize("to", (None, *slow("onnx", "ctranslate2")))
def test_translations(marian, lines, tmp_path, capsys, to):
    source, (texts, file) = marian, lines
    if to is not None:
        pytest.importorskip("transformers.exporters.runners")
        commands.run("export", marian, "--to", to, "--output_dir", source := tmp_path / "served")
    out = tmp_path / "out.txt"
    assert commands.run("generate", source, file, "--output", out, "--batch_size", 3)["texts"] == len(texts)
    assert f"{len(texts)} texts: {out}" in capsys.readouterr().out
    model, tokenizer = MarianMTModel.from_pretrained(marian).eval(), AutoTokenizer.from_pretrained(marian)
    for text, written in zip(texts, out.read_text().split("\n")[:-1], strict=True):
        if not text:
            assert not written
            continue
        batch = tokenizer(text, return_tensors="pt")
        most = min(1 + 2 * batch["input_ids"].shape[1] + 8, model.config.max_position_embeddings)
        ids = model.generate(**batch, do_sample=False, max_length=most)
        assert written == " ".join(tokenizer.decode(ids[0], skip_special_tokens=True).splitlines())


def test_continuations(bert, lines, tmp_path):
    torch.manual_seed(0)
    model, tokenizer = LlamaForCausalLM(rotary_config(LlamaConfig)).eval(), AutoTokenizer.from_pretrained(bert)
    model.save_pretrained(tmp_path / "decoder")
    tokenizer.save_pretrained(tmp_path / "decoder")
    texts, file = [tiny.rows(2, 1)[0]["sentence1"], ""], tmp_path / "two.txt"
    file.write_text("\n".join(texts) + "\n")
    flags = "--max_new_tokens", 5, "--source_prefix", "w1 "
    commands.run("generate", tmp_path / "decoder", file, "--output", tmp_path / "out.txt", *flags)
    written = (tmp_path / "out.txt").read_text().split("\n")[:-1]
    ids = tokenizer(f"w1 {texts[0]}", return_tensors="pt")["input_ids"]
    found = model.generate(ids, do_sample=False, max_new_tokens=5)[0, ids.shape[1] :]
    assert written == [tokenizer.decode(found, skip_special_tokens=True), ""] and written[0]


def test_what_is_refused(bert, marian, lines, tmp_path):
    (tmp_path / "old.txt").write_text("mine")
    with pytest.raises(OutputError, match="must be a new file"):
        commands.run("generate", marian, lines[1], "--output", tmp_path / "old.txt")
    with pytest.raises(ArgumentError, match="--output is missing"):
        commands.run("generate", marian, lines[1])
    with pytest.raises(UnsupportedModelError, match="generates no text"):
        commands.run("generate", bert, lines[1], "--output", tmp_path / "out.txt")
    assert (tmp_path / "old.txt").read_text() == "mine" and not (tmp_path / "out.txt").exists()
