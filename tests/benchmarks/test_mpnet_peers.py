"""K-prune and GRAIL on a tiny MPNet: its blocks, what the methods remove and fit, and their budgets of parameters."""

import importlib
import math
import types

import pytest
import torch
from model_sizes import EXACT64, FP32_NOISE
from pages import ROOT
from torch import nn
from torch.testing import assert_close
from transformers import MPNetConfig, MPNetModel

from collab_heads.running.embeddings import embed

DIM, HEADS, WIDTH, NEURONS, LAYERS = 32, 4, 8, 24, 2
HEAD, NEURON = (4 * DIM + 3) * WIDTH, 2 * DIM + 1  # parameters
UNITS = HEADS * HEAD + NEURONS * NEURON  # of a layer
FITTED = 2e-4  # what is fitted on products of float32; errors seen: 3e-5
STEP, DIFFERENCE = 1e-4, 1e-5  # of a factor; relative error of knowledge, seen: 1e-7
PEERS = ("kprune", "grail")


@pytest.fixture
def program(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


@pytest.fixture
def peers(program):
    return program("mpnet_peers")


def mpnet():
    torch.manual_seed(0)
    sizes = {"hidden_size": DIM, "num_attention_heads": HEADS, "intermediate_size": NEURONS}
    config = MPNetConfig(vocab_size=61, num_hidden_layers=LAYERS, initializer_range=0.3, **sizes)
    model = MPNetModel(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            middle = float("LayerNorm.weight" in name)
            nn.init.uniform_(parameter, middle - 0.5, middle + 0.5)
    return model


def sentences(more_padding=0):
    generator, batches = torch.Generator().manual_seed(1), []
    for length in (9, 7, 12):
        ids = torch.randint(3, 61, (32, length), generator=generator)
        mask = torch.ones_like(ids)
        mask[::5, length - 2 :] = 0
        ids, mask = (nn.functional.pad(each, (0, more_padding)) for each in (ids, mask))
        batches.append({"input_ids": ids, "attention_mask": mask})
    return batches


@torch.no_grad()
def vectors(model):
    return embed(model, sentences())


def parameters(model):
    """Count the parameters of the projections of the layers."""
    named = model.encoder.layer.named_parameters()
    return sum(parameter.numel() for name, parameter in named if "LayerNorm" not in name)


def projections(layer):
    """Return the last projections of a layer, and the norms behind them."""
    return (layer.attention.attn.o, layer.attention.LayerNorm), (layer.output.dense, layer.output.LayerNorm)


@torch.no_grad()
def seen_of(model):
    """Return of every block the input, what units put out, and the sum before the norm: [tokens, .], float64."""
    found = [([], [], []) for _ in range(2 * LAYERS)]
    modules, handles, real = [], [], None
    for layer in model.encoder.layer:
        modules += zip((layer.attention.attn, layer.intermediate), *zip(*projections(layer), strict=True), strict=True)
    for place, hooked in zip(found, modules, strict=True):
        for kept, module in zip(place, hooked, strict=True):
            handles.append(module.register_forward_pre_hook(lambda _, args, kept=kept: kept.append(args[0][real])))
    for batch in sentences():
        real = batch["attention_mask"].bool()
        model(**batch)
    for handle in handles:
        handle.remove()
    return [[torch.cat(each).double() for each in place] for place in found]


def test_blocks_compute_what_the_model_does(program, peers):
    model, layer_blocks = mpnet(), program("layer_blocks")
    kept = ((1, 3), (0, 5, 7), (), (0,))
    for is_pruned in (False, True):
        states = layer_blocks.first_inputs(model, sentences())
        for block, units in zip(peers.mpnet_blocks(model), kept, strict=True):
            if is_pruned:
                block.keep(torch.tensor(units, dtype=torch.long))
            states = layer_blocks.through(block, states)
        for (hidden, _, real), batch in zip(states, sentences(), strict=True):
            found = model(**batch).last_hidden_state[real]
            assert_close(hidden[real], found, atol=FP32_NOISE, rtol=FP32_NOISE)


@pytest.mark.parametrize("number, kept", ((0, (1, 3)), (2, ()), (1, (0, 7, 20)), (3, ())))
def test_units_that_stay_put_out_what_they_did(peers, number, kept):
    model, masked, kept = mpnet(), mpnet(), torch.tensor(kept, dtype=torch.long)
    block, other = peers.mpnet_blocks(model)[number], peers.mpnet_blocks(masked)[number]
    count, gone = block.count, torch.ones(other.output.dense.in_features, dtype=torch.bool)
    assert (count, block.cost) == ((HEADS, HEAD) if number in (0, 2) else (NEURONS, NEURON))
    gone[other.columns(kept)] = False
    with torch.no_grad():
        other.output.dense.weight[:, gone] = 0
    block.keep(kept)
    assert block.count == len(kept)
    assert parameters(mpnet()) - parameters(model) == (count - len(kept)) * block.cost
    assert_close(vectors(model), vectors(masked), atol=FP32_NOISE, rtol=FP32_NOISE)
    assert (vectors(model) - vectors(mpnet())).abs().max() > 0.01


@pytest.mark.parametrize("peer, unit", (("kprune", NEURON), ("grail", LAYERS * NEURON)))
def test_a_peer_uses_its_budget_up_to_a_unit_and_loses_more_at_a_smaller_one(peers, peer, unit):
    whole, lost = parameters(mpnet()), []
    assert whole == LAYERS * (UNITS + 2 * DIM)
    for budget in (1.0, 0.9, 0.5, 0.3):
        model = getattr(peers, peer)(mpnet(), sentences(), budget)
        assert budget * whole - unit < parameters(model) <= budget * whole
        lost.append(float((vectors(model) - vectors(mpnet())).square().sum(-1).mean()))
    assert math.sqrt(lost[0]) < FP32_NOISE
    assert 1e-4 < lost[1] < lost[2] < lost[3]


@pytest.mark.parametrize("peer", PEERS)
def test_padding_does_not_count(peers, peer):
    ends = [getattr(peers, peer)(mpnet(), sentences(padding), 0.6).state_dict() for padding in (0, 3)]
    assert ends[0].keys() == ends[1].keys()
    for name in ends[0]:
        assert_close(ends[0][name], ends[1][name], atol=FITTED, rtol=FITTED)


def test_knowledge_is_that_of_a_loop(program, peers):
    module, layer_blocks, model = program("k_prune"), program("layer_blocks"), mpnet().double().requires_grad_(False)
    prediction, generator = module.Prediction(module.embeddings, module.distance), torch.Generator().manual_seed(2)
    predicted = [torch.randn(32, DIM, generator=generator).double() for _ in sentences()]
    found = module.knowledge(
        model, peers.mpnet_blocks(model), layer_blocks.first_inputs(model, sentences()), predicted, prediction
    )
    seen = seen_of(model)
    tokens = len(seen[0][0])

    def losses(dense, column, factor):
        """Return the squared distance from the prediction, by batch, when a factor is on a column."""
        dense.weight[:, column] *= factor
        rows = [embed(model, [batch]) for batch in sentences()]
        dense.weight[:, column] /= factor
        return torch.stack([(a - b).square().sum(1).mean() for a, b in zip(rows, predicted, strict=True)])

    for number, unit in ((0, 2), (1, 5), (2, 1), (3, 23)):
        is_attention, knowledge = number % 2 == 0, []
        dense, _ = projections(model.encoder.layer[number // 2])[number % 2]
        for column in range(unit * WIDTH, (unit + 1) * WIDTH) if is_attention else (unit,):
            change = (losses(dense, column, 1 + STEP) - losses(dense, column, 1 - STEP)) / (2 * STEP)
            added = seen[number][1][:, column, None] * dense.weight[:, column]  # [tokens, D]
            norm = float(added.square().mean(1).sum()) / tokens
            knowledge.append(float(change.square().sum()) / 2 / (32 * len(sentences())) + 2.5e-4 * norm)
        wanted = sum(knowledge) / len(knowledge) / (HEAD / 64 if is_attention else NEURON)
        assert float(found[number][unit]) == pytest.approx(wanted, rel=DIFFERENCE)


@pytest.mark.parametrize("budget", (1.0, 0.5))
def test_k_prune_fits_every_block_to_the_original(peers, budget):
    small = peers.kprune(mpnet(), sentences(), budget)
    fitted = []
    for number, (now, before) in enumerate(zip(seen_of(small), seen_of(mpnet()), strict=True)):
        dense, _ = projections(small.encoder.layer[number // 2])[number % 2]
        if not dense.in_features:
            assert not dense.bias.any()
            continue
        put_out = now[1] @ dense.weight.detach().double().T
        target = before[2] - (now[2] - put_out)  # the input of the block and the bias are in both
        best = now[1] @ torch.linalg.lstsq(now[1], target).solution.T.T
        assert_close(put_out, best, atol=FITTED, rtol=FITTED)
        original, _ = projections(mpnet().encoder.layer[number // 2])[number % 2]
        fitted.append(
            dense.weight.shape != original.weight.shape or (dense.weight - original.weight).abs().max() > 0.01
        )
    assert any(fitted) == (budget < 1)


def test_k_prune_takes_units_of_all_blocks_by_knowledge(program, peers):
    """The first block loses what a search over all units would remove, with all of the budget."""
    module, layer_blocks, model = program("k_prune"), program("layer_blocks"), mpnet().requires_grad_(False)
    blocks, states = peers.mpnet_blocks(model), layer_blocks.first_inputs(model, sentences())
    prediction = module.Prediction(module.embeddings, module.distance)
    scores = module.knowledge(model, blocks, states, module.predictions(model, sentences(), prediction), prediction)
    ranked = sorted((float(s), at, unit) for at, each in enumerate(scores) for unit, s in enumerate(each))
    for budget in (0.8, 0.3):
        room, gone = budget * parameters(model) - 2 * LAYERS * DIM - LAYERS * UNITS, set()
        for _, at, unit in ranked:
            if room > 0:
                break
            gone.add((at, unit))
            room += blocks[at].cost
        small = peers.kprune(mpnet(), sentences(), budget)
        left = [unit for unit in range(HEADS) if (0, unit) not in gone]
        assert peers.mpnet_blocks(small)[0].count == len(left)
        if left:
            query = mpnet().encoder.layer[0].attention.attn.q.weight.view(HEADS, WIDTH, DIM)
            assert torch.equal(small.encoder.layer[0].attention.attn.q.weight, query[left].flatten(0, 1))


@torch.no_grad()
def test_grail_keeps_and_reconstructs_as_a_loop_does(program, peers):
    small, whole, layer_blocks = peers.grail(mpnet(), sentences(), 0.6), mpnet(), program("layer_blocks")
    states = layer_blocks.first_inputs(whole, sentences())
    for now, before in zip(peers.mpnet_blocks(small), peers.mpnet_blocks(whole), strict=True):
        units = torch.cat([each for each, _ in layer_blocks.units_of(before, states)]).double()
        weight, scores = before.output.dense.weight.double(), []
        for unit in range(before.count):
            columns = range(unit * before.width, (unit + 1) * before.width)
            scores.append(sum(float(weight[:, at].abs().sum() * units[:, at].norm()) for at in columns))
        kept = sorted(sorted(range(before.count), key=lambda unit: -scores[unit])[: now.count])
        columns = [unit * before.width + at for unit in kept for at in range(before.width)]
        first = [each.attention.q if each.is_attention else each.layer.intermediate.dense for each in (now, before)]
        assert now.count == (2 if now.is_attention else 20)
        assert torch.equal(first[0].weight, first[1].weight[columns])
        ridge = 1e-3 * units[:, columns].square().sum(0).mean()
        rows = torch.cat([units[:, columns], ridge.sqrt() * torch.eye(len(columns)).double()])
        target = torch.cat([units, torch.zeros(len(columns), units.shape[1]).double()])
        wanted = weight @ torch.linalg.lstsq(rows, target).solution.T
        assert_close(now.output.dense.weight.double(), wanted, atol=FITTED, rtol=FITTED)
        states = layer_blocks.through(now, states)


@pytest.mark.parametrize("method", ("K-prune", "GRAIL"))
def test_the_benchmark_gives_peers_the_sentences_of_compress(program, method):
    real_encoder, calls = program("real_encoder"), []

    def draw(*settings):
        calls.append(settings)
        return sentences()

    encoder = types.SimpleNamespace(load=mpnet, draw=draw)
    made = real_encoder.METHODS[method](real_encoder.Draw(encoder, 3), 0.5)
    assert calls == [("mixed", real_encoder.CALIBRATION, 3)] and method in real_encoder.WITH_BUDGET
    assert made.encoder is encoder and made.seconds > 0
    assert parameters(made.model) <= 0.5 * parameters(mpnet())
    name = {"K-prune": "kprune", "GRAIL": "grail"}[method]
    wanted = getattr(program("mpnet_peers"), name)(mpnet(), sentences(), 0.5)
    assert_close(vectors(made.model), vectors(wanted), atol=EXACT64, rtol=EXACT64)


def test_the_prediction_of_k_prune_is_the_vector_of_a_sentence(program, peers, monkeypatch):
    calls, module = [], program("k_prune")
    monkeypatch.setattr(peers, "k_pruned", lambda *arguments: calls.append(arguments))
    peers.kprune(mpnet(), sentences(), 0.5)
    assert calls[0][3] == module.Prediction(module.embeddings, module.distance)
