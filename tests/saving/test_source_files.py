"""A changed model is saved with the tokenizer that it came with; whoever saves one afterwards has the last word."""

import copy
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from known_heads import word_pieces
from model_runs import swap
from transformers import AutoModel, AutoTokenizer, BertForSequenceClassification
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

from collab_heads import fold_heads, prune_heads
from collab_heads.saving.marks import FOLDER
from collab_heads.saving.source_files import PATTERNS, files_in, source_of, take_back
from families import FAMILIES

TEXT = "she can chase"


@pytest.fixture
def original(tmp_path):
    """A folder with a model and its tokenizer."""
    FAMILIES["bert"].build().save_pretrained(tmp_path / "original")
    word_pieces().save_pretrained(tmp_path / "original")
    return tmp_path / "original"


@pytest.fixture
def model(original):
    model = BertForSequenceClassification.from_pretrained(original)
    swap(model, "shared", 20)
    return model


def names(folder):
    return {file.name for file in files_in(folder)}


def ids(folder):
    return AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]


def test_the_tokenizer_comes_along(model, original, tmp_path, caplog):
    model.save_pretrained(tmp_path / "small")
    assert names(tmp_path / "small") == names(original) and names(original)
    assert ids(tmp_path / "small") == ids(original) and len(set(ids(original))) > 3
    again = AutoModel.from_pretrained(tmp_path / "small")
    again.save_pretrained(tmp_path / "again")
    assert ids(tmp_path / "again") == ids(original)
    assert not [record for record in caplog.records if record.name.startswith("collab_heads")]


def test_a_folder_with_a_tokenizer_keeps_it(model, original, tmp_path):
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "tokenizer_config.json").write_text("{}")
    model.save_pretrained(tmp_path / "small")
    assert names(tmp_path / "small") == {"tokenizer_config.json"}
    assert (tmp_path / "small" / "tokenizer_config.json").read_text() == "{}"


def test_a_tokenizer_that_is_saved_later_replaces_all(model, original, tmp_path):
    (original / "special_tokens_map.json").write_text('{"pad_token": "[MASK]"}')
    (original / "added_tokens.json").write_text("{}")
    model.save_pretrained(tmp_path / "small")
    assert "added_tokens.json" in names(tmp_path / "small")
    tokenizer = word_pieces()
    tokenizer.save_pretrained(tmp_path / "small")
    tokenizer.save_pretrained(tmp_path / "alone")
    assert names(tmp_path / "small") == names(tmp_path / "alone")
    for file in files_in(tmp_path / "alone"):
        assert (tmp_path / "small" / file.name).read_bytes() == file.read_bytes()


def test_only_what_is_as_it_came_is_taken_back(model, tmp_path):
    model.save_pretrained(tmp_path / "small")
    (tmp_path / "small" / "tokenizer_config.json").write_text('{"mine": 1}')
    take_back(model.config, tmp_path / "small")
    assert names(tmp_path / "small") == {"tokenizer_config.json"}


def test_stock_models_and_models_from_nowhere_are_saved_alone(model, original, tmp_path):
    stock = BertForSequenceClassification.from_pretrained(original)
    stock.save_pretrained(tmp_path / "stock")
    prune_heads(stock, heads={"enc-self": [[0], [1]]})
    fold_heads(stock)
    stock.save_pretrained(tmp_path / "folded")
    new = FAMILIES["bert"].build()
    swap(new, "shared", 20)
    new.save_pretrained(tmp_path / "new")
    model.save_pretrained(tmp_path / "second", is_main_process=False)
    assert not any(names(tmp_path / folder) for folder in ("stock", "folded", "new", "second"))


def test_files_of_others_stay_beside_a_stock_model(original, tmp_path):
    BertForSequenceClassification.from_pretrained(original).save_pretrained(tmp_path / "stock")
    (tmp_path / "stock" / "vocab.txt").write_text("mine")
    word_pieces().save_pretrained(tmp_path / "stock")
    assert (tmp_path / "stock" / "vocab.txt").read_text() == "mine"


def test_a_target_vocabulary_comes_along(model, original, tmp_path):
    (original / "tokenizer.json").unlink()
    for name in ("vocab.json", "target_vocab.json", "source.spm"):
        (original / name).write_text("{}")
    model.save_pretrained(tmp_path / "small")
    assert names(tmp_path / "small") == names(original) >= {"target_vocab.json"}


def test_code_is_not_copied(model, original, tmp_path):
    (original / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["tokens.Tokens", null]}}')
    model.save_pretrained(tmp_path / "small")
    assert not names(tmp_path / "small")


def test_what_links_lead_to_is_not_copied(model, original, tmp_path, caplog):
    (tmp_path / "key").write_text("secret")
    os.symlink(tmp_path / "key", original / "vocab.other")
    model.save_pretrained(tmp_path / "small")
    assert names(tmp_path / "small") == set()
    assert f"{original / 'vocab.other'} leads out of {original}" in caplog.text


def test_nobody_uploads_them_with_the_model(model, tmp_path, monkeypatch):
    seen = []

    def upload(self, working_dir, *args, **kwargs):
        seen.append(names(tmp_path / working_dir))

    from collab_heads.saving import saving

    model.save_pretrained(tmp_path / "small")
    saving.upload(upload, model, tmp_path / "small", "owner/name")
    assert seen == [set()]


def test_trainer_saves_its_own(model, original, tmp_path, caplog):
    tokenizer = word_pieces()
    tokenizer.add_tokens(["zzz"])
    settings = transformers.TrainingArguments(
        str(tmp_path / "out"), max_steps=1, save_steps=1, report_to="none", use_cpu=True
    )
    rows = [{"input_ids": [2, 3, 4], "labels": 0}, {"input_ids": [2, 3, 5], "labels": 1}]
    transformers.Trainer(model, settings, train_dataset=rows, processing_class=tokenizer).train()
    assert "zzz" in AutoTokenizer.from_pretrained(tmp_path / "out" / "checkpoint-1").get_vocab()
    assert not [record for record in caplog.records if "tokenizer" in record.getMessage()]


def test_where_a_model_came_from(model, original, tmp_path, monkeypatch):
    assert source_of(model.config) == original
    for name in ("", "no/such/name/at all", "owner/never-loaded"):
        model.config._name_or_path = name
        assert source_of(model.config) is None
    snapshot = tmp_path / "cache" / "models--owner--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    model.config._name_or_path, model.config._commit_hash = "owner/name", "abc"
    assert source_of(model.config) == snapshot


@pytest.mark.slow
def test_sentence_transformers_tells_sentences_apart(tmp_path, original):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    model = BertForSequenceClassification.from_pretrained(original).bert
    model.config._name_or_path = str(original)
    swap(model, "shared", 20)
    model.save_pretrained(tmp_path / "small")
    embedder = sentence_transformers.SentenceTransformer(str(tmp_path / "small"), device="cpu")
    first, second = embedder.encode(["she can chase", "the old dog"], convert_to_tensor=True)
    assert not torch.equal(first, second)


def test_a_model_from_a_subfolder_brings_the_tokenizer_from_there(original, tmp_path):
    """The root has another one, of as many tokens."""
    inner = shutil.copytree(original, original / "inner")
    tokenizer = json.loads((inner / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["she"], vocabulary["can"] = vocabulary["can"], vocabulary["she"]
    (inner / "tokenizer.json").write_text(json.dumps(tokenizer))
    model = BertForSequenceClassification.from_pretrained(original, subfolder="inner")
    swap(model, "shared", 20)
    model.save_pretrained(tmp_path / "small")
    copy.deepcopy(model).save_pretrained(tmp_path / "copied")
    assert ids(tmp_path / "small") == ids(tmp_path / "copied") == ids(inner) != ids(original)
    assert FOLDER not in (tmp_path / "small/config.json").read_text()
    assert not hasattr(BertForSequenceClassification.from_pretrained(tmp_path / "small").config, FOLDER)


def test_files_whose_names_no_other_tokenizer_has_come_along(model, original, tmp_path):
    """PhoBERT's, BARTpho's, Whisper's and FSMT's, and further chat templates."""
    special = {"bpe.codes", "dict.txt", "normalizer.json", "vocab-src.json", "additional_chat_templates/tools.jinja"}
    (original / "additional_chat_templates").mkdir()
    for name in special:
        (original / name).write_text("{}")
    model.save_pretrained(tmp_path / "small")
    assert all((tmp_path / "small" / name).is_file() for name in special)
    word_pieces().save_pretrained(tmp_path / "small")
    assert not (tmp_path / "small/additional_chat_templates/tools.jinja").exists()  # it would be read, too
    take_back(model.config, tmp_path / "small")
    assert not (tmp_path / "small/bpe.codes").exists()


def test_every_tokenizer_of_transformers_has_its_files_copied():
    """But a few of models that no adapter reads."""
    others = {"emoji.json", "entity_vocab.json", "byte_maps.json", "prophetnet.tokenizer"}
    others |= {"word_shape.json", "word_pronunciation.json"}
    classes = filter(None, map(tokenizer_class_from_name, {*map(str, TOKENIZER_MAPPING_NAMES.values())}))
    found = {name for each in classes for name in getattr(each, "vocab_files_names", {}).values()}
    assert len(found) > 10
    for name in found - others:
        assert any(Path(name).match(pattern) for pattern in PATTERNS), name


def test_a_stock_model_saved_over_a_changed_one_beside_its_tokenizer_warns(model, original, tmp_path, caplog):
    model.save_pretrained(tmp_path / "small")
    BertForSequenceClassification.from_pretrained(original).save_pretrained(tmp_path / "small")
    assert "tokenizer" not in caplog.text  # it is its own
    model.save_pretrained(tmp_path / "small")
    FAMILIES["bert"].build().save_pretrained(tmp_path / "small")
    assert "is that of the model which was saved there before: save the tokenizer of this one" in caplog.text


def test_a_link_in_place_of_a_partial_file_is_not_followed(model, tmp_path, caplog):
    (tmp_path / "small").mkdir()
    (tmp_path / "mine.txt").write_text("mine")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / f"small/{name}.partial").symlink_to(tmp_path / "mine.txt")
    model.save_pretrained(tmp_path / "small")
    assert (tmp_path / "mine.txt").read_text() == "mine" and "cannot be copied" in caplog.text
    assert BertForSequenceClassification.from_pretrained(tmp_path / "small").num_parameters() == model.num_parameters()
