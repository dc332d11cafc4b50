"""Tiny models in folders, one for each task, with their tokenizers."""

import pytest
import torch
import translation_models
from model_configs import rotary_config
from transformers import AutoTokenizer, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

import tiny


@pytest.fixture(scope="session")
def encoder(tmp_path_factory):
    return tiny.save_tiny_bert(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="session")
def classifier(encoder, tmp_path_factory):
    """Of three classes, each of which it finds in some texts: low, Middle, high."""
    torch.manual_seed(1)
    names = dict(enumerate(("low", "Middle", "high")))
    model = BertForSequenceClassification.from_pretrained(encoder, num_labels=3, id2label=names)
    torch.nn.init.normal_(model.classifier.weight)
    texts = AutoTokenizer.from_pretrained(encoder)([row["sentence1"] for row in tiny.rows(24, 2)], padding=True)
    with torch.no_grad():
        logits = model.eval()(**texts.convert_to_tensors("pt")).logits
        model.classifier.bias.sub_(logits.mean(0))
    return saved(model, encoder, tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="session")
def scorer_of_pairs(encoder, tmp_path_factory):
    """Gives a pair a number."""
    torch.manual_seed(0)
    model = BertForSequenceClassification.from_pretrained(encoder, num_labels=1)
    torch.nn.init.normal_(model.classifier.weight)
    return saved(model, encoder, tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="session")
def decoder(encoder, tmp_path_factory):
    torch.manual_seed(0)
    return saved(LlamaForCausalLM(rotary_config(LlamaConfig)), encoder, tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="session")
def translator(tmp_path_factory):
    folder = tmp_path_factory.mktemp("translator")
    translation_models.tokenizer("marian", folder).save_pretrained(folder)
    translation_models.model("marian").save_pretrained(folder)
    return folder


def saved(model, encoder, folder):
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(encoder).save_pretrained(folder)
    return folder
