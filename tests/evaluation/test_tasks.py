"""What models answer is what they answer to each text alone; scores and flips are those computed by hand."""

import math

import numpy as np
import pytest
import torch
import translation_models
from model_configs import rotary_config
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
)

import tiny
from collab_heads.errors import ArgumentError, DataError, UnsupportedModelError
from collab_heads.evaluation.classifier_tasks import Classified
from collab_heads.evaluation.scores import on_all
from collab_heads.evaluation.task import Limits
from collab_heads.evaluation.tasks import (
    TASKS,
    Embedded,
    OwnFunction,
    Read,
    Retrieval,
    Similarity,
    nearest,
)

FP32_NOISE = 1e-5  # float32, in batches with padding and without
EXACT64 = 1e-12
LIMITS = Limits(batch_size=3, max_length=32)
TEXTS = [row["sentence1"] for row in tiny.rows(7, 3)]
OTHERS = [row["sentence2"] for row in tiny.rows(7, 3)]
PAIRS = list(zip(TEXTS, OTHERS, strict=True))


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def made(name, *columns):
    return TASKS[name](columns, "dev.tsv", LIMITS)


def load(auto, folder):
    return auto.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def scores_of(task, answers):
    return {name: on_all(score, task.count(answers)) for name, score in task.scores(answers).items()}


def embedding(model, tokenizer, text):
    states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
    return states / states.norm()


def test_similarity(encoder):
    model, tokenizer = load(AutoModel, encoder)
    task = made("similarity", TEXTS, OTHERS, [str(number) for number in range(7)])
    answers = task.answers(model, tokenizer)
    by_hand = [embedding(model, tokenizer, a) @ embedding(model, tokenizer, b) for a, b in PAIRS]
    assert answers.cosines == pytest.approx([float(each) for each in by_hand], abs=FP32_NOISE)
    assert answers.neighbours.shape == (14, 10)
    ranked = Embedded(np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.6]), answers.neighbours)
    assert scores_of(task, ranked)["Spearman"] == pytest.approx(100 * (1 - 6 * 2 / (7 * 48)))  # 1 - 6 sum d^2/(n^3 - n)


def test_flips_of_similarity_are_neighbours_that_change():
    vectors = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    found = nearest(vectors, vectors, 2, but_itself=True)
    by_hand = [
        sorted((j for j in range(5) if j != i), key=lambda j: -float(vectors[i] @ vectors[j]))[:2] for i in range(5)
    ]
    assert [sorted(row) for row in found.tolist()] == [sorted(row) for row in by_hand]
    original, changed = torch.tensor([[1, 2], [0, 2], [0, 1]]), torch.tensor([[2, 1], [0, 3], [3, 4]])
    task = made("similarity", TEXTS, OTHERS, ["1"] * 7)
    assert task.flips(Embedded(None, changed), Embedded(None, original)) == pytest.approx(3 / 6, abs=EXACT64)


def test_neighbours_are_found_in_portions(monkeypatch):
    vectors = torch.nn.functional.normalize(torch.randn(9, 4, generator=torch.Generator().manual_seed(0)), dim=-1)
    whole = nearest(vectors, vectors, 3, but_itself=True)
    monkeypatch.setattr("collab_heads.evaluation.tasks.ROWS", 4)
    assert torch.equal(nearest(vectors, vectors, 3, but_itself=True), whole)
    assert not (whole == torch.arange(9)[:, None]).any()


def test_classification(classifier):
    model, tokenizer = load(AutoModelForSequenceClassification, classifier)
    logits = [model(**tokenizer(a, b, return_tensors="pt")).logits[0] for a, b in PAIRS]
    by_hand = [int(each.argmax()) for each in logits]
    labels = [("low", "MIDDLE", "HIGH")[number] for number in by_hand]
    labels[0], labels[1] = str((by_hand[0] + 1) % 3), str(by_hand[1])  # a wrong one, and the number of a class
    task = made("classification", TEXTS, OTHERS, labels)
    answers = task.answers(model, tokenizer)
    assert answers.predictions.tolist() == by_hand and answers.names.tolist() == ["low", "Middle", "high"]
    assert scores_of(task, answers)["accuracy"] == pytest.approx(100 * 6 / 7, abs=100 * EXACT64)
    names = answers.names[[1, 0, 2]]  # another order of the classes
    assert task.flips(answers, answers) == 0
    moved = Classified(answers.references, np.array([1, 0, 2])[by_hand], names)
    assert task.flips(moved, answers) == 0  # the names count
    other = np.array(by_hand)
    other[2:4] = (other[2:4] + 1) % 3
    assert task.flips(answers._replace(predictions=other), answers) == pytest.approx(2 / 7, abs=EXACT64)


@pytest.fixture
def reader(encoder):
    """A decoder that classifies by the last token of a text, and its tokenizer, which pads with another token."""
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(rotary_config(LlamaConfig, num_labels=3)).eval()
    torch.nn.init.normal_(model.score.weight)
    return model, AutoTokenizer.from_pretrained(encoder)


def test_decoders_classify_by_the_last_token(reader):
    model, tokenizer = reader
    model.config.pad_token_id = tokenizer.pad_token_id + 1
    ids = [tokenizer(a, b, return_tensors="pt").input_ids for a, b in PAIRS]
    by_hand = [int(model.score(model.model(each).last_hidden_state)[0, -1].argmax()) for each in ids]
    assert len(set(by_hand)) > 1 and len({each.shape for each in ids}) > 1
    answers = made("classification", TEXTS, OTHERS, ["0"] * 7).answers(model, tokenizer)
    assert answers.predictions.tolist() == by_hand


def test_regression(encoder):
    torch.manual_seed(0)
    model, tokenizer = load(AutoModelForSequenceClassification, encoder)
    model = type(model).from_pretrained(encoder, num_labels=1).eval()
    torch.nn.init.normal_(model.classifier.weight)
    by_hand = [float(model(**tokenizer(a, b, return_tensors="pt")).logits) for a, b in PAIRS]
    wanted = [str(each**3) for each in by_hand]  # in the same order
    task = made("regression", TEXTS, OTHERS, wanted)
    task.check(model, tokenizer)
    answers = task.answers(model, tokenizer)
    assert answers == pytest.approx(by_hand, abs=FP32_NOISE)
    scores = scores_of(task, answers)
    assert scores["Spearman"] == pytest.approx(100, abs=EXACT64 * 100) and 0 < scores["Pearson"] < 99.9
    order = np.argsort(answers)
    other = answers.copy()
    other[order[:2]] = answers[order[1::-1]]  # the two least change places
    assert task.flips(other, answers) == pytest.approx(2 / (7 * 6), abs=EXACT64)
    alone = made("regression", TEXTS, wanted)
    assert alone.answers(model, tokenizer) != pytest.approx(by_hand, abs=0.01)


def test_a_model_that_gives_numbers_has_a_task_of_its_own(classifier, encoder):
    model, tokenizer = load(AutoModelForSequenceClassification, classifier)
    with pytest.raises(UnsupportedModelError, match="BertForSequenceClassification gives no single number for a text"):
        made("regression", TEXTS, ["1"] * 7).check(model, tokenizer)
    model = type(model).from_pretrained(encoder, num_labels=1)
    for task in (made("similarity", TEXTS, OTHERS, ["1"] * 7), made("retrieval", TEXTS, OTHERS)):
        with pytest.raises(UnsupportedModelError, match="gives a number for its texts, and no embedding: choose the t"):
            task.check(model, tokenizer)


def test_decoders_that_do_not_know_the_last_token(reader):
    model, tokenizer = reader
    model.config.pad_token_id = None
    with pytest.raises(
        UnsupportedModelError, match="LlamaForSequenceClassification finds the last token of a text by its conf"
    ):
        made("classification", TEXTS, ["0"] * 7).check(model, tokenizer)
    task = TASKS["classification"]([TEXTS, ["0"] * 7], "dev.tsv", Limits(batch_size=1, max_length=32))
    task.check(model, tokenizer)
    assert len(task.answers(model, tokenizer).predictions) == 7


def test_labels_that_a_model_does_not_have(classifier, encoder):
    model, tokenizer = load(AutoModelForSequenceClassification, classifier)
    with pytest.raises(
        DataError, match=r"dev\.tsv, example 2: the model has no label 'hihg'; it has low \(0\), Middle"
    ):
        made("classification", TEXTS[:2], ["high", "hihg"]).check(model, tokenizer)
    with pytest.raises(UnsupportedModelError, match="BertModel has no head for classes"):
        made("classification", TEXTS[:1], ["high"]).check(AutoModel.from_pretrained(encoder), tokenizer)


@pytest.mark.slow
def test_translation(translator):
    model, tokenizer = load(AutoModelForSeq2SeqLM, translator)
    pairs = translation_models.pairs(5, 4)
    task = made("translation", pairs["source"], pairs["target"])
    answers = task.answers(model, tokenizer)
    by_hand = []
    for text in pairs["source"]:
        ids = tokenizer(text, return_tensors="pt")
        most = (
            1 + 2 * max(len(tokenizer(each)["input_ids"]) for each in batch_with(text, pairs["source"], tokenizer)) + 8
        )
        (written,) = model.generate(**ids, max_length=min(most, 64), do_sample=False)
        by_hand.append(tokenizer.decode(written, skip_special_tokens=True))
    assert answers == by_hand
    scores = scores_of(task, pairs["target"])
    assert scores == pytest.approx({"BLEU": 100, "chrF": 100})
    assert scores_of(task, [*pairs["target"][:-1], "no"])["BLEU"] < 99
    assert task.flips(["a", "b", "c", "d", "e"], ["a", "x", "c", "d", "y"]) == pytest.approx(2 / 5, abs=EXACT64)
    with pytest.raises(UnsupportedModelError, match="MarianModel does not translate"):
        task.check(model.model, tokenizer)


def batch_with(text, texts, tokenizer):
    """The texts of a batch of three, the longest first, in which a text is."""
    order = sorted(range(len(texts)), key=lambda row: -len(tokenizer(texts[row])["input_ids"]))
    groups = [order[start : start + 3] for start in range(0, len(order), 3)]
    return [texts[row] for group in groups if texts.index(text) in group for row in group]


def test_perplexity(decoder, encoder):
    model, tokenizer = load(AutoModelForCausalLM, decoder)
    task = made("perplexity", TEXTS)
    answers = task.answers(model, tokenizer)
    losses, counts, chosen = [], [], []
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        outputs = model(input_ids=ids, labels=ids)
        losses.append(float(outputs.loss) * (ids.shape[1] - 1))
        counts.append(ids.shape[1] - 1)
        chosen.append(outputs.logits[0, :-1].argmax(-1).tolist())
    perplexity = math.exp(sum(losses) / sum(counts))
    assert scores_of(task, answers)["perplexity"] == pytest.approx(perplexity, rel=FP32_NOISE)
    assert [each.tolist() for each in answers.chosen] == chosen
    other = [each.copy() for each in answers.chosen]
    other[2][:2] += 1
    assert task.flips(answers._replace(chosen=other), answers) == pytest.approx(2 / sum(counts), abs=EXACT64)
    with pytest.raises(ArgumentError, match="other tokens"):
        task.flips(answers._replace(tokens=[each + 1 for each in answers.tokens]), answers)
    with pytest.raises(UnsupportedModelError, match="BertModel is no language model"):
        task.check(AutoModel.from_pretrained(encoder), tokenizer)
    with pytest.raises(DataError, match="no text has a second token"):
        task.scores(Read(*[[np.zeros(0)] * 7] * 3))


def test_retrieval(encoder):
    """Passages a to e: query x wants a and c, and finds c and a at places 1 and 3; y wants b, which is not found."""
    columns = ["x", "x", "y", "", " "], list("acbde")
    task = Retrieval(columns, "dev.tsv", LIMITS)
    assert len(task) == 2 and task.passages == list("acbde")
    found = torch.tensor([[1, 3, 0], [3, 4, 0]])
    gain = (1 + 1 / math.log2(4)) / (1 + 1 / math.log2(3))
    assert scores_of(task, found) == pytest.approx({"nDCG@10": 50 * gain, "recall@10": 50.0}, abs=100 * EXACT64)
    assert task.flips(torch.tensor([[0, 1, 4], [3, 4, 0]]), found) == pytest.approx(1 / 6, abs=EXACT64)
    assert len(task.first(1)) == 1 and task.first(1).passages == ["a"]
    model, tokenizer = load(AutoModel, encoder)
    task = Retrieval([TEXTS[:3], OTHERS[:3]], "dev.tsv", LIMITS)
    by_hand = torch.stack([embedding(model, tokenizer, text) for text in OTHERS[:3]])
    similar = torch.stack([embedding(model, tokenizer, text) for text in TEXTS[:3]]) @ by_hand.T
    assert torch.equal(task.answers(model, tokenizer), similar.argsort(descending=True))


def test_gains_are_those_of_sklearn():
    from sklearn.metrics import ndcg_score

    draws = np.random.default_rng(0)
    relevant, order = draws.random((6, 30)) < 0.15, np.stack([draws.permutation(30) for _ in range(6)])
    relevant[:, 3] = True
    rows = [(f"q{query}", f"p{passage}") for passage in range(30) for query in np.flatnonzero(relevant[:, passage])]
    rows += [("", f"p{passage}") for passage in range(30)]
    task = Retrieval(list(zip(*rows, strict=True)), "dev.tsv", LIMITS)
    place = {passage: i for i, passage in enumerate(task.passages)}
    queries = [int(query[1:]) for query in task.wanted]
    found = torch.tensor([[place[f"p{passage}"] for passage in order[query][:10]] for query in queries])
    rank = np.argsort(order, axis=1)
    assert scores_of(task, found)["nDCG@10"] == pytest.approx(
        100 * ndcg_score(relevant, -rank, k=10), abs=100 * EXACT64
    )


def test_a_function_of_the_users():
    task = OwnFunction(lambda model, tokenizer: [1, 0.0, torch.tensor(2.0), 1])
    answers = task.answers(None, None)
    assert scores_of(task, answers) == {"mean": 1.0} and task.count(answers) == 4
    assert task.flips(answers, np.array([1.0, 1, 2, 0])) == 0.5
    with pytest.raises(ArgumentError, match="returned 4 numbers, and 3 for the original"):
        task.flips(answers, np.zeros(3))
    for wrong in (None, [], [[1.0]], 3.0, ["x"], [math.nan]):
        with pytest.raises(ArgumentError, match="must return a list with a number per example"):
            OwnFunction(lambda model, tokenizer, wrong=wrong: wrong).answers(None, None)


def test_wrong_examples():
    for name, columns, said in (
        ("similarity", (["a", "b"], ["c", "d"], ["1", "x"]), "example 2: 'x' is no number"),
        ("similarity", (["a", "b"], ["c", "d"], ["1", "nan"]), "example 2: 'nan' is no number"),
        ("similarity", (["a", " "], ["c", "d"], ["1", "2"]), "example 2: an empty text"),
        ("classification", (["a", ""], ["0", "1"]), "example 2: an empty text"),
        ("regression", (["a", "b"], ["1", "x"]), "example 2: 'x' is no number"),
        ("translation", (["a", "b"], ["", "d"]), "example 1: an empty text"),
        ("perplexity", ([""],), "example 1: an empty text"),
        ("retrieval", (["a"], [""]), "example 1: an empty text"),
        ("retrieval", ([""], ["a"]), "no row has a query"),
    ):
        with pytest.raises(DataError, match=rf"dev\.tsv.*{said}"):
            made(name, *columns)


def test_a_tokenizer_of_another_model(encoder, translator):
    model, (_, tokenizer) = AutoModel.from_pretrained(encoder), load(AutoModel, translator)
    task = Similarity([["the " * 9], ["a dog"], ["1"]], "dev.tsv", LIMITS)
    with pytest.raises(ArgumentError, match="pass the tokenizer of this model"):
        task.answers(model, tokenizer)
    with pytest.raises(UnsupportedModelError, match="MarianModel has an encoder and a decoder"):
        task.check(AutoModel.from_pretrained(translator), tokenizer)
