"""Sizes that no model has, a config that is no JSON, and weights that are missing or wrong are refused."""

import json

import commands
import pytest
import torch
from known_heads import word_pieces
from model_configs import bert_config
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
)

from collab_heads.errors import ArgumentError, LoadError
from collab_heads.saving.loading import check_sizes, load_or_explain, numbers
from families import FAMILIES, LAYOUTS

WORDS = "bert.embeddings.word_embeddings.weight"


@pytest.fixture
def edited(tmp_path):
    """A folder with the files of a BERT, and one field of its config changed."""

    def edit(**fields):
        for each in (BertModel(bert_config()), word_pieces()):
            each.save_pretrained(tmp_path)
        file = tmp_path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))
        return tmp_path

    return edit


@pytest.mark.parametrize("command", ("inspect", "compress"))
@pytest.mark.parametrize(
    "field, value",
    (("num_hidden_layers", 10**9), ("num_hidden_layers", 10**400), ("num_labels", 10**9), ("hidden_size", 1 << 40)),
    ids=("layers", "digits", "labels", "width"),
)
def test_the_commands_build_nothing_of_such_a_size(command, field, value, edited, monkeypatch):
    folder = edited(**{field: value})
    monkeypatch.setattr(BertConfig, "__init__", None)
    flags = () if command == "inspect" else ("--data", __file__, "--output_dir", "nowhere", "--budget", 0.5)
    with pytest.raises(ArgumentError, match=rf"config\.json: {field} is 1\d+, and no model has more than [\d,]+"):
        commands.run(command, folder, *flags)


def test_sizes_of_stacks_and_lists(tmp_path):
    file = tmp_path / "config.json"
    for config in ({"text_config": {"encoder_layers": 3000}}, {"depths": [2, 2, 9999]}, {"conv_dim": [512, 1 << 30]}):
        file.write_text(json.dumps(config))
        for source in (tmp_path, file):
            with pytest.raises(ArgumentError, match="no model has more"):
                check_sizes(str(source))


def test_what_is_no_size_may_be_large(tmp_path):
    file = tmp_path / "config.json"
    large = {"rope_theta": 10**10, "rope_parameters": {"rope_theta": 1e10}, "seen_tokens": 10**13}
    file.write_text(json.dumps(large | {"label2id": {"the head of layer one": 5000}, "layer_norm_eps": 1e-12}))
    check_sizes(str(tmp_path))
    check_sizes(str(tmp_path / "nowhere"))
    for other in ("[]", "7", '{"num_hidden_layers": "many"}'):
        file.write_text(other)
        check_sizes(str(tmp_path))


def test_a_config_that_is_no_json_is_named_whatever_is_loaded(tmp_path):
    """transformers' tokenizers read it, too, and are blamed for it."""
    for broken in ("{", "[" * 100_000, ""):
        (tmp_path / "config.json").write_text(broken)
        with pytest.raises(LoadError, match=r"config\.json is damaged, or no JSON"):
            load_or_explain(AutoTokenizer, str(tmp_path))


@pytest.mark.parametrize("name", LAYOUTS)
def test_usual_models_pass(name, tmp_path):
    config = FAMILIES[name].build().config.__class__()  # of the usual sizes of the family
    config.save_pretrained(tmp_path)
    check_sizes(str(tmp_path))
    assert list(numbers(config.to_dict()))


@pytest.mark.parametrize("kind", (AutoModelForSequenceClassification, AutoModel, BertForSequenceClassification))
def test_weights_that_are_missing_are_not_random(kind, tmp_path):
    """transformers only says so; a head may be new, and a pooler may be of no use."""
    BertForSequenceClassification(bert_config()).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    for name in ("classifier.weight", "bert.pooler.dense.weight"):
        del weights[name]
    save_file(weights, file, metadata={"format": "pt"})
    model = load_or_explain(kind, tmp_path)
    assert torch.equal(model.base_model.embeddings.word_embeddings.weight, weights[WORDS])
    del weights["bert.encoder.layer.1.output.dense.bias"], weights["bert.encoder.layer.0.output.dense.bias"]
    save_file(weights, file, metadata={"format": "pt"})
    said = r"lacks 2 weights of the layers of its Bert\w+, such as (bert\.)?encoder\.layer\.0\.output\.dense\.bias: it"
    with pytest.raises(LoadError, match=said):
        load_or_explain(kind, tmp_path)


@pytest.mark.parametrize("ignores", (False, True))
@pytest.mark.parametrize(
    ("field", "weight", "shapes"),
    (
        ("intermediate_size", r"encoder\.layer\.0\.intermediate\.dense\.bias", r"\[37\].*\[48\]"),
        ("vocab_size", r"embeddings\.word_embeddings\.weight", r"\[61, 32\].*\[48, 32\]"),
    ),
)
def test_a_weight_of_another_shape_is_named(field, weight, shapes, ignores, tmp_path):
    """transformers says that an argument is not set; that is for heads, and makes layers random."""
    BertForSequenceClassification(bert_config()).save_pretrained(tmp_path)
    config = bert_config()
    setattr(config, field, 48)
    config.save_pretrained(tmp_path)
    for kind in (AutoModelForSequenceClassification, AutoModel):
        with pytest.raises(LoadError, match=rf"its weight (bert\.)?{weight} has the shape {shapes}: its config.json"):
            load_or_explain(kind, tmp_path, ignore_mismatched_sizes=ignores)


def test_a_head_of_another_shape_is_new_where_that_is_asked_for(tmp_path):
    BertForSequenceClassification(bert_config()).save_pretrained(tmp_path)
    bert_config(num_labels=5).save_pretrained(tmp_path)
    with pytest.raises(LoadError, match=r"its weight classifier\.bias has the shape \[2\].*asks for \[5\]"):
        load_or_explain(AutoModelForSequenceClassification, tmp_path)
    model = load_or_explain(AutoModelForSequenceClassification, tmp_path, ignore_mismatched_sizes=True)
    assert model.classifier.weight.shape[0] == 5
    words = load_file(tmp_path / "model.safetensors")[WORDS]
    assert torch.equal(model.bert.embeddings.word_embeddings.weight, words)


@pytest.mark.parametrize("value", (float("nan"), float("inf"), -float("inf")))
def test_weights_that_are_no_numbers_are_named(value, tmp_path):
    """A training that starts from them would be told to lower its learning rate."""
    model = BertForSequenceClassification(bert_config())
    with torch.no_grad():
        model.classifier.weight[1, 3] = value
    model.save_pretrained(tmp_path)
    with pytest.raises(LoadError, match=r"its weight classifier\.weight contains NaN or inf: its training diverged"):
        load_or_explain(AutoModelForSequenceClassification, tmp_path)
    load_or_explain(AutoModel, tmp_path)
