"""Methods that remove heads and neurons, tried on a tiny BERT: what they remove, what they cost, and what they lose."""

import importlib
import itertools
import sys
import types

import numpy as np
import pytest
import torch
from model_sizes import FP32_NOISE
from pages import ROOT
from torch.testing import assert_close
from transformers import BertConfig, BertForSequenceClassification

from collab_heads.data import metrics

HEADS, NEURONS, DIM, LAYERS = 4, 24, 32, 2
PEERS = {"retraining_free_layers": "retraining_free_layers", "k_prune": "k_pruned", "grail": "reconstructed"}


@pytest.fixture
def program(monkeypatch):
    """Return a function that imports a program of the benchmarks; Torch-Pruning need not be installed."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    fake = types.SimpleNamespace(importance=types.SimpleNamespace(Importance=object))
    monkeypatch.setitem(sys.modules, "torch_pruning", fake)
    yield importlib.import_module
    sys.modules.pop("dependency_pruning", None)  # it holds the fake


def bert(labels: int = 2):
    torch.manual_seed(0)
    sizes = {"hidden_size": DIM, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    kind = "regression" if labels == 1 else "single_label_classification"
    config = BertConfig(vocab_size=40, intermediate_size=NEURONS, num_labels=labels, problem_type=kind, **sizes)
    config.initializer_range = 0.3
    return BertForSequenceClassification(config).eval()


def draw_for(program, model):
    """Return a draw of 96 examples that the model labels itself."""
    generator, batches = torch.Generator().manual_seed(1), []
    for length in (9, 7, 5):
        ids = torch.randint(3, 40, (32, length), generator=generator)
        mask = torch.ones_like(ids)
        mask[::4, length - 2 :] = 0
        batch = {"input_ids": ids, "attention_mask": mask}
        with torch.no_grad():
            logits = model(**batch).logits
        noise = torch.rand(len(ids), generator=generator)
        batches.append(batch | {"labels": logits.argmax(-1) if logits.shape[1] > 1 else logits[:, 0] + noise})
    return program("classifiers").Draw(0, batches)


@torch.no_grad()
def error(model, original, draw) -> float:
    """Return how far the logits moved, relative to their standard deviation."""
    now, before = (torch.cat([each(**batch).logits for batch in draw.unlabelled]) for each in (model, original))
    return float((now - before).square().mean().sqrt() / before.std())


def test_the_cost_of_units_is_what_torch_counts(program):
    layer_blocks, model = program("layer_blocks"), bert()
    blocks = layer_blocks.blocks_of(model)
    assert layer_blocks.operations(model) == layer_blocks.total_cost(blocks)
    blocks[0].keep(torch.tensor([0, 3]))
    blocks[2].keep(torch.tensor([], dtype=torch.long))
    blocks[1].keep(torch.arange(5))
    assert [block.count for block in blocks] == [2, 5, 0, NEURONS]
    assert layer_blocks.operations(model) == layer_blocks.total_cost(blocks)


@pytest.mark.parametrize("number, kept", ((0, (1, 3)), (0, ()), (1, (0, 7, 20)), (1, ())))
def test_units_that_stay_put_out_what_they_did(program, number, kept):
    layer_blocks, model, masked = program("layer_blocks"), bert(), bert()
    draw, kept = draw_for(program, model), torch.tensor(kept, dtype=torch.long)
    block, other = layer_blocks.blocks_of(model)[number], layer_blocks.blocks_of(masked)[number]
    gone = torch.ones(other.output.dense.in_features, dtype=torch.bool)
    gone[other.columns(kept)] = False
    with torch.no_grad():
        other.output.dense.weight[:, gone] = 0
    block.keep(kept)
    for batch in draw.unlabelled:
        assert_close(model(**batch).logits, masked(**batch).logits, atol=FP32_NOISE, rtol=FP32_NOISE)
    assert error(model, bert(), draw) > 0.01


@pytest.mark.parametrize("labels", (1, 2))
@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_keeps_its_budget_and_loses_more_at_a_smaller_one(program, peer, labels):
    method, layer_blocks, original = getattr(program(peer), PEERS[peer]), program("layer_blocks"), bert(labels)
    draw, errors = draw_for(program, original), []
    for budget in (0.99, 0.6, 0.3):
        model = method(bert(labels), draw, budget)
        share = layer_blocks.operations(model) / layer_blocks.operations(original)
        assert budget - 0.05 < share <= budget
        errors.append(error(model, original, draw))
    assert errors[0] < 0.2 and errors[0] < errors[1] < errors[2]


def test_labels_are_not_looked_at_without_need(program):
    model = bert()
    draw = draw_for(program, model)
    for batch in draw.batches:
        batch["labels"] = 1 - batch["labels"]
    wrong, right = draw, draw_for(program, model)
    for peer in ("k_prune", "grail"):
        method = getattr(program(peer), PEERS[peer])
        ends = [method(bert(), each, 0.5).state_dict() for each in (wrong, right)]
        assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_texts_to_distil_on_are_those_of_the_whole_task_without_labels(program):
    few = [{"input_ids": torch.ones(2, 3), "labels": torch.zeros(2)}]
    many = [*few, *few]
    draw = program("classifiers").Draw(0, few, lambda: many)
    assert len(draw.unlabelled_of_all) == 2 and all(set(batch) == {"input_ids"} for batch in draw.unlabelled_of_all)
    assert len(program("classifiers").Draw(0, few).unlabelled_of_all) == 1


def test_exchanges_lower_the_estimated_loss(program):
    rearranged = program("retraining_free_layers").rearranged
    gradients = torch.randn(50, 6, generator=torch.Generator().manual_seed(0)) @ torch.randn(
        6, 6, generator=torch.Generator().manual_seed(1)
    )
    fisher = gradients.double().T @ gradients.double()

    def loss(gone) -> float:
        return float(fisher[list(gone)][:, list(gone)].sum())

    for count in (1, 2, 3):
        gone = fisher.diagonal().argsort()[:count]
        mask = torch.ones(6).index_fill(0, gone, 0.0)
        found = (rearranged(mask, gradients) == 0).nonzero().flatten().tolist()
        assert len(found) == count
        losses = sorted(loss(each) for each in itertools.combinations(range(6), count))
        assert loss(found) <= loss(gone.tolist())
        assert losses.index(loss(found)) <= 1  # greedy: the best, or the next
    assert rearranged(torch.ones(6), gradients).all()


def test_the_search_finds_the_best_heads_and_neurons_within_a_cost(program):
    blocks = program("layer_blocks").blocks_of(bert())
    generator = torch.Generator().manual_seed(0)
    fisher = [torch.rand(block.count, generator=generator) * (1 if block.is_attention else 0.1) for block in blocks]
    most = 0.4 * sum(block.cost * block.count for block in blocks)
    masks = program("retraining_free_layers").searched(blocks, fisher, most)
    cost = sum(float(mask.sum()) * block.cost for mask, block in zip(masks, blocks, strict=True))
    assert cost <= most
    kept = sum(float((mask * each).sum()) for mask, each in zip(masks, fisher, strict=True))
    ranked = [torch.cat(fisher[kind::2]).sort(descending=True).values for kind in (0, 1)]
    for heads in range(1, HEADS * LAYERS + 1):
        neurons = int((most - heads * blocks[0].cost) / blocks[1].cost)
        if neurons >= 0:
            assert kept >= float(ranked[0][:heads].sum() + ranked[1][:neurons].sum()) - FP32_NOISE


def test_gradients_of_masks_are_those_of_examples(program):
    module, model = program("retraining_free_layers"), bert()
    draw = draw_for(program, model)
    gradients = module.mask_gradients(model, draw.batches)
    batch, step = {name: tensor[:1] for name, tensor in draw.batches[0].items()}, 1e-3
    for number, unit in ((0, 2), (3, 5)):
        losses = []
        for sign in (-1, 1):
            moved = bert()
            block = program("layer_blocks").blocks_of(moved)[number]
            with torch.no_grad():
                block.output.dense.weight[:, block.columns(torch.tensor([unit]))] *= 1 + sign * step
                losses.append(float(moved.double()(**batch).loss))
        assert float(gradients[number][0, unit]) == pytest.approx((losses[1] - losses[0]) / (2 * step), rel=1e-2)


def test_at_the_original_there_is_no_divergence_to_learn_from(program):
    module, model = program("k_prune"), bert()
    draw = draw_for(program, model)
    layer_blocks = program("layer_blocks")
    blocks, states = layer_blocks.blocks_of(model), layer_blocks.first_inputs(model, draw.unlabelled)
    prediction = module.Prediction()
    logits = module.predictions(model, draw.unlabelled, prediction)
    scores = module.knowledge(model, blocks, states, logits, prediction)
    tokens = sum(int(real.sum()) for _, _, real in states)
    norm = sum(units.square().sum(0) for units, _ in layer_blocks.units_of(blocks[0], states)) / tokens
    columns = norm * blocks[0].output.dense.weight.square().mean(0)
    wanted = module.HEADS * module.REPRESENTATIONAL * columns.view(HEADS, -1).mean(1) / blocks[0].cost
    assert_close(scores[0], wanted, atol=0, rtol=1e-3)
    moved = module.knowledge(model, blocks, states, [each.flip(-1) for each in logits], prediction)
    assert all(bool((after > before).all()) for after, before in zip(moved, scores, strict=True))


def test_k_prune_keeps_what_moves_the_vectors_of_sentences(program):
    module, layer_blocks, whole = program("k_prune"), program("layer_blocks"), bert().bert
    draw = draw_for(program, bert())
    prediction = module.Prediction(module.embeddings, module.distance)
    padded = draw.unlabelled[0]
    shorter = {name: tensor[:1, :-2] for name, tensor in padded.items()}  # the first sentence has two tokens of padding
    found = module.predictions(whole, [padded, shorter], prediction)
    assert_close(found[0][:1], found[1], atol=FP32_NOISE, rtol=FP32_NOISE)
    assert_close(found[0].norm(dim=-1), torch.ones(32), atol=FP32_NOISE, rtol=FP32_NOISE)
    gaps = []
    for budget in (0.99, 0.6, 0.3):
        model = module.k_pruned(bert().bert, draw, budget, prediction)
        assert budget - 0.05 < layer_blocks.operations(model) / layer_blocks.operations(whole) <= budget
        pairs = zip(*(module.predictions(each, draw.unlabelled, prediction) for each in (model, whole)), strict=True)
        gaps.append(sum(float(module.distance(now, before)) for now, before in pairs))
    assert gaps[0] < gaps[1] < gaps[2]


def test_losses_of_an_encoder_are_means_over_draws(program):
    rows = [{"method": "original", "budget": 1.0, "draw": 0, "score": 80.0, "elsewhere": 70.0, "retrieval": 60.0}]
    for draw, score in ((1, 77.0), (0, 79.0)):
        row = {"method": "GRAIL", "budget": 0.5, "draw": draw, "score": score, "elsewhere": 70.0, "retrieval": 58.0}
        rows.append(row | {"operations": 0.5, "parameters": 0.5, "cpu_seconds": 3.0})
    original, grail = program("encoder_peers").over_draws(rows)
    assert original["method"] == "original" and grail["losses"] == "1.00, 3.00" and grail["draws"] == 2
    assert (grail["lost"], grail["lost elsewhere"], grail["lost in retrieval"]) == (2.0, 0.0, 2.0)


def test_the_threshold_spends_what_is_left(program):
    blocks = program("layer_blocks").blocks_of(bert())[:2]
    scores = [torch.rand(block.count, generator=torch.Generator().manual_seed(2)) for block in blocks]
    left = 0.5 * sum(block.cost * block.count for block in blocks)
    limit = program("k_prune").threshold(blocks, scores, left)
    cost = [sum(int((each > at).sum()) * b.cost for b, each in zip(blocks, scores, strict=True)) for at in (limit, -1)]
    assert cost[0] < left <= cost[0] + max(block.cost for block in blocks) < cost[1]


@pytest.mark.slow
def test_ours_keeps_the_share_at_the_counted_length(program):
    program, layer_blocks, model = program("layer_peers"), program("layer_blocks"), bert()
    draw = draw_for(importlib.import_module, model)
    for budget in (0.5, 0.3):
        small = program.compressed(model, draw, budget)
        assert budget - 0.05 < layer_blocks.operations(small) / layer_blocks.operations(model) <= budget
        assert program.parameters(small) < program.parameters(model)
    assert error(model, bert(), draw) == 0  # the plan's model is as it was
    assert draw.saved > 0


def row(task, method, budget, draw, score, **more):
    metric = {"mrpc": "accuracy", "stsb": "spearmanr"}[task]
    return {"task": task, "method": method, "budget": budget, "draw": draw, "metrics": {metric: score}} | more


def test_the_table_has_means_over_draws_and_over_tasks(program):
    classifiers = program("classifiers")
    rows = [row("mrpc", "original", 1.0, 0, 80.0), row("stsb", "original", 1.0, 0, 90.0)]
    rows += [row("mrpc", "a", 0.5, draw, score, share=0.4) for draw, score in ((1, 77.0), (0, 79.0))]
    rows += [row("stsb", "a", 0.5, 0, 85.0, share=0.5), row("stsb", "b", 0.5, 0, 86.0, share=0.5)]
    lines = classifiers.collected(rows, ["share"])
    assert [(each["task"], each["method"]) for each in lines] == [
        ("mrpc", "original"),
        ("mrpc", "a"),
        ("stsb", "original"),
        ("stsb", "a"),
        ("stsb", "b"),
    ]
    assert lines[1]["lost"] == 2 and lines[1]["losses"] == "1.00, 3.00" and lines[1]["share"] == 0.4
    (mean,) = classifiers.over_tasks(lines, ["mrpc", "stsb"], ["share"])  # "b" was not run on both
    assert mean["method"] == "a" and mean["lost"] == 3.5 and mean["share"] == pytest.approx(0.45)
    assert mean["task"] == "mean of mrpc, stsb" and classifiers.covered(lines) == [{"mrpc", "stsb"}]


@pytest.mark.parametrize("name", ("accuracy", "matthews_correlation", "spearmanr"))
def test_the_interval_of_a_loss(program, name):
    resampling = program("resampling")
    rng = np.random.default_rng(1)
    labels = rng.integers(2, size=400) if name != "spearmanr" else rng.normal(size=400)
    before, after = labels.copy(), labels.copy()
    before[:20], after[:80] = 1 - before[:20], 1 - after[:80]
    for found in (before, after, np.ones(400)):
        score = metrics.METRICS[name](labels, found)
        assert resampling.METRICS[name](found, labels) == pytest.approx(score, abs=1e-9)
    low, high = resampling.lost_interval(name, before, after, labels)
    lost = 100 * (resampling.METRICS[name](before, labels) - resampling.METRICS[name](after, labels))
    assert 0 < low < lost < high and high - low < lost  # 60 of 400 examples
    assert resampling.lost_interval(name, before, before, labels) == (0, 0)


def test_rows_that_are_there_are_not_measured_again(program, tmp_path, monkeypatch):
    classifiers, calls = program("classifiers"), []

    class Task:
        def __init__(self, name, work):
            self.name = name

        def load(self):
            return 4

        def scores(self, model):
            return {"metrics": {"accuracy": float(model)}}

        def draw(self, number, count):
            return classifiers.Draw(number, [{"labels": [0] * count}])

    def halved(model, draw, budget):
        calls.append((draw.number, budget))
        return model // 2

    monkeypatch.setattr(classifiers, "Task", Task)
    monkeypatch.setattr(classifiers, "trained", lambda name, work: None)
    place = tmp_path / "rows.jsonl"
    settings = (["mrpc"], {"halved": halved}, (0.5,))
    for draws in ([0], [0, 1]):
        classifiers.measure_missing(place, *settings, draws, 3, {"size": float})
    assert calls == [(0, 0.5), (1, 0.5)]
    rows = classifiers.stored(place)
    assert [each["method"] for each in rows] == ["original", "halved", "halved"]
    assert rows[1]["size"] == 0.5 and rows[1]["examples"] == 3 and rows[1]["metrics"] == {"accuracy": 2.0}
