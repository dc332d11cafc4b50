"""transformers' pipelines run changed models, and exported ones, as they run stock ones."""

import numpy as np
import pytest
import torch
from changed_heads import change_heads, mix
from model_runs import swap
from PIL import Image
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    ViTImageProcessorPil,
    pipeline,
)

import collab_heads
import tiny
from collab_heads.errors import UnsupportedModelError
from families import FAMILIES

TEXTS = ["w1 w2 w3", "w20 w31", "w9 w8 w7 w6 w5 w4"]
LOSSLESS = 1e-5  # of probabilities in float32; seen: 1e-7
CHANGES = {
    "swapped": lambda model: swap(model, "shared", 4),
    "gated": lambda model: change_heads(model, "gated"),
    "pruned": lambda model: change_heads(model, "pruned"),
    "everything": lambda model: (swap(model, "per_head", 16), change_heads(model, "both"), mix(model)),
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return tiny.save_tiny_bert(tmp_path_factory.mktemp("bert"))


@pytest.mark.parametrize("change", CHANGES)
def test_a_classifier(change, bert, tmp_path):
    """What the pipeline says is what the model says; also of a folder that was saved, in batches with padding."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(bert).eval()
    tokenizer = AutoTokenizer.from_pretrained(bert)
    stock = pipeline("text-classification", model=model, tokenizer=tokenizer)(TEXTS, top_k=None)
    CHANGES[change](model)
    with torch.no_grad():
        rows = [model(**tokenizer(text, return_tensors="pt")).logits.softmax(-1)[0] for text in TEXTS]
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for given in (model, str(tmp_path)):
        runs = pipeline("text-classification", model=given, tokenizer=tokenizer, batch_size=2)
        found = runs(TEXTS, top_k=None)
        for labels, row in zip(found, rows, strict=True):
            scores = {each["label"]: each["score"] for each in labels}
            assert [scores[f"LABEL_{i}"] for i in range(2)] == pytest.approx(row.tolist(), abs=LOSSLESS)
    assert any(abs(a["score"] - b["score"]) > 1e-3 for a, b in zip(stock[0], found[0], strict=True))


def test_text_goes_on_as_with_the_model(bert):
    model, tokenizer = FAMILIES["gpt2"].build(), AutoTokenizer.from_pretrained(bert)
    swap(model, "shared", 16)
    change_heads(model, "pruned")
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    ids = tokenizer("w1 w2 w3", return_tensors="pt").input_ids
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, pad_token_id=0
    )
    (found,) = pipeline("text-generation", model=model, tokenizer=tokenizer)(
        "w1 w2 w3", max_new_tokens=4, do_sample=False, return_tensors=True
    )
    assert found["generated_token_ids"] == expected[0].tolist()


def test_a_pipeline_says_what_to_pass(bert):
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(bert), AutoTokenizer.from_pretrained(bert)
    runs = pipeline("text-classification", model=model, tokenizer=tokenizer)
    with pytest.raises(UnsupportedModelError, match=r"inside a Pipeline: pass pipeline\.model"):
        collab_heads.swap_to_collaborative(runs)
    before = runs(TEXTS)[0]["score"]
    collab_heads.swap_to_collaborative(runs.model)
    assert runs(TEXTS)[0]["score"] == pytest.approx(before, abs=LOSSLESS)


def exported(model, folder, batch, to="onnx"):
    """The model in an engine."""
    pytest.importorskip("transformers.exporters.runners", reason="exports of graphs need transformers 5.23")
    collab_heads.export(model, folder, to, batches=[batch])
    return collab_heads.load_exported(folder, threads=1)


def assert_same(found, expected):
    """Compare what two pipelines found, in any nesting."""
    if isinstance(expected, dict):
        found, expected = ([value for _, value in sorted(each.items())] for each in (found, expected))
    if isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == (expected if isinstance(expected, str | int) else pytest.approx(expected, abs=LOSSLESS))


@pytest.mark.slow
@pytest.mark.parametrize("to", ("onnx", "openvino"))
@pytest.mark.parametrize(
    "task, kind",
    [
        ("text-classification", AutoModelForSequenceClassification),
        ("token-classification", AutoModelForTokenClassification),
    ],
)
def test_an_exported_model_of_texts(task, kind, to, bert, tmp_path, warnings_logged):
    """In batches with padding; the pipeline does not say that it lacks the class."""
    model, tokenizer = kind.from_pretrained(bert).eval(), AutoTokenizer.from_pretrained(bert)
    change_heads(model, "pruned")
    served = exported(model, tmp_path / "served", tokenizer(TEXTS, padding=True, return_tensors="pt"), to)
    expected, found = (pipeline(task, model=each, tokenizer=tokenizer, batch_size=2)(TEXTS) for each in (model, served))
    assert_same(found, expected)
    assert "is not supported" not in warnings_logged.text


@pytest.mark.slow
def test_an_exported_model_of_pictures(tmp_path):
    family = FAMILIES["vit"]
    model = family.build().eval()
    size = {"height": model.config.image_size, "width": model.config.image_size}
    processor = ViTImageProcessorPil(size=size)
    pixels = np.random.default_rng(0).integers(256, size=(3, 40, 30, 3), dtype=np.uint8)
    served = exported(model, tmp_path / "served", family.inputs())
    assert served.dtype == torch.float32
    expected, found = (
        pipeline("image-classification", model=each, image_processor=processor)([*map(Image.fromarray, pixels)])
        for each in (model, served)
    )
    assert_same(found, expected)


@pytest.mark.slow
def test_an_exported_model_that_writes(bert, tmp_path):
    family, tokenizer = FAMILIES["gpt2"], AutoTokenizer.from_pretrained(bert)
    model = family.build().eval()
    served = exported(model, tmp_path / "served", family.inputs())
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected, found = (
        pipeline("text-generation", model=each, tokenizer=tokenizer)(TEXTS, **options) for each in (model, served)
    )
    assert_same(found, expected)
