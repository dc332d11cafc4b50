"""A changed sentence encoder is saved with the modules that it came with, and its card says how it loads."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from known_heads import word_pieces
from model_runs import swap
from transformers import AutoModel, BertForMaskedLM, BertForSequenceClassification

from collab_heads import fold_heads, model_card, prune_heads, swap_to_gated
from collab_heads.saving.source_files import encoder_class
from families import FAMILIES

ROOT = Path(__file__).parents[2]
OWN = "---\nlicense: mit\nlanguage: en\npipeline_tag: sentence-similarity\n---\n\n# Tiny\n\nAbout it.\n"
LINE = '\nmodel = SentenceTransformer("{}", trust_remote_code=True)\n'
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]
POOLING = {"word_embedding_dimension": 32, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}


@pytest.fixture
def original(tmp_path):
    """A folder of sentence-transformers whose pooling is not the one that comes without modules."""
    folder = tmp_path / "original"
    FAMILIES["bert"].build().bert.save_pretrained(folder)
    word_pieces().save_pretrained(folder)
    (folder / "README.md").write_text(OWN)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(POOLING))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 24, "do_lower_case": false}')
    (folder / "modules.json").write_text(json.dumps(MODULES))
    return folder


def changed(folder, auto=AutoModel):
    model = auto.from_pretrained(folder)
    swap(model, "shared", 20)
    return model


def copied(folder):
    names = ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", "1_Pooling/config.json")
    return {name for name in names if (folder / name).is_file()}


def read(folder):
    return ModelCard.load(folder / "README.md")


def test_modules_and_card(original, tmp_path):
    changed(original).save_pretrained(tmp_path / "small")
    assert copied(tmp_path / "small") == {"modules.json", "sentence_bert_config.json", "1_Pooling/config.json"}
    assert (tmp_path / "small" / "modules.json").read_bytes() == (original / "modules.json").read_bytes()
    card = read(tmp_path / "small")
    said = card.data.to_dict()
    assert said["library_name"] == "sentence-transformers" and said["pipeline_tag"] == "sentence-similarity"
    assert (said["license"], said["language"]) == ("mit", "en")
    assert card.text.startswith("\n# Tiny, changed with collab_heads\n") and LINE.format("path/or/name") in card.text
    assert card.text.index("end -->") < card.text.index("# Tiny\n\nAbout it.")


def test_saved_again_the_original_stands_there_once(original, tmp_path):
    model = changed(original)
    for _ in range(2):
        model.save_pretrained(tmp_path / "small")
    again = AutoModel.from_pretrained(tmp_path / "small")
    again.save_pretrained(tmp_path / "again")
    assert copied(tmp_path / "again") == copied(tmp_path / "small")
    assert read(tmp_path / "again").text == read(tmp_path / "small").text
    assert read(tmp_path / "again").text.count("About it.") == 1


def test_a_stock_model_again_speaks_of_no_change(original, tmp_path):
    model = AutoModel.from_pretrained(original)
    swap_to_gated(model)
    model.save_pretrained(tmp_path / "small")
    fold_heads(model)
    model.save_pretrained(tmp_path / "small")
    assert read(tmp_path / "small").text == "\n# Tiny\n"


def test_a_classifier_made_from_an_encoder_is_none(original, tmp_path):
    changed(original, BertForSequenceClassification).save_pretrained(tmp_path / "small")
    card = read(tmp_path / "small")
    assert not copied(tmp_path / "small") and card.data.library_name == "transformers"
    assert "About it." not in card.text and "pipeline_tag" not in card.data.to_dict()


def test_the_base_of_a_folder_that_names_another_class(original, tmp_path):
    """As all-mpnet-base-v2, whose config names the model that was trained first."""
    config = json.loads((original / "config.json").read_text())
    (original / "config.json").write_text(json.dumps({**config, "architectures": ["BertForMaskedLM"]}))
    changed(original).save_pretrained(tmp_path / "small")
    assert "modules.json" in copied(tmp_path / "small")
    (original / "config.json").write_text(json.dumps({**config, "architectures": None}))
    changed(original, BertForMaskedLM).save_pretrained(tmp_path / "other")
    assert not copied(tmp_path / "other")


def test_a_public_card_says_it_before_the_model_is_saved(original):
    assert LINE.format("me/small") in model_card(changed(original), name="me/small").text
    classifier = model_card(changed(original, BertForSequenceClassification))
    assert "SentenceTransformer" not in classifier.text and "import BertForSequenceClassification" in classifier.text
    own = ModelCard("---\nlibrary_name: sentence-transformers\n---\nmine\n")
    assert LINE.format("me/small") in model_card(changed(original), name="me/small", card=own).text


@pytest.mark.parametrize("said", sorted({"SentenceTransformer", "CrossEncoder", "SparseEncoder", "Unknown"}))
def test_other_classes_load_by_their_own_name(said, original, tmp_path):
    (original / "config_sentence_transformers.json").write_text(json.dumps({"model_type": said}))
    changed(original).save_pretrained(tmp_path / "small")
    loads = "SentenceTransformer" if said == "Unknown" else said
    assert f"\nfrom sentence_transformers import {loads}\n" in read(tmp_path / "small").text
    assert encoder_class(tmp_path / "small") == loads and encoder_class(tmp_path) is None


def test_what_sentence_transformers_saves_is_left_to_it(original, tmp_path):
    """It writes its settings first, and its list of modules last."""
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config_sentence_transformers.json").write_text("{}")
    changed(original).save_pretrained(tmp_path / "small")
    assert copied(tmp_path / "small") == {"config_sentence_transformers.json"}


def test_stock_models_and_custom_code_are_saved_alone(original, tmp_path):
    AutoModel.from_pretrained(original).save_pretrained(tmp_path / "stock")
    assert not copied(tmp_path / "stock")
    (original / "modules.json").write_text(json.dumps([{**MODULES[0], "type": "custom_st.Transformer"}]))
    changed(original).save_pretrained(tmp_path / "small")
    assert not copied(tmp_path / "small") and (tmp_path / "small" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("listed", "told"),
    (
        ("[{", "modules.json: "),
        ("{}", "holds no list"),
        ('[{"path": 1}]', "holds no list"),
        ('[{"path": ".."}]', "out"),
    ),
)
def test_a_list_that_cannot_be_read_never_stops_the_weights(listed, told, original, tmp_path, warnings_logged):
    (original / "modules.json").write_text(listed)
    changed(original).save_pretrained(tmp_path / "small")
    assert (tmp_path / "small" / "model.safetensors").is_file() and not copied(tmp_path / "small")
    assert "cannot be copied" in warnings_logged.text and told in warnings_logged.text


@pytest.mark.parametrize("place", ("modules.json", "sentence_bert_config.json", "1_Pooling/a.json", "1_Pooling/more"))
def test_what_links_lead_to_is_not_copied(place, original, tmp_path, warnings_logged):
    """A folder from elsewhere may name any file of whoever saves a model that was made of it."""
    secret = tmp_path / "home" / "key"
    secret.parent.mkdir()
    secret.write_text("secret")
    (original / place).unlink(missing_ok=True)
    os.symlink(secret.parent if place.endswith("more") else secret, original / place)
    if place == "modules.json":
        secret.write_text(json.dumps(MODULES))
    changed(original).save_pretrained(tmp_path / "small")
    assert copied(tmp_path / "small") == set()
    assert f"{original / place} leads out of" in warnings_logged.text


def test_the_card_of_another_folder_is_not_published(original, tmp_path):
    (tmp_path / "diary.md").write_text("dear diary")
    (original / "README.md").unlink()
    os.symlink(tmp_path / "diary.md", original / "README.md")
    changed(original).save_pretrained(tmp_path / "small")
    assert "dear diary" not in (tmp_path / "small" / "README.md").read_text()


def test_the_links_of_the_cache_of_the_hub_are_copied(original, tmp_path):
    """Each file of a snapshot is one, to a blob of the same repository."""
    repository = tmp_path / "cache" / "models--owner--name"
    snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
    blobs.mkdir(parents=True)
    for number, file in enumerate(sorted(path for path in original.rglob("*") if path.is_file())):
        link = snapshot / file.relative_to(original)
        link.parent.mkdir(parents=True, exist_ok=True)
        file.rename(blobs / str(number))
        os.symlink(os.path.relpath(blobs / str(number), link.parent), link)
    changed(snapshot).save_pretrained(tmp_path / "small")
    assert copied(tmp_path / "small") == {"modules.json", "sentence_bert_config.json", "1_Pooling/config.json"}
    assert (tmp_path / "small" / "tokenizer_config.json").is_file()
    assert "About it." in (tmp_path / "small" / "README.md").read_text()
    assert not any(path.is_symlink() for path in (tmp_path / "small").rglob("*"))
    blobs.rename(tmp_path / "home")
    os.symlink(tmp_path / "home", blobs)  # a crafted repository
    changed(snapshot).save_pretrained(tmp_path / "other")
    assert copied(tmp_path / "other") == set()
    assert not (tmp_path / "other" / "tokenizer_config.json").exists()


@pytest.mark.slow
def test_the_code_of_its_card_loads_it_without_the_import(original, tmp_path):
    """In sentence-transformers, with the pooling and the length of the original."""
    pytest.importorskip("sentence_transformers")
    model = changed(original)
    prune_heads(model, heads={"encoder.layer.0.attention.self": [1]})
    model.save_pretrained(tmp_path / "small")
    code = read(tmp_path / "small").text.split("```python\n")[1].split("```")[0]
    program = f"""
import sys
{code.replace("path/or/name", str(tmp_path / "small"))}
assert "Collaborative" in type(model[0].auto_model.encoder.layer[0].attention.self).__name__, model
assert model.max_seq_length == 24
print(*model.encode("she can chase").tolist())
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = torch.tensor([float(number) for number in done.stdout.split("\n")[-2].split()])
    with torch.no_grad():
        first = model.eval()(**word_pieces()("she can chase", return_tensors="pt")).last_hidden_state[0, 0]
    torch.testing.assert_close(found, first / first.norm(), rtol=0, atol=1e-5)


def test_a_transformer_in_a_folder_of_its_own_brings_no_list_of_modules(original, tmp_path):
    """As old folders have it: the list would lead to the original, which would be copied with it."""
    listed = [MODULES[0] | {"path": "0_Transformer"}, MODULES[1]]
    (original / "modules.json").write_text(json.dumps(listed))
    shutil.copytree(original, tmp_path / "inner")
    (tmp_path / "inner").rename(original / "0_Transformer")
    changed(original).save_pretrained(tmp_path / "small")
    assert not copied(tmp_path / "small") and not (tmp_path / "small/0_Transformer").exists()


@pytest.mark.parametrize("path", [".", "1_Pooling/..", "1_Pooling\0"])
def test_a_list_of_modules_that_names_the_whole_folder_or_no_path(path, original, tmp_path, caplog):
    (original / "private.txt").write_text("x")
    (original / "modules.json").write_text(json.dumps([*MODULES, {"path": path}]))
    changed(original).save_pretrained(tmp_path / "small")
    assert (tmp_path / "small/model.safetensors").is_file() and not (tmp_path / "small/private.txt").exists()
    assert ("cannot be copied" in caplog.text) == ("\0" in path)


def test_pickles_and_code_of_modules_are_left_out(original, tmp_path, caplog):
    (original / "2_Dense").mkdir()
    for name in ("config.json", "model.safetensors", "pytorch_model.bin", "module.py"):
        (original / "2_Dense" / name).write_text("{}")
    listed = [*MODULES[:2], {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}]
    (original / "modules.json").write_text(json.dumps(listed))
    changed(original).save_pretrained(tmp_path / "small")
    there = {file.name for file in (tmp_path / "small/2_Dense").iterdir()}
    assert there == {"config.json", "model.safetensors"}
    assert "2_Dense/module.py, 2_Dense/pytorch_model.bin: pickles and code are not copied" in caplog.text
