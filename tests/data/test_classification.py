"""Labels in the order of the model, and predictions in the order of the examples."""

import random

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
)

import tiny
from collab_heads.data.classification import (
    Labels,
    calibration_batches,
    check_head,
    configure,
    draw,
    encode,
    is_trained,
    predict,
)
from collab_heads.data.glue import Data
from collab_heads.data.glue_tasks import TASKS, Task
from collab_heads.errors import ArgumentError

FP32_PADDING = 1e-5  # float32 sums over more, masked, tokens; seen: 3e-7
MNLI = TASKS["mnli"]  # entailment, neutral, contradiction
TRAINED = {"architectures": ["BertForSequenceClassification"]}
# how facebook/bart-large-mnli and others number the same classes
OTHER = {"CONTRADICTION": 0, "neutral": 1, "Entailment": 2}


def config(label2id=None, **more):
    named = {"label2id": label2id, "id2label": {i: name for name, i in label2id.items()}} if label2id else {}
    return BertConfig(**named, **more)


def test_a_text_without_tokens_is_read_as_padding():
    """Tokenizers without tokens of their own, such as GPT-2's, make none of an empty text."""
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "[pad]": 2}, unk_token="b"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[pad]")
    data = Data(Task(None, ("text",), (), "regression"), {"test": {"text": ["a b a", "", "b"]}})
    labels = Labels(())
    rows = encode(data, tokenizer, labels, 4, pad=False)["test"].to_dict()
    assert rows["input_ids"] == [[0, 1, 0], [2], [1]] and rows["attention_mask"] == [[1, 1, 1], [1], [1]]
    rows = encode(data, tokenizer, labels, 4, pad=True)["test"].to_dict()
    assert rows["input_ids"] == [[0, 1, 0, 2], [2] * 4, [1, 2, 2, 2]]
    assert rows["attention_mask"] == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 0, 0, 0]]


def test_labels_follow_a_checkpoint_that_knows_them_in_another_order():
    labels = Labels.of(MNLI, config(OTHER, **TRAINED))
    assert [labels.to_model(number) for number in range(3)] == [2, 1, 0]
    assert labels.to_task(np.array([[10, 11, 12], [20, 21, 22]])).tolist() == [[12, 11, 10], [22, 21, 20]]
    turned = Labels.of(MNLI, config({"neutral": 0, "contradiction": 1, "entailment": 2}, **TRAINED))
    assert turned.order == (2, 0, 1)
    for number in range(3):  # there and back
        assert turned.to_task(np.eye(3)[[turned.to_model(number)]]).argmax() == number


@pytest.mark.parametrize("label2id", (None, {"a": 2, "b": 1, "c": 0}, {"entailment": 1, "neutral": 0}))
def test_labels_keep_their_order_where_the_checkpoint_knows_others(label2id):
    assert Labels.of(MNLI, config(label2id)).order == (0, 1, 2)


def test_scores_are_what_they_are():
    labels = Labels.of(TASKS["stsb"], config(num_labels=1))
    assert labels.to_model(2.5) == 2.5
    assert labels.to_task(np.array([[1.5], [2.5]])).tolist() == [1.5, 2.5]


def test_a_trained_head_must_have_the_outputs_of_the_task():
    check_head(MNLI, config(OTHER, **TRAINED), False)
    check_head(MNLI, config(num_labels=2), False)  # no head yet
    check_head(MNLI, config(num_labels=2, **TRAINED), True)
    two = config({"no": 0, "yes": 1}, **TRAINED)
    with pytest.raises(ArgumentError, match=r"has 2 output\(s\) \(no, yes\), the task needs 3 \(entailment, neutral, "):
        check_head(MNLI, two, False)
    with pytest.raises(
        ArgumentError, match=r"the task needs 1 \(one score \(regression\)\).*--ignore_mismatched_sizes"
    ):
        check_head(TASKS["stsb"], two, False)


def test_only_a_head_for_sequences_counts_as_trained():
    assert is_trained(config(**TRAINED))
    assert not is_trained(config(architectures=["BertForTokenClassification"]))
    assert not is_trained(config())


def test_a_model_without_the_labels_learns_their_names():
    for unknown in (config(), config({"a": 0, "b": 1, "c": 2}, **TRAINED), config({"a": 0, "b": 1}, **TRAINED)):
        assert configure(MNLI, unknown).order == (0, 1, 2)
        assert unknown.id2label == {0: "entailment", 1: "neutral", 2: "contradiction"}
        assert unknown.label2id == {"entailment": 0, "neutral": 1, "contradiction": 2}
        assert (unknown.num_labels, unknown.problem_type) == (3, "single_label_classification")
    score = config()
    configure(TASKS["stsb"], score)
    assert (score.num_labels, score.problem_type) == (1, "regression")


def test_a_trained_model_keeps_its_names_and_order():
    trained = config(OTHER, **TRAINED)
    assert configure(MNLI, trained).order == (2, 1, 0)
    assert trained.label2id == OTHER
    assert trained.problem_type == "single_label_classification"


@pytest.mark.parametrize("architectures", (["BertModel"], None))
def test_the_names_in_the_config_are_those_that_training_follows(architectures):
    """The encoder of a classifier, saved alone, keeps the names of classes that it no longer tells apart."""
    encoder = config(OTHER, architectures=architectures)
    labels = configure(MNLI, encoder)
    assert [encoder.id2label[labels.to_model(number)].lower() for number in range(3)] == list(MNLI.labels)
    assert labels == Labels.of(MNLI, encoder)  # when it is loaded again


@pytest.fixture(scope="module")
def tokenizer(bert):
    return AutoTokenizer.from_pretrained(bert, model_input_names=["input_ids", "token_type_ids", "attention_mask"])


@pytest.fixture(scope="module")
def model(bert):
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_pretrained(bert, num_labels=3)


@pytest.fixture(scope="module")
def data():
    """Pairs of very different lengths, in no order; labels as the task numbers them."""
    chance = random.Random(0)
    texts = [[" ".join(chance.choices(tiny.WORDS, k=chance.randint(1, 20))) for _ in range(23)] for _ in range(2)]
    columns = dict(zip(MNLI.texts, texts, strict=True))
    labelled = {**columns, "label": [chance.randrange(3) for _ in range(23)]}
    return Data(MNLI, {"train": labelled, "test_matched": columns})


def test_examples_are_encoded_in_their_order_with_the_labels_of_the_model(data, tokenizer):
    encoded = encode(data, tokenizer, Labels((2, 0, 1)), max_length=12, pad=False)
    assert list(encoded) == ["train", "test_matched"]
    assert encoded["train"]["labels"] == [(2, 0, 1)[label] for label in data.splits["train"]["label"]]
    assert set(encoded["test_matched"].column_names) == {"input_ids", "token_type_ids", "attention_mask"}
    for i in (0, 7, 22):
        pair = [data.splits["train"][text][i] for text in MNLI.texts]
        expected = tokenizer(*pair, truncation=True, max_length=12)["input_ids"]
        assert encoded["train"][i]["input_ids"] == encoded["test_matched"][i]["input_ids"] == expected
        assert 1 in encoded["train"][i]["token_type_ids"]  # a pair
    lengths = {len(ids) for ids in encoded["train"]["input_ids"]}
    assert max(lengths) == 12 > min(lengths)
    padded = encode(data, tokenizer, Labels((0, 1, 2)), max_length=12, pad=True)
    assert {len(ids) for ids in padded["train"]["input_ids"]} == {12}


def test_single_texts_and_scores_are_encoded(tokenizer):
    task = Task(None, ("text",), (), "regression")
    data = Data(task, {"train": {"text": ["w1 w2", "w3"], "label": [0.5, 2.0]}})
    encoded = encode(data, tokenizer, Labels(()), max_length=12, pad=False)["train"]
    assert encoded["labels"] == [0.5, 2.0]
    assert encoded["input_ids"] == [tokenizer("w1 w2")["input_ids"], tokenizer("w3")["input_ids"]]


@pytest.mark.parametrize("size", (1, 4, 100))
@pytest.mark.parametrize("training", (True, False))
def test_predictions_are_those_of_one_example_at_a_time(size, training, data, tokenizer, model):
    encoded = encode(data, tokenizer, Labels((0, 1, 2)), max_length=40, pad=False)["train"]
    assert len({len(ids) for ids in encoded["input_ids"]}) > 8
    model.train(training)
    found = predict(Accelerator(cpu=True), model, encoded, DataCollatorWithPadding(tokenizer), size)
    assert model.training == model.bert.encoder.training == training
    assert (found.shape, found.dtype) == ((23, 3), np.float32)
    model.eval()
    for i, logits in enumerate(found):
        row = {name: torch.tensor([ids]) for name, ids in encoded[i].items() if name != "labels"}
        with torch.no_grad():
            expected = model(**row).logits[0].numpy()
        np.testing.assert_allclose(logits, expected, rtol=0, atol=FP32_PADDING)
    assert np.ptp(found, axis=0).min() > 1e-2  # else any order would do


def test_calibration_batches_are_what_the_model_takes_without_labels(data, tokenizer, model):
    encoded = encode(data, tokenizer, Labels((0, 1, 2)), max_length=40, pad=False)["train"]
    batches = calibration_batches(encoded, DataCollatorWithPadding(tokenizer), size=10)
    assert [len(batch["input_ids"]) for batch in batches] == [10, 10, 3]
    assert all(batch.keys() == {"input_ids", "token_type_ids", "attention_mask"} for batch in batches)
    rows = [row for b in batches for row in zip(b["input_ids"], b["attention_mask"], strict=True)]
    seen = [ids[mask.bool()].tolist() for ids, mask in rows]
    assert sorted(seen) == sorted(encoded["input_ids"])
    lengths = [len(ids) for ids in seen]
    assert lengths == sorted(lengths, reverse=True)
    assert model(**batches[-1]).loss is None


def test_a_sample_is_drawn_by_its_seed(data, tokenizer):
    encoded = encode(data, tokenizer, Labels((0, 1, 2)), max_length=40, pad=False)["train"]
    first, again, other = (draw(encoded, 6, seed)["input_ids"] for seed in (1, 1, 2))
    assert first == again != other
    assert len({str(ids) for ids in first}) == 6
    assert sorted(draw(encoded, 99, 1)["input_ids"]) == sorted(encoded["input_ids"])
