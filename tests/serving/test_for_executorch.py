"""The target ExecuTorch: planned sizes, more rows than planned, what is checked of a program before it is loaded."""

import json

import pytest
import torch
from compressing import batches_of
from opening import layers_of
from served_outputs import assert_same_outputs, text_batch
from torch.utils import _pytree as pytree
from transformers import AutoModel, AutoTokenizer
from transformers.modeling_outputs import BaseModelOutputWithPooling

import tiny
from collab_heads import compress, export, load_exported, prune_heads, prune_neurons
from collab_heads.errors import ArgumentError, DataError
from collab_heads.fitting.weight_grid import nearest_on_grid
from collab_heads.layers.weight_grid import WEIGHT_BITS, GridWeights
from collab_heads.saving.card import NAME
from collab_heads.serving import grids_in_executorch
from collab_heads.serving.for_executorch import sizes
from collab_heads.serving.graph_engines import ENGINES
from collab_heads.serving.graph_interface import input_names, input_tree, output_paths
from collab_heads.serving.served_model import joined, largest_number_of_rows
from families import FAMILIES

MARK = b"ET12eh00"


def test_memory_is_planned_for_what_a_model_reads():
    model = FAMILIES["bert"].build()
    found = sizes(model, {"input_ids": torch.ones(3, 9), "attention_mask": torch.ones(3, 9), "flag": True})
    most = {name: {axis: dim.max for axis, dim in (axes or {}).items()} for name, axes in found.items()}
    read = model.config.max_position_embeddings
    assert most == {"input_ids": {0: 3, 1: read}, "attention_mask": {0: 3, 1: read}, "flag": {}}
    images = sizes(FAMILIES["vit"].build(), {"pixel_values": torch.ones(2, 3, 8, 8)})
    assert {axis: (dim.min, dim.max) for axis, dim in images["pixel_values"].items()} == {0: (1, 2)}


@pytest.mark.parametrize(
    "content, said",
    (
        (b"", "the mark"),
        (b"\0\0\0\0TFL3" + bytes(60), "the mark"),
        (bytes(4) + MARK + bytes(12) + (100).to_bytes(8, "little") + (50).to_bytes(8, "little"), "the graph reads 150"),
    ),
)
def test_files_that_are_no_whole_program(content, said, tmp_path):
    file = tmp_path / "model.pte"
    file.write_bytes(content)
    with pytest.raises((DataError, ValueError), match=said):
        ENGINES["executorch"].check(file, set())
    file.unlink()
    with pytest.raises(DataError, match="no such file"):
        ENGINES["executorch"].check(file, set())


def test_descriptions_are_those_of_torch():
    output = BaseModelOutputWithPooling(last_hidden_state=1, pooler_output=2, hidden_states=(3, 4))
    described = pytree.treespec_dumps(pytree.tree_structure(output))
    assert output_paths(described) == ["last_hidden_state", "pooler_output", "hidden_states.0", "hidden_states.1"]
    made = input_tree(["a", "b"])
    assert input_names(made) == ["a", "b"]
    assert pytree.treespec_loads(made) == pytree.tree_structure(((), {"a": 1, "b": 2}))
    with pytest.raises(ValueError, match="the type of an output"):
        output_paths(described.replace("transformers.modeling_outputs.BaseModelOutputWithPooling", "os.path.join"))


def test_more_rows_than_planned_are_run_in_portions():
    inputs, limits = (
        {"input_ids": torch.ones(5, 7), "other": torch.ones(5, 2)},
        {"input_ids": (2, 9), "unknown": (1, 1)},
    )
    assert largest_number_of_rows(inputs, limits) == 2
    assert largest_number_of_rows(inputs, {"input_ids": (5, 7)}) is None and largest_number_of_rows(inputs, {}) is None
    with pytest.raises(ArgumentError, match=r"input_ids of shape \[5, 7\]: the graph takes rows of \[6\] at most"):
        largest_number_of_rows(inputs, {"input_ids": (2, 6)})
    both = {"input_ids": torch.ones(3, 7), "pixel_values": torch.ones(3, 2)}
    with pytest.raises(ArgumentError, match="takes 2 rows at a time, and compares rows of input_ids and pixel_values"):
        largest_number_of_rows(both, {"input_ids": (2, 9), "pixel_values": (2, 2)})
    parts = [{"a": torch.full((rows, 2), float(rows)), "b": (torch.zeros(rows),)} for rows in (2, 2, 1)]
    whole = joined(parts)
    assert whole["a"][:, 0].tolist() == [2, 2, 2, 2, 1] and len(whole["b"][0]) == 5


@pytest.mark.slow
@pytest.mark.usefixtures("executorch")
@pytest.mark.parametrize(
    "name, bits", [("bert", (8, 4)), *((name, None) for name in ("albert", "distilbert", "roberta", "mpnet", "vit"))]
)
def test_models_run_there(name, bits, tmp_path):
    family = FAMILIES[name]
    model = family.build().eval()
    compress(model, batches_of(family, 4), 0.5, refine_steps=0, bits=bits)
    report = export(model, tmp_path / "served", "executorch")
    assert report.difference < 1e-5 and not report.int8
    assert ("weights on grids" in str(report)) == (bits is not None)
    served = load_exported(tmp_path / "served", threads=1)
    if name == "vit":
        inputs = {"pixel_values": torch.cat([each["pixel_values"] for each in batches_of(family, 3)])}
        with torch.no_grad():
            torch.testing.assert_close(served(**inputs)[0], model(**inputs)[0], rtol=0, atol=1e-4)
        return
    for rows in (1, 2, 5):  # two are planned
        assert_same_outputs(model, served, text_batch(rows, 17))
    with pytest.raises(ArgumentError, match=r"the graph takes rows of \[\d+\] at most; cut the texts"):
        served(**text_batch(1, 500))


@pytest.mark.slow
@pytest.mark.usefixtures("executorch")
@pytest.mark.parametrize("heads, keep", [([0, 1], None), ([], 0), ([0, 1, 2, 3], None), ([0, 1, 2, 3], 0)])
def test_heads_neurons_attention_and_a_block_gone(heads, keep, tmp_path):
    model = FAMILIES["bert"].build().eval()
    layers = layers_of(model)
    prune_heads(model, heads={layers.attention[0].path: heads})
    if keep is not None:
        prune_neurons(model, batches_of(FAMILIES["bert"], 4), keep={layers.feed_forwards[0].path: keep})
    assert export(model, tmp_path / "served", "executorch").difference < 1e-5


@pytest.mark.slow
@pytest.mark.usefixtures("executorch")
def test_a_sentence_encoder_embeds(tmp_path):
    """As sentence-transformers does, also where that runs the program, and where only ExecuTorch is there."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    source, texts = tiny.write_modules(tiny.save_tiny_bert(tmp_path / "source")), ["w5 w9 w20", "w7", "w1 w2 w3"]
    model, tokenizer = AutoModel.from_pretrained(source).eval(), AutoTokenizer.from_pretrained(source)
    export(model, tmp_path / "served", "executorch", tokenizer=tokenizer)
    expected = sentence_transformers.SentenceTransformer(str(source), device="cpu").encode(texts)
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "served"), device="cpu", trust_remote_code=True)
    for found in (load_exported(tmp_path / "served").encode(texts), theirs.encode(texts)):
        assert abs(found - expected).max() < 1e-5
    card = (tmp_path / "served/README.md").read_text()
    code = card.partition("### ExecuTorch")[2].partition("```python\n")[2].partition("```")[0]
    names: dict = {}
    exec(code.replace(NAME, str(tmp_path / "served")).replace("A sentence.", texts[0]), names)
    assert abs(names["embeddings"].numpy() - expected[:1]).max() < 1e-5


def test_weights_of_eight_bits_are_those_of_the_grid():
    """With positive scales, as XNNPACK wants them; a row of zeros stays one."""
    pytest.importorskip("torchao")
    weight = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    weight[2] = 0
    on_grid = nearest_on_grid(weight, 8).weight()
    grid = GridWeights.of(on_grid, 8)
    assert (grid.scales < 0).any()  # else nothing is turned
    for given in (weight, on_grid):
        made = grids_in_executorch.integers(given)
        assert torch.equal(made.dequantize(), on_grid) and (made.scale > 0).all()


def test_a_model_gets_its_weights_back():
    pytest.importorskip("torchao")
    model = torch.nn.Sequential(torch.nn.Linear(32, 8), torch.nn.Embedding(4, 32), torch.nn.Linear(32, 8))
    vars(model[2])[WEIGHT_BITS] = 4
    before = [each.weight for each in (model[0], model[1], model[2])]
    with pytest.raises(ZeroDivisionError), grids_in_executorch.in_eight_bits(model) as count:
        assert count == 1 and model[0].weight is not before[0] and model[2].weight is before[2]
        raise ZeroDivisionError
    assert [each.weight for each in (model[0], model[1], model[2])] == before


@pytest.mark.slow
@pytest.mark.usefixtures("executorch")
@pytest.mark.parametrize("name", ("bert", "llama"))
def test_products_of_eight_bits(name, tmp_path):
    """Weights on the grid of eight bits are written as they are, and PyTorch computes what the engine does."""
    model = FAMILIES[name].build().eval()
    compress(model, batches_of(FAMILIES[name], 4), 0.25, bits=8, refine_steps=0)
    report = export(model, tmp_path / "served", "executorch", int8=True)
    assert report.int8 and "weights have eight bits" in str(report)
    assert report.difference < 0.2  # of tiny random models; seen: 0.11
    small, large = (tmp_path / "served/model.pte").stat().st_size, export(model, tmp_path / "float", "executorch")
    assert small < 0.8 * 1e6 * large.megabytes
    batch, served = text_batch(1, 12), load_exported(tmp_path / "served", threads=1)
    batch = {name: value[batch["attention_mask"].bool()][None] for name, value in batch.items()}  # without padding
    with torch.no_grad(), grids_in_executorch.in_eight_bits(model):
        expected = model(**batch)
    torch.testing.assert_close(served(**batch)[0], expected[0], rtol=0, atol=1e-3 * float(expected[0].abs().max()))


@pytest.mark.slow
@pytest.mark.usefixtures("executorch")
def test_a_folder_that_contradicts_its_program_is_refused(tmp_path):
    export(FAMILIES["bert"].build().eval(), tmp_path / "served", "executorch")
    (tmp_path / "served/manifest.json").unlink()
    said = json.loads((tmp_path / "served/export.json").read_text())
    metadata = said["components"]["model"]["metadata"]
    for field, change in (
        ("out_constants", [[0, None]]),
        ("kwargs", {"input_ids": metadata["kwargs"]["input_ids"]}),
        ("kwargs", {name: {"container": "Cache"} for name in metadata["kwargs"]}),
    ):
        edited = {**metadata, field: change}
        (tmp_path / "served/export.json").write_text(
            json.dumps({**said, "components": {"model": {"file": "model.pte", "metadata": edited}}})
        )
        with pytest.raises(DataError, match=r"export\.json is damaged, or was changed by hand|model\.pte is damaged"):
            load_exported(tmp_path / "served")
    (tmp_path / "served/export.json").write_text(json.dumps(said))
    assert load_exported(tmp_path / "served") is not None
    file = tmp_path / "served/model.pte"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(DataError, match=r"model\.pte is damaged: it has .* bytes, and the graph reads"):
        load_exported(tmp_path / "served")
