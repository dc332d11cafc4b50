"""evaluate: a changed model beside its original, each as an object, a folder or an export; all errors come first."""

import copy
import json
import shutil
import sys
import weakref

import numpy as np
import pytest
import torch
import translation_models
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from unchanged import assert_unchanged, snapshot

import tiny
from collab_heads import evaluate, export, prune_heads, scorer
from collab_heads.base.extras import MissingPackageError
from collab_heads.errors import ArgumentError, DataError, LoadError, UnsupportedModelError
from collab_heads.evaluation import candidates
from collab_heads.evaluation.candidates import megabytes
from collab_heads.evaluation.evaluate import CHECKED
from collab_heads.evaluation.tasks import Classification, Perplexity

ROWS = [row | {"score": number} for number, row in enumerate(tiny.rows(24, 2))]


@pytest.fixture
def pruned(encoder):
    model = AutoModel.from_pretrained(encoder)
    prune_heads(model, heads={"enc-self": [[0, 1], [2]]})
    return model


def flipped(classifier):
    """The classifier with two of its classes exchanged in the head, but not in their names."""
    model = AutoModelForSequenceClassification.from_pretrained(classifier)
    with torch.no_grad():
        for each in model.classifier.parameters():
            each.copy_(each[[1, 0, 2]])
    return model


@pytest.mark.slow
def test_a_changed_model_beside_its_original(encoder, pruned, tmp_path):
    pruned.save_pretrained(tmp_path / "pruned")  # without a tokenizer: it is the original's
    pruned.train()  # its dropout is off while it is scored
    before = snapshot(pruned)
    report = evaluate(
        encoder, {"same": str(encoder), "object": pruned, "folder": tmp_path / "pruned"}, task="similarity", data=ROWS
    )
    original, same, changed, folder = report.models
    assert (report.task, report.examples, report.timed) == ("similarity", 24, 24)
    assert [each.name for each in report.models] == ["original", "same", "object", "folder"]
    assert original.flips is None and original.changes == {}
    assert same.flips == 0 and same.scores == original.scores
    assert [getattr(same.changes["Spearman"], name) for name in ("difference", "low", "high")] == [0.0, 0.0, 0.0]
    difference = changed.scores["Spearman"] - original.scores["Spearman"]
    assert changed.changes["Spearman"].difference == pytest.approx(difference) and difference
    assert changed.changes["Spearman"].low < difference < changed.changes["Spearman"].high
    assert 0 < changed.flips < 1 and folder.flips == changed.flips and folder.scores == changed.scores
    assert changed.megabytes < original.megabytes and all(each.seconds > 0 for each in report.models)
    assert_unchanged(pruned, before)
    assert pruned.training
    told = str(report).splitlines()
    assert told[0].split() == ["model", "Spearman", "flips", "MB", "ms", "time"] and len(told) == 9
    assert f"{changed.scores['Spearman']:.2f} {difference:+.2f} (" in told[4]
    assert json.loads(report.to_json())["models"][2]["changes"]["Spearman"]["low"] == changed.changes["Spearman"].low


def test_flips_show_what_the_score_hides(classifier):
    """Two models that are right half of the time, never on the same examples."""
    model, other = AutoModelForSequenceClassification.from_pretrained(classifier), flipped(classifier)
    tokenizer = AutoTokenizer.from_pretrained(classifier)
    with torch.no_grad():
        own = [int(model(**tokenizer(row["sentence1"], return_tensors="pt")).logits.argmax()) for row in ROWS]
    exchanged = [{0: 1, 1: 0, 2: 2}[number] for number in own]
    swapped = [number for number in range(24) if own[number] != exchanged[number]]
    assert len(swapped) > 6
    labels = list(own)
    for number in swapped[: len(swapped) // 2]:
        labels[number] = exchanged[number]
    data = [{"text": row["sentence1"], "label": label} for row, label in zip(ROWS, labels, strict=True)]
    report = evaluate(classifier, other, task="classification", data=data, seed=5)
    assert report.models[1].flips == pytest.approx(len(swapped) / 24)
    right = np.array(own) == labels, np.array(exchanged) == labels
    accuracies = [each.scores["accuracy"] for each in report.models]
    assert accuracies == pytest.approx([100 * each.mean() for each in right])
    draws, found = np.random.default_rng(5), []
    for _ in range(1000):
        row = draws.integers(24, size=24)
        found.append(100 * (right[1][row].mean() - right[0][row].mean()))
    change = report.models[1].changes["accuracy"]
    assert (change.low, change.high) == pytest.approx(tuple(np.percentile(found, (2.5, 97.5))))
    assert list(report.models[1].changes) == ["accuracy", "F1", "Matthews"]


@pytest.mark.slow
def test_language_and_translation_models(decoder, translator):
    model = AutoModelForCausalLM.from_pretrained(decoder)
    with torch.no_grad():
        model.lm_head.weight.add_(
            0.1 * torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(0))
        )
    texts = [{"text": row["sentence1"]} for row in ROWS]
    report = evaluate(decoder, model, task="perplexity", data=texts)
    assert report.models[1].name == "LlamaForCausalLM" and 0 < report.models[1].flips < 1
    pairs = translation_models.pairs(6, 1)
    data = [{"source": a, "target": b} for a, b in zip(*pairs.values(), strict=True)]
    report = evaluate(translator, {"same": translator}, task="translation", data=data)
    assert list(report.models[0].scores) == ["BLEU", "chrF"] and report.models[1].flips == 0


@pytest.mark.slow
@pytest.mark.parametrize("to", ["transformers", "onnx", "openvino"])
def test_an_exported_model(to, encoder, tmp_path):
    if to != "transformers":
        pytest.importorskip("transformers.exporters.runners", reason="exports of graphs need transformers 5.23")
    model, tokenizer = AutoModel.from_pretrained(encoder), AutoTokenizer.from_pretrained(encoder)
    batch = dict(tokenizer([row["sentence1"] for row in ROWS], padding=True, return_tensors="pt"))
    export(model, tmp_path / "served", to=to, tokenizer=tokenizer, batches=[batch])
    for task, columns in (("similarity", None), ("retrieval", ["sentence1", "sentence2"])):
        report = evaluate(encoder, tmp_path / "served", task=task, data=ROWS, columns=columns)
        assert report.models[1].scores == pytest.approx(report.models[0].scores, abs=1e-6)  # ranks, no near ties
        assert report.models[1].flips < 0.05 and report.models[1].megabytes > 0.01
    assert report.models[1].name == f"{tmp_path.name}/served"


@pytest.mark.slow
def test_exported_models_of_the_other_tasks(classifier, scorer_of_pairs, decoder, translator, tmp_path):
    pytest.importorskip("transformers.exporters.runners", reason="exports of graphs need transformers 5.23")
    pairs = translation_models.pairs(6, 1)
    for folder, task, data in (
        (classifier, "classification", [{"text": row["sentence1"], "label": "low"} for row in ROWS]),
        (scorer_of_pairs, "regression", [row | {"score": len(row["sentence1"])} for row in ROWS]),
        (decoder, "perplexity", [{"text": row["sentence1"]} for row in ROWS]),
        (translator, "translation", [{"source": a, "target": b} for a, b in zip(*pairs.values(), strict=True)]),
    ):
        kind = dict.fromkeys(("classification", "regression"), AutoModelForSequenceClassification)
        kind["perplexity"] = AutoModelForCausalLM
        model = kind.get(task, translation_models.AutoModelForSeq2SeqLM).from_pretrained(folder)
        model.config.architectures = ["BertModel"]  # of the checkpoint to which a head was added; no save renamed it
        export(model, tmp_path / task, tokenizer=AutoTokenizer.from_pretrained(folder))
        report = evaluate(folder, tmp_path / task, task=task, data=data)
        assert report.models[1].scores == pytest.approx(report.models[0].scores, rel=1e-4)  # float32, another engine
        assert report.models[1].flips == 0


@pytest.mark.slow
def test_a_function_scores_too(encoder, pruned):
    seen = []

    def numbers(model, tokenizer):
        seen.append(model)
        return [0.0, 1.0, 1.0] if model is pruned else [1.0, 1.0, 1.0]

    report = evaluate(encoder, pruned, task=numbers)
    assert (report.task, report.examples) == ("numbers", 3) and report.models[1].flips == pytest.approx(1 / 3)
    assert report.models[1].scores == {"mean": pytest.approx(2 / 3)}
    assert seen.count(pruned) == 3 and len(seen) == 6
    assert not pruned.training


def test_sizes_are_those_of_weights(encoder, tmp_path):
    model = AutoModel.from_pretrained(encoder)
    tensors = sum(each.nbytes for each in (*model.parameters(), *model.buffers())) / 1e6
    assert megabytes(model, model) == tensors
    folder = shutil.copytree(encoder, tmp_path / "copy")
    (folder / "optimizer.pt").write_bytes(b"0" * 10**6)
    assert megabytes(model, str(folder)) == (folder / "model.safetensors").stat().st_size / 1e6
    assert megabytes(model, "name/on-the-hub") == tensors


def test_every_model_is_tried_before_one_reads_all(encoder, decoder, classifier, pruned, monkeypatch):
    """Errors come before any work."""
    read, answers = [], Classification.answers
    monkeypatch.setattr(
        Classification, "answers", lambda task, *given: read.append(len(task)) or answers(task, *given), raising=True
    )
    data = [{"text": row["sentence1"], "label": "low"} for row in ROWS]
    with pytest.raises(DataError, match="example 24: the model has no label 'lov'"):
        evaluate(classifier, classifier, task="classification", data=[*data[:-1], data[0] | {"label": "lov"}])
    with pytest.raises(UnsupportedModelError, match="BertModel has no head for classes"):
        evaluate(classifier, {"same": classifier, "pruned": pruned}, task="classification", data=data)
    assert read == [CHECKED] * 2


@pytest.mark.slow
def test_one_model_beside_the_original_is_in_memory_but_objects_of_the_caller_stay(encoder, pruned, monkeypatch):
    loaded, load = [], candidates.load

    def noted(candidate, device):
        held = [number for number, each in enumerate(loaded) if each() is not None]
        assert device == "cpu" and held == ([] if len(loaded) < 4 else [3])  # the original, after three were tried
        model = load(candidate, device)
        model.itself = [model]  # as in models whose modules refer to each other
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr(candidates, "load", noted)
    report = evaluate(encoder, {"same": encoder, "object": pruned, "again": encoder}, task="similarity", data=ROWS)
    assert len(loaded) == 6 and [each.flips for each in report.models[::3]] == [None, 0]


@pytest.mark.slow
def test_each_model_is_timed_in_turns_with_the_original(encoder, pruned, monkeypatch):
    original, calls, clock = AutoModel.from_pretrained(encoder), [], iter(range(100))

    def mean(model, tokenizer):
        calls.append("original" if model is original else "changed")
        for _ in range(9 if model is original else 2):
            next(clock)
        return [1.0, 2.0]

    monkeypatch.setattr("collab_heads.serving.comparison.time.perf_counter", lambda: float(next(clock)))
    report = evaluate(original, {"pruned": pruned}, task=mean, tokenizer=AutoTokenizer.from_pretrained(encoder))
    assert calls == ["original", "changed"] * 3  # scored, a turn that is not timed, and one that is
    assert [(each.seconds, each.time) for each in report.models] == [(10, 1), (3, 0.3)]


@pytest.mark.slow
def test_a_device_is_checked_before_anything_is_loaded_and_models_go_there(encoder, pruned, monkeypatch):
    right = {"original": encoder, "changed": pruned, "task": "similarity", "data": ROWS}
    with monkeypatch.context() as patch:
        patch.setattr(candidates, "load_or_explain", lambda *args: pytest.fail("something is loaded"))
        for device, said in (("nonsense", "device 'nonsense': "), ("meta", "device 'meta': weights there have no")):
            with pytest.raises(ArgumentError, match=said):
                evaluate(**right, device=device)
    places = []
    monkeypatch.setattr(candidates, "placed", lambda model, device: places.append(device) or model)
    evaluate(**right, device="cpu:0")
    assert places == ["cpu:0"] * 2  # tried, and scored


def test_tokenizers_are_compared_before_a_model_reads_all(decoder, tmp_path, monkeypatch):
    """Perplexities are of the same tokens alone."""
    copied = shutil.copytree(decoder, tmp_path / "other")
    text = (copied / "tokenizer.json").read_text()
    (copied / "tokenizer.json").write_text(text.replace('"w1":', '"w0":', 1).replace('"w0":', '"w1":', 1))
    read, answers = [], Perplexity.answers
    monkeypatch.setattr(
        Perplexity, "answers", lambda task, *given: read.append(len(task)) or answers(task, *given), raising=True
    )
    with pytest.raises(ArgumentError, match="the tokenizers of the models divide the texts into other tokens"):
        evaluate(decoder, copied, task="perplexity", data=[{"text": row["sentence1"]} for row in ROWS])
    assert read == [CHECKED] * 2


def test_what_is_refused(encoder, decoder, pruned, tmp_path, monkeypatch):
    (tmp_path / "bare").mkdir()
    right = {"original": encoder, "changed": pruned, "task": "similarity", "data": ROWS}
    sharded = copy.copy(pruned)
    sharded.__class__ = type("FSDPBertModel", (FSDPModule, type(pruned)), {})  # as fully_shard makes it
    for wrong, error, said in (
        ({"task": "similarty"}, ArgumentError, r"unknown task 'similarty' \(did you mean 'similarity'\?\); known: "),
        ({"data": None}, ArgumentError, "data is missing, the examples of similarity"),
        ({"data": tmp_path / "none.tsv"}, DataError, "none.tsv"),
        ({"data": [{"sentence1": "a"}]}, DataError, "data has no column 'sentence2'"),
        ({"data": [{1: "a"}]}, ArgumentError, "data must be a file, several files or a list of dicts"),
        ({"changed": {}}, ArgumentError, "changed is empty"),
        ({"changed": "x" * 300}, LoadError, "there is no folder 'xxx"),
        ({"changed": torch.nn.Linear(2, 2)}, UnsupportedModelError, "expected a transformers PreTrainedModel"),
        ({"changed": sharded}, UnsupportedModelError, "FSDPModule in place: .* save the model and load it whole"),
        ({"changed": str(tmp_path / "bare")}, LoadError, "bare holds no model: it has no config.json"),
        ({"changed": tmp_path / "bar"}, LoadError, "^there is no folder .*bar' .did you mean .*bare"),
        ({"changed": decoder, "task": "perplexity", "data": [{"text": "a"}]}, UnsupportedModelError, "BertModel is no"),
        ({"original": pruned}, ArgumentError, "original brings no tokenizer: pass it as tokenizer"),
        ({"batch_size": 0}, ArgumentError, "batch_size 0"),
        ({"max_length": 2}, ArgumentError, "max_length: 2 tokens leave no room"),
        ({"seed": -1}, ArgumentError, "seed must be"),
        ({"task": lambda model, tokenizer: [1.0]}, ArgumentError, "a function has its own examples"),
        ({"task": lambda model, tokenizer: None, "data": None}, ArgumentError, "must return a list with a number"),
    ):
        with pytest.raises(error, match=said):
            evaluate(**right | wrong)
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(MissingPackageError, match="evaluations of similarity need scipy: pip install scipy"):
        evaluate(**right)


@pytest.mark.slow
def test_few_examples_are_warned_of(encoder, warnings_logged):
    evaluate(encoder, encoder, task="similarity", data=ROWS)
    assert "24 examples are few" in warnings_logged.text
    warnings_logged.clear()
    many = [copy.copy(row) for row in ROWS for _ in range(6)]
    evaluate(encoder, encoder, task="similarity", data=many)
    assert "are few" not in warnings_logged.text


def test_a_scorer_scores_as_evaluate_does(encoder, pruned):
    tokenizer, before = AutoTokenizer.from_pretrained(encoder), snapshot(pruned.train())
    report = evaluate(encoder, pruned, task="similarity", data=ROWS)
    score = scorer("similarity", ROWS, tokenizer, batch_size=5)
    assert (
        score(pruned)
        == pytest.approx(report.models[1].scores["Spearman"], abs=1e-3)
        != score(AutoModel.from_pretrained(encoder))
    )
    assert_unchanged(pruned, before)
    prefixed = [row | {name: f"w9 {row[name]}" for name in ("sentence1", "sentence2")} for row in ROWS]
    expected = scorer("similarity", prefixed, tokenizer)(pruned)
    assert scorer("similarity", ROWS, tokenizer, source_prefix="w9 ")(pruned) == pytest.approx(expected, abs=1e-3)
    with pytest.raises(ArgumentError, match="batch_size 0"):
        scorer("similarity", ROWS, tokenizer, batch_size=0)
    with pytest.raises(ArgumentError, match="task"):
        scorer("summary", ROWS, tokenizer)
