"""Changed models that others store and load: Trainer, sentence-transformers, PEFT, pipelines."""

import json

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from known_heads import word_pieces
from load_without_package import refusal
from model_runs import aligned, output, swap
from transformers import BertForSequenceClassification, pipeline

from collab_heads import fold_heads, prune_heads
from collab_heads.saving.marks import SENTENCE, SOURCE, WEIGHTS
from families import FAMILIES

INPUTS = FAMILIES["bert"].inputs()
ROWS = [{"input_ids": INPUTS["input_ids"][i], "labels": i % 2} for i in range(2)]


@pytest.fixture
def model():
    model = FAMILIES["bert"].build()
    swap(model, "shared", 20)
    return model


def card(folder):
    return ModelCard.load(folder / "README.md")


def stored(folder):
    return json.loads((folder / "config.json").read_text())


def assert_marked(folder):
    assert stored(folder)[WEIGHTS] == SENTENCE
    assert (folder / SOURCE.name).is_file() and "collab-heads" in card(folder).data.tags


@pytest.fixture
def trained(model, tmp_path):
    arguments = {"max_steps": 2, "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "report_to": "none"}
    settings = transformers.TrainingArguments(str(tmp_path), **arguments, load_best_model_at_end=True, use_cpu=True)
    return transformers.Trainer(model, settings, train_dataset=ROWS, eval_dataset=ROWS)


@pytest.mark.slow
def test_trainer_stores_goes_on_and_loads_the_best(trained, tmp_path):
    trained.train()
    trained.save_model()
    for folder in (tmp_path, tmp_path / "checkpoint-1", tmp_path / "checkpoint-2"):
        assert_marked(folder)
    weights = {name: tensor.clone() for name, tensor in trained.model.state_dict().items()}
    trained.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    again = BertForSequenceClassification.from_pretrained(tmp_path)
    assert [name for name, tensor in again.state_dict().items() if not torch.equal(tensor, weights[name])] == []


def test_the_card_of_trainer_is_completed_at_the_next_save(trained, tmp_path):
    trained.save_model()
    trained.create_model_card()  # Trainer writes over what is there
    assert "Changed by collab_heads" not in card(tmp_path).text
    trained.model.save_pretrained(tmp_path)
    said = card(tmp_path)
    assert {"collab-heads", "generated_from_trainer"} <= set(said.data.tags)
    assert "Training procedure" in said.text and "## Changed by" in said.text


@pytest.mark.slow
def test_sentence_transformers(model, tmp_path, request):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    model.bert.save_pretrained(tmp_path / "plain")
    word_pieces().save_pretrained(tmp_path / "plain")
    embedder = sentence_transformers.SentenceTransformer(str(tmp_path / "plain"), device="cpu")
    embedder.save(str(tmp_path / "saved"))
    assert stored(tmp_path / "saved")[WEIGHTS] == SENTENCE
    said = card(tmp_path / "saved")
    assert said.data.library_name == "sentence-transformers" and "collab-heads" not in said.text.split("---")[0]
    trusted = sentence_transformers.SentenceTransformer(str(tmp_path / "saved"), device="cpu", trust_remote_code=True)
    assert torch.equal(*(each.encode(["a b"], convert_to_tensor=True) for each in (embedder, trusted)))
    request.getfixturevalue("without_hooks")
    load = sentence_transformers.SentenceTransformer
    assert refusal(lambda: load(str(tmp_path / "saved"), device="cpu")).endswith(SENTENCE)


def test_adapters_on_a_changed_base(model, tmp_path, request):
    peft = pytest.importorskip("peft")
    model.save_pretrained(tmp_path / "base")
    base = BertForSequenceClassification.from_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(base, peft.LoraConfig(task_type="SEQ_CLS", target_modules=["dense"]))
    adapted.save_pretrained(tmp_path / "adapter")
    again = peft.AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "adapter").eval()
    assert torch.equal(output(aligned(again), INPUTS), output(aligned(adapted.eval()), INPUTS))
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert_marked(tmp_path / "merged")
    request.getfixturevalue("without_hooks")
    load = peft.AutoPeftModelForSequenceClassification.from_pretrained
    assert refusal(lambda: load(tmp_path / "adapter")).endswith(SENTENCE)


def test_pipelines(model, tmp_path, request):
    model.save_pretrained(tmp_path)
    word_pieces().save_pretrained(tmp_path)
    assert pipeline("text-classification", str(tmp_path), trust_remote_code=True)("a b")[0]["score"] > 0
    request.getfixturevalue("without_hooks")
    assert SENTENCE in refusal(lambda: pipeline("text-classification", str(tmp_path)))


def test_a_folded_model_needs_nothing(tmp_path, request):
    model = FAMILIES["bert"].build()
    prune_heads(model, heads={"enc-self": [[0], [1]]})
    fold_heads(model)
    model.save_pretrained(tmp_path)
    request.getfixturevalue("without_hooks")
    again = aligned(BertForSequenceClassification.from_pretrained(tmp_path).eval())
    assert torch.equal(output(again, INPUTS), output(model, INPUTS))
