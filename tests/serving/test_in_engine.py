"""A model in an engine: its folder is copied, and nothing takes it for a model with weights."""

import copy
import shutil

import pytest
import torch
from tokenizers_made import fast

import collab_heads
from collab_heads import load_exported
from collab_heads.errors import ArgumentError, DataError, ModelStateError, OutputError, UnsupportedModelError
from collab_heads.serving.served_gguf import ServedGguf
from collab_heads.serving.served_model import ServedModel, served_class

pytest.importorskip("transformers.exporters.runners", reason="exports of graphs need transformers 5.23")

IDS = torch.arange(4, 20).view(8, 2)
BATCHES = [{"input_ids": IDS}]


@pytest.fixture
def served(folder):
    return load_exported(folder, threads=1)


def test_a_copy_is_what_was_loaded(served, folder, tmp_path):
    served.save_pretrained(tmp_path / "copy")
    names = sorted(path.name for path in folder.iterdir())
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == names and "README.md" in names
    assert torch.equal(load_exported(tmp_path / "copy", threads=1)(IDS).logits, served(IDS).logits)
    (tmp_path / "copy" / "README.md").write_text("mine")
    load_exported(tmp_path / "copy", threads=1)
    with (tmp_path / "copy" / "model.onnx").open("ab") as file:
        file.write(b"0")
    with pytest.raises(DataError, match=r"model\.onnx"):
        load_exported(tmp_path / "copy", threads=1)


def test_nothing_is_replaced_or_uploaded_by_a_save(served, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(OutputError, match="not empty"):
        served.save_pretrained(tmp_path)
    with pytest.raises(ArgumentError, match=r"call push_to_hub\(name\)"):
        served.save_pretrained(tmp_path / "new", push_to_hub=True)
    served.folder = None
    with pytest.raises(ModelStateError, match="loaded from no folder"):
        served.save_pretrained(tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_copy_in_memory_shares_the_engine_and_has_settings_of_its_own(served):
    copied = copy.deepcopy({"model": served})["model"]
    copied.generation_config.max_new_tokens, copied.config.name_or_path = 7, "mine"
    assert served.generation_config.max_new_tokens != 7 and served.config.name_or_path != "mine"
    copied.added = torch.nn.Linear(1, 1)
    assert not hasattr(served, "added") and copied.exported is served.exported
    assert torch.equal(copied(IDS).logits, served(IDS).logits)


@pytest.mark.parametrize("name", ("PeftModel", "SentenceTransformer", "FSDPModule"))
def test_a_folder_cannot_pass_a_model_off_as_a_wrapper(name, served):
    served.exported.components["model"].metadata.architecture = name
    assert served_class(served.exported) is ServedModel


@pytest.mark.parametrize("is_export", (False, True))
def test_of_a_file_of_llama_cpp_what_is_beside_it_is_copied_if_it_belongs_to_it(is_export, folder, tmp_path):
    source, saved = tmp_path / "downloads", tmp_path / "saved"
    shutil.copytree(folder, source) if is_export else source.mkdir()
    (source / "model.gguf").write_bytes(b"GGUF")
    (source / "else.txt").write_text("mine")
    model = ServedGguf.__new__(ServedGguf)  # no engine is needed
    vars(model).update(file=source / "model.gguf", folder=source)
    model.save_pretrained(saved)
    assert (saved / "model.gguf").read_bytes() == b"GGUF"
    assert (saved / "else.txt").exists() == (saved / "README.md").exists() == is_export


@pytest.mark.parametrize(
    "function",
    (
        lambda model: collab_heads.compress(model, BATCHES, 0.5),
        lambda model: collab_heads.swap_to_collaborative(model),
        lambda model: collab_heads.prune_heads(model, heads={}),
        lambda model: collab_heads.analyze_heads(model, BATCHES),
        lambda model: collab_heads.plan(model, BATCHES),
        lambda model: collab_heads.export(model, "again"),
        lambda model: collab_heads.trim_vocabulary(model, fast("WordPiece"), ["a"]),
        lambda model: collab_heads.get_adapter(model),
    ),
)
def test_functions_of_a_model_say_what_to_load(function, served):
    with pytest.raises(UnsupportedModelError, match="cannot change a ModelInEngine in place: load the model that was"):
        function(served)


def test_a_cache_of_another_kind_is_refused(served):
    served.caches = [(1, 2, 3)]
    with pytest.raises(ArgumentError, match="takes a DynamicCache, not a list: leave cache_implementation out"):
        served(IDS, past_key_values=[torch.zeros(1)])
