"""Exports for llama.cpp are called as their originals, and scored beside them; files of others are checked."""

import shutil

import pytest
import torch
from gguf_models import ENGINE_NOISE, ROUNDED, bert, in_folder, llama_for, on_grids, runs, texts, word_pieces
from tokenizers_made import TEXTS, fast
from transformers import AutoTokenizer

from collab_heads import ServedGguf, evaluate, export, load_exported
from collab_heads.base.extras import MissingPackageError
from collab_heads.command.main import main
from collab_heads.errors import ArgumentError, DataError, LoadError, ModelStateError, UnsupportedModelError
from collab_heads.evaluation.candidates import megabytes
from collab_heads.files.folders import GGUF
from collab_heads.serving import served_gguf

pytest.importorskip("gguf", reason="pip install gguf")
GELU_NOISE = 5e-3  # see test_for_gguf_even


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """A Llama on a grid of four bits, and what was exported of it."""
    pytest.importorskip("llama_cpp")
    folder, tokenizer = tmp_path_factory.mktemp("decoder"), fast("byte-level BPE")
    model = llama_for(tokenizer)
    export(model, folder / "served", to="gguf", tokenizer=tokenizer)
    export(on_grids(model, 4), folder / "packed", to="gguf", tokenizer=tokenizer)
    return folder, tokenizer


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A BERT that puts out states, and what was exported of it."""
    pytest.importorskip("llama_cpp")
    folder = tmp_path_factory.mktemp("encoder") / "served"
    model, tokenizer = bert(), word_pieces()
    export(model, folder, to="gguf", tokenizer=tokenizer, batches=[texts()])
    return folder, model, tokenizer


def padded():
    """Rows of other lengths, one of them padded on the left."""
    batch = texts()
    batch["attention_mask"][1, 5:] = batch["attention_mask"][2, :4] = 0
    return batch


@runs
@torch.no_grad()
def test_logits_are_those_of_the_original(decoder):
    folder, tokenizer = decoder
    model, batch = llama_for(tokenizer), padded()
    served = load_exported(folder / "served", threads=1)
    assert isinstance(served, ServedGguf) and served.can_generate() and served.config.is_decoder
    counts = batch["attention_mask"].bool()
    positions = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    expected, found = model(**batch, position_ids=positions).logits, served(**batch).logits
    assert found.shape == expected.shape and not found[~counts].any()
    difference = (found - expected)[counts].abs().max() / expected.abs().max()
    assert difference < ENGINE_NOISE
    long = torch.randint(5, 60, (1, 300))  # more than there is room for before
    difference = (served(long).logits - model(long).logits).abs().max() / expected.abs().max()
    assert difference < ENGINE_NOISE and served.room > 300


@runs
@torch.no_grad()
def test_it_generates_as_the_original_does(decoder, tmp_path):
    """Greedily and with beams, rows of other lengths; what the engine has read is not read again."""
    folder, tokenizer = decoder
    model, served = llama_for(tokenizer), load_exported(folder / "served", threads=1)
    batch = texts()
    batch["attention_mask"][1, :5] = batch["attention_mask"][2, :1] = 0
    for count, beams in ((12, 1), (12, 3), (260, 1)):  # the last has no room in the first cache
        options = {"do_sample": False, "num_beams": beams, "min_new_tokens": count, "max_new_tokens": count}
        expected, found = (each.generate(**batch, **options) for each in (model, served))
        assert torch.equal(found, expected)
    read = []
    engine = served.continues
    served.continues.read = lambda rows, places: read.extend(places) or type(engine).read(engine, rows, places)
    served.generate(**batch, do_sample=False, min_new_tokens=5, max_new_tokens=5)
    assert len(read) <= int(batch["attention_mask"].sum()) + 4 * len(batch["input_ids"])
    (tmp_path / "text.txt").write_text("ab\nabba b\n")
    for name in ("served", f"served/{GGUF}"):
        out = tmp_path / "out.txt"
        main(
            ["generate", str(folder / name), str(tmp_path / "text.txt"), "--output", str(out), "--max_new_tokens", "8"]
        )
        first = tokenizer("ab", return_tensors="pt")
        new = model.generate(**first, do_sample=False, max_new_tokens=8)[0, first["input_ids"].shape[1] :]
        assert out.read_text().splitlines()[0] == " ".join(tokenizer.decode(new, skip_special_tokens=True).splitlines())
        out.unlink()
    with pytest.raises(ArgumentError, match=r"257 texts: llama\.cpp continues 256 at a time"):
        served(torch.ones(257, 2, dtype=torch.long), logits_to_keep=1)


@runs
def test_a_language_model_is_scored_beside_its_original(decoder, tmp_path):
    """Perplexity is that of PyTorch on the same grid, but for what the engine rounds."""
    folder, tokenizer = decoder
    original, on_grid = llama_for(tokenizer), on_grids(llama_for(tokenizer), 4)
    models = {"grid": on_grid, "served": folder / "served", "packed": folder / "packed" / GGUF}
    data = [{"text": text} for text in TEXTS[:130]]
    report = evaluate(original, models, task="perplexity", data=data, tokenizer=tokenizer)
    first, grid, served, packed = (each.scores["perplexity"] for each in report.models)
    assert served == pytest.approx(first, rel=1e-4) and report.models[2].flips < 0.01
    assert packed == pytest.approx(grid, rel=ROUNDED) and abs(packed - grid) < abs(packed - first)
    size = (folder / "packed" / GGUF).stat().st_size / 1e6
    assert report.models[3].megabytes == pytest.approx(size) == pytest.approx(megabytes(None, str(folder / "packed")))
    with pytest.raises(UnsupportedModelError, match="ServedGguf puts out no last_hidden_state"):
        evaluate(folder / "served", folder / "served", task="retrieval", data=[{"query": "ab", "passage": "cd"}] * 4)
    with pytest.raises(UnsupportedModelError, match="ServedGguf does not translate"):
        evaluate(folder / "served", folder / "served", task="translation", data=[{"source": "a", "target": "b"}] * 4)


@runs
def test_an_encoder_is_scored_by_its_states(encoder):
    folder, model, tokenizer = encoder
    batch = padded()
    with torch.no_grad():
        positions = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        expected = model(**batch, position_ids=positions).last_hidden_state
    served, counts = load_exported(folder), batch["attention_mask"].bool()
    found = served(**batch, token_type_ids=torch.zeros_like(batch["input_ids"])).last_hidden_state
    assert (found - expected)[counts].abs().max() / expected.abs().max() < GELU_NOISE
    words = ["ab", "a b", "b a.", "e", "ab a", "abb", "a", "b"]
    data = [{"sentence1": a, "sentence2": b, "score": i * k} for i, a in enumerate(words) for k, b in enumerate(words)]
    report = evaluate(model, folder, task="similarity", data=data, tokenizer=tokenizer)
    before, after = (each.scores["Spearman"] for each in report.models)
    assert after == pytest.approx(before, abs=1)
    with pytest.raises(UnsupportedModelError, match="ServedGguf is no language model"):
        evaluate(folder, folder, task="perplexity", data=[{"text": "ab"}])
    with pytest.raises(ModelStateError, match="puts out no sentence_embedding"):
        served.encode(["ab"])


@runs
@pytest.mark.slow
@pytest.mark.parametrize("normalizes", (True, False))
def test_embeddings_are_those_of_sentence_transformers(normalizes, tmp_path):
    import numpy as np
    from sentence_transformers import SentenceTransformer

    more = [lambda modules: modules.Normalize()] * normalizes
    model = in_folder(tmp_path, "mean", *more)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "encoder")
    export(model, tmp_path / "served", to="gguf", tokenizer=tokenizer, batches=[texts()])
    given = ["Abba a.b", "b", "a b " * 30, ""]  # the third is longer than the 12 tokens that it reads
    expected = SentenceTransformer(str(tmp_path / "encoder"), device="cpu").encode(given)
    found = load_exported(tmp_path / "served").encode(given, batch_size=3)
    assert abs(found - expected).max() / abs(expected).max() < GELU_NOISE
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5) == normalizes
    (tmp_path / "text.txt").write_text("Abba a.b\nb\n")
    main(["encode", str(tmp_path / "served"), str(tmp_path / "text.txt"), "--output", str(tmp_path / "found.npy")])
    assert np.allclose(np.load(tmp_path / "found.npy"), found[:2], atol=1e-6)


@runs
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": torch.tensor([[1, 1 << 20]])}, "input_ids hold 1048576: the model has"),
        ({"input_ids": torch.tensor([[1, -1]])}, "input_ids hold -1: the model has"),
        ({"input_ids": torch.ones(1, 4000, dtype=torch.long)}, "a text of 4000 tokens: the model reads 2048 at most"),
        ({"input_ids": torch.tensor([[1, 2]]), "token_type_ids": torch.tensor([[0, 1]])}, "token_type_ids is not 0"),
        (
            {"input_ids": torch.ones(2, 3, dtype=torch.long), "attention_mask": torch.tensor([[1] * 3, [0] * 3])},
            "no tok",
        ),
    ],
)
def test_inputs_that_it_does_not_read_are_refused(inputs, message, decoder):
    with pytest.raises(ArgumentError, match=message):
        load_exported(decoder[0] / "served")(**inputs)


@runs
def test_an_engine_that_has_no_memory_for_a_long_text_is_not_given_it_later(decoder, monkeypatch):
    served, long = load_exported(decoder[0] / "served", threads=1), torch.ones(1, 300, dtype=torch.long)
    for name, call in (("Predicts", {}), ("Continues", {"logits_to_keep": 1})):
        with monkeypatch.context() as patched, pytest.raises(ModelStateError, match=r"on room for .*: no memory"):
            patched.setattr(served_gguf, name, lambda *_: exec("raise ValueError('no memory')"))
            served(long, **call)
    assert served(long).logits.shape[1] == 300


@runs
def test_a_folder_is_checked_before_the_engine_reads_it(decoder, tmp_path, monkeypatch):
    folder = shutil.copytree(decoder[0] / "served", tmp_path / "changed")
    content = (folder / GGUF).read_bytes()
    (folder / GGUF).write_bytes(content.replace(b"llama.block_count", b"llama.block_COUNT"))
    with pytest.raises(DataError, match=r"changed is damaged: model\.gguf is not what was written"):
        load_exported(folder)
    monkeypatch.setattr(served_gguf, "Predicts", None)  # it is not asked
    with pytest.raises(DataError, match=r"model\.gguf is damaged, .*'llama\.block_COUNT'"):
        load_exported(folder, check=False)
    other = shutil.copytree(decoder[0] / "served", tmp_path / "other")
    shutil.copy(other / GGUF, other / "other.gguf")
    with pytest.raises(DataError, match=r"manifest\.json does not list other\.gguf"):
        load_exported(other / "other.gguf")
    (folder / GGUF).unlink()
    (folder / GGUF).symlink_to(decoder[0] / "served" / GGUF)
    with pytest.raises(DataError, match="leads out of the folder"):
        load_exported(folder, check=False)


@runs
def test_settings_of_generate_are_checked_before_the_engine_reads_the_file(decoder, tmp_path):
    folder = shutil.copytree(decoder[0] / "served", tmp_path / "changed")
    for content, said in (
        ('{"temperature": "hot"}', "temperature is 'hot'"),
        ('{"eos_token_id": "x"}', "eos_token_id"),
    ):
        (folder / "generation_config.json").write_text(content)
        with pytest.raises(DataError, match=rf"generation_config\.json is damaged, .*{said}"):
            load_exported(folder, check=False)


@runs
def test_what_the_engine_cannot_load_is_an_error(decoder, tmp_path):
    content = (decoder[0] / "served" / GGUF).read_bytes()
    (tmp_path / GGUF).write_bytes(content[:-100_000])
    with pytest.raises(DataError, match=r"model\.gguf is damaged, or was changed by hand"):
        load_exported(tmp_path)


def test_without_llama_cpp_it_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / GGUF).write_bytes(b"GGUF")
    monkeypatch.setattr("collab_heads.base.extras.is_installed", lambda module: module != "llama_cpp")
    with pytest.raises(MissingPackageError, match=r"models in llama\.cpp need llama-cpp-python: pip install"):
        load_exported(tmp_path)


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        load_exported(tmp_path / GGUF)
    with pytest.raises(LoadError, match=r"none\.gguf"):
        evaluate(tmp_path / "none.gguf", tmp_path / "none.gguf", task="perplexity", data=[{"text": "a b"}])
