"""Methods of others that make a decoder smaller, tried on a tiny Llama: what they remove, fit and keep."""

import importlib
import itertools

import pytest
import torch
from model_sizes import EXACT64, FP32_NOISE
from pages import ROOT
from torch import nn
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM

DIM, HEADS, KEY_HEADS, NEURONS, LAYERS, VOCABULARY = 32, 4, 2, 48, 4, 61
NEURON = 3 * DIM  # parameters
ROTATED = 10 * FP32_NOISE  # four layers in other bases, in float32; errors seen: 3e-5
# method -> its file, its function, and a bound of the parameters of its unit
METHODS = {
    "SliceGPT": ("slicegpt", "sliced", LAYERS * (3 * NEURONS + 3 * DIM + 4 * DIM)),
    "ReplaceMe": ("decoder_peers", "replaced", 3 * DIM * DIM + NEURONS * NEURON),
    "FLAP": ("decoder_peers", "flap", NEURON),
    "2SSP": ("decoder_peers", "two_stages", LAYERS * NEURON),
    "OSSCAR": ("osscar", "osscar", LAYERS * NEURON),
}


@pytest.fixture
def program(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


@pytest.fixture
def peers(program):
    return program("decoder_peers")


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": DIM, "intermediate_size": NEURONS, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS}
    config = LlamaConfig(**sizes, **heads, tie_word_embeddings=True, initializer_range=0.2)
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def texts():
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(VOCABULARY, (4, 16), generator=generator)} for _ in range(3)]


@torch.no_grad()
def logits(model):
    return torch.cat([model(**batch, use_cache=False).logits for batch in texts()])


@torch.no_grad()
def inputs_of(model, modules):
    """Return the inputs of modules in all texts: module -> [texts, tokens, in]."""
    found = [[] for _ in modules]
    for at, module in enumerate(modules):
        module.register_forward_pre_hook(lambda _, inputs, at=at: found[at].append(inputs[0]))
    logits(model)
    return [torch.cat(each) for each in found]


def norm_of(hidden, norm, dim=DIM):
    return hidden / (hidden.square().sum(-1, keepdim=True) / dim + norm.variance_epsilon).sqrt() * norm.weight


@pytest.mark.parametrize("budget", (0.87, 0.57))
@pytest.mark.parametrize("method", METHODS)
def test_a_peer_uses_its_budget_up_to_a_unit(program, peers, method, budget):
    name, function, unit = METHODS[method]
    model = getattr(program(name), function)(llama(), texts(), budget)
    before = peers.layer_parameters(llama())
    assert before == LAYERS * (3 * DIM * DIM + NEURONS * NEURON)
    assert budget * before - unit < peers.layer_parameters(model) <= budget * before
    assert torch.isfinite(logits(model)).all()
    assert (logits(model) - logits(llama())).abs().max() > 0.01


def test_what_is_counted_is_all_but_norms_and_embeddings(program, peers):
    model = program("slicegpt").sliced(llama(), texts(), 0.8)
    width = model.model.embed_tokens.weight.shape[1]
    norms = sum(parameter.numel() for name, parameter in model.named_parameters() if "norm" in name)
    assert norms == DIM  # only the last one has a scale
    assert model.num_parameters() == peers.layer_parameters(model) + norms + VOCABULARY * (width + DIM)


@pytest.mark.parametrize("is_attention, kept", ((True, (1,)), (True, ()), (False, (0, 7, 20)), (False, ())))
def test_units_that_stay_put_out_what_they_did(peers, is_attention, kept):
    model, masked, kept = llama(), llama(), torch.tensor(kept, dtype=torch.long)
    units, others = (peers.Units(each.model.layers[1], is_attention) for each in (model, masked))
    before, count = peers.layer_parameters(model), units.count
    gone = torch.ones(others.last.in_features, dtype=torch.bool)
    gone[others.columns(kept)] = False
    with torch.no_grad():
        others.last.weight[:, gone] = 0
    units.keep(kept)
    assert_close(logits(model), logits(masked), atol=FP32_NOISE, rtol=FP32_NOISE)
    assert before - peers.layer_parameters(model) == (count - len(kept)) * units.cost
    assert (logits(model) - logits(llama())).abs().max() > 0.01


def test_slicegpt_without_slicing_is_the_original(program):
    model = program("slicegpt").sliced(llama(), texts(), 2.0)
    assert model.model.embed_tokens.weight.shape == (VOCABULARY, DIM)
    assert not torch.equal(model.model.embed_tokens.weight, llama().model.embed_tokens.weight)
    assert_close(logits(model), logits(llama()), atol=ROTATED, rtol=ROTATED)


@torch.no_grad()
def test_slicegpt_projects_the_stream_before_every_block(program):
    model = program("slicegpt").sliced(llama(), texts(), 0.8)
    width, whole = model.model.embed_tokens.weight.shape[1], llama()
    assert DIM / 2 < width < 0.8 * DIM
    ids = torch.cat([batch["input_ids"] for batch in texts()])
    positions = whole.model.rotary_emb(whole.model.embed_tokens(ids), torch.arange(ids.shape[1])[None])

    def projected(hidden):
        left, _, _ = torch.linalg.svd(hidden.flatten(0, 1).double().T, full_matrices=False)
        return (hidden.double() @ left[:, :width] @ left[:, :width].T).float()

    hidden = projected(whole.model.embed_tokens(ids))
    for number, layer in enumerate(whole.model.layers):
        read = norm_of(hidden, layer.input_layernorm)
        hidden = projected(hidden + layer.self_attn(read, positions, None, is_causal=True)[0])
        hidden = hidden + layer.mlp(norm_of(hidden, layer.post_attention_layernorm))
        hidden = projected(hidden) if number < LAYERS - 1 else hidden
    expected = norm_of(hidden, whole.model.norm) @ whole.lm_head.weight.T
    assert_close(logits(model), expected, atol=ROTATED, rtol=ROTATED)


class Linear(nn.Module):
    """A block that adds a linear map of what a feed-forward network put out."""

    def __init__(self, mlp, matrix):
        super().__init__()
        self.matrix = matrix
        mlp.register_forward_hook(lambda _, __, output: setattr(self, "seen", output))

    def forward(self, hidden_states, **_):
        return hidden_states + self.seen @ self.matrix


def with_linear_blocks():
    """Return a Llama whose blocks 1 and 2 add linear maps of what the feed-forward network of block 0 puts out."""
    model, generator = llama(), torch.Generator().manual_seed(2)
    for number in (1, 2):
        matrix = 0.05 * torch.randn(DIM, DIM, generator=generator)
        model.model.layers[number] = Linear(model.model.layers[0].mlp, matrix)
    return model


def test_replaceme_is_exact_where_blocks_are_linear(peers, monkeypatch):
    monkeypatch.setattr(peers, "RIDGE", 1e-12)
    small, wanted = peers.replaced(with_linear_blocks(), texts(), 0.5), logits(with_linear_blocks())
    assert [type(layer).__name__ for layer in small.model.layers] == ["LlamaDecoderLayer"] * 2
    assert_close(logits(small), wanted, atol=FP32_NOISE, rtol=FP32_NOISE)
    small.model.layers[0].mlp.down_proj = llama().model.layers[0].mlp.down_proj
    assert (logits(small) - wanted).abs().max() > 0.01


def test_replaceme_takes_the_blocks_of_the_smallest_cosine_distance(peers):
    for changed in (1, 2, 3):  # of two blocks beside each other: 1 and 2, or 2 and 3
        model = llama()
        with torch.no_grad():
            for number, layer in enumerate(model.model.layers):
                for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
                    last.weight.mul_(5.0 if number == changed else 0.5)
        states = inputs_of(model, [*model.model.layers, model.model.norm])
        distances = [
            float((1 - nn.functional.cosine_similarity(states[at], states[at + 2], dim=-1)).mean()) for at in (1, 2)
        ]
        first = distances.index(min(distances)) + 1
        assert first == (2 if changed == 1 else 1) or changed == 2
        kept = [
            layer.self_attn.q_proj.weight for at, layer in enumerate(model.model.layers) if at - first not in (0, 1)
        ]
        small = peers.replaced(model, texts(), 0.5)
        assert all(a is b.self_attn.q_proj.weight for a, b in zip(kept, small.model.layers, strict=True))


@pytest.mark.slow
@torch.no_grad()
def test_flap_scores_are_those_of_a_loop(peers):
    model = llama()
    units = peers.units_of(model)
    _, variances = peers.moments(model, texts(), [each.last for each in units])
    for each, inputs, variance in zip(units, inputs_of(model, [u.last for u in units]), variances, strict=True):
        tokens, scores = inputs.flatten(0, 1).double(), []
        assert_close(variance, tokens.var(0), atol=EXACT64, rtol=EXACT64)
        for column in range(tokens.shape[1]):
            fluctuates = sum(float(value - tokens[:, column].mean()) ** 2 for value in tokens[:, column])
            score = fluctuates / (len(tokens) - 1) * float(each.last.weight[:, column].double().norm()) ** 2
            scores.append(score**2 if each.is_attention else score)
        scores = torch.tensor(scores, dtype=torch.float64)
        scores = (scores - scores.mean()) / scores.std()
        if each.is_attention:  # two heads of width 8 share a key head
            scores = torch.stack([scores[:16].mean(), scores[16:].mean()])
        assert_close(peers.fluctuation(each, variance), scores, atol=EXACT64, rtol=EXACT64)


@torch.no_grad()
@pytest.mark.parametrize("budget", (0.8, 0.3))
def test_flap_leaves_the_mean_output_of_every_module(program, peers, budget):
    whole, states = llama(), program("slicegpt").first_inputs(llama(), texts())
    small = peers.flap(llama(), texts(), budget)
    norms = [norm for layer in whole.model.layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    inputs, rest, moved = inputs_of(whole, norms), states[0][1], []
    rest["position_embeddings"] = whole.model.rotary_emb(inputs[0], torch.arange(16)[None])
    for number, (layer, other) in enumerate(zip(whole.model.layers, small.model.layers, strict=True)):
        read = norms[2 * number](inputs[2 * number])
        attended = [
            each.self_attn(hidden_states=read, **rest)[0].expand_as(read).flatten(0, 1) for each in (layer, other)
        ]
        read = norms[2 * number + 1](inputs[2 * number + 1])
        for before, after in (attended, [each.mlp(read).flatten(0, 1) for each in (layer, other)]):
            assert_close(after.mean(0), before.mean(0), atol=FP32_NOISE, rtol=FP32_NOISE)
            moved.append(float((after - before).abs().max()))
    assert max(moved) > 0.01
    gone = [isinstance(layer.self_attn, peers.WithoutHeads) for layer in small.model.layers]
    assert any(gone) == (budget == 0.3)


def test_flap_takes_the_highest_scores_that_fit(peers):
    scores = [torch.tensor([3.0, 1.0]), torch.tensor([0.0, 2.5, 0.5])]
    kept = [each.tolist() for each in peers.filled(scores, [10, 1], 12.0)]
    assert kept == [[0], [1, 2]]  # the second group, of score 1, does not fit; the neurons after it do
    assert [each.tolist() for each in peers.filled(scores, [10, 1], 9.0)] == [[], [0, 1, 2]]


def test_2ssp_ranks_neurons_by_the_norm_over_texts(peers):
    model = llama()
    activations = inputs_of(model, [layer.mlp.down_proj for layer in model.model.layers])
    small = peers.two_stages(llama(), texts(), 0.9)
    for layer, other, active in zip(model.model.layers, small.model.layers, activations, strict=True):
        norms = [sum(float(text[:, neuron].norm()) for text in active) for neuron in range(NEURONS)]
        count = other.mlp.down_proj.in_features
        kept = sorted(sorted(range(NEURONS), key=lambda neuron: -norms[neuron])[:count])
        assert count == 40  # 0.1 of 7680 parameters are 8 neurons of 96
        assert torch.equal(other.mlp.up_proj.weight, layer.mlp.up_proj.weight[kept])
        assert torch.equal(other.mlp.gate_proj.weight, layer.mlp.gate_proj.weight[kept])
        assert torch.equal(other.mlp.down_proj.weight, layer.mlp.down_proj.weight[:, kept])


@torch.no_grad()
def test_2ssp_removes_the_attention_that_perplexity_misses_least(peers):
    small = peers.two_stages(llama(), texts(), 0.6)
    gone = {at for at, layer in enumerate(small.model.layers) if isinstance(layer.self_attn, peers.WithoutHeads)}
    model, wanted = llama(), set()
    for layer, other in zip(model.model.layers, small.model.layers, strict=True):
        layer.mlp = other.mlp
    for _ in range(round(LAYERS * 0.4 ** (4608 / 3072 / 1.5))):
        losses = {}
        for at in set(range(LAYERS)) - wanted:
            weight = model.model.layers[at].self_attn.o_proj.weight
            kept = weight.clone()
            weight.zero_()
            losses[at] = float(model(**texts()[0], labels=texts()[0]["input_ids"]).loss)
            weight.copy_(kept)
        best = min(losses, key=losses.get)
        model.model.layers[best].self_attn.o_proj.weight.zero_()
        wanted.add(best)
    assert gone == wanted and len(gone) == 2


def problem_of(program, is_attention):
    """Return the problem of the second layer, and what is needed to compute its error anew."""
    model = llama()
    units = program("decoder_peers").Units(model.model.layers[1], is_attention)
    problem = program("osscar").Problem(units)
    (inputs,) = inputs_of(model, [units.last])
    problem.add(inputs.detach())
    tokens = inputs.detach().flatten(0, 1).double()
    ridge = 0.01 * tokens.square().sum(0).mean()

    def error(kept):
        """Fit by rows that hold the ridge: the squared error, and the weight [columns, D]."""
        rows = torch.cat([tokens, ridge.sqrt() * torch.eye(tokens.shape[1]).double()])
        columns = [unit * units.width + at for unit in kept for at in range(units.width)]
        target = rows @ units.last.weight.double().T
        weight = torch.linalg.lstsq(rows[:, columns], target).solution
        return float((target - rows[:, columns] @ weight).square().sum()), weight, torch.tensor(columns)

    return problem, error


@torch.no_grad()
@pytest.mark.parametrize("is_attention", (True, False))
def test_osscar_fits_and_knows_what_a_unit_costs(program, is_attention):
    problem, error = problem_of(program, is_attention)
    kept = [0] if is_attention else [*range(0, NEURONS, 2)]
    loss, weight, columns = error(kept)
    assert_close(problem.fitted(columns), weight, atol=EXACT64, rtol=EXACT64)
    inverse = torch.zeros_like(problem.gram)
    inverse[columns[:, None], columns] = torch.linalg.inv(problem.gram[columns][:, columns])
    right = problem.gram @ problem.weight
    there = torch.zeros(problem.count, dtype=torch.bool)
    there[kept] = True
    gains = problem.gains(there, problem.gram, inverse, right - problem.gram @ inverse @ right)
    for unit in range(problem.count):
        if unit not in kept:
            assert float(gains[unit]) == pytest.approx(loss - error(sorted([*kept, unit]))[0], rel=1e-6)
    if not is_attention:
        fitted = inverse @ right
        losses = {unit: error([each for each in kept if each != unit])[0] for unit in kept}
        problem.remove(1, there, inverse, fitted)
        gone = min(losses, key=losses.get)
        assert there.nonzero().flatten().tolist() == [each for each in kept if each != gone]
        _, weight, columns = error([each for each in kept if each != gone])
        assert_close(fitted[columns], weight, atol=EXACT64, rtol=EXACT64)
        left = torch.linalg.inv(problem.gram[columns][:, columns])
        assert_close(inverse[columns][:, columns], left, atol=EXACT64, rtol=EXACT64)


@torch.no_grad()
def test_osscar_finds_units_that_are_hard_to_better(program):
    problem, error = problem_of(program, True)
    errors = [error([unit])[0] for unit in range(KEY_HEADS)]
    assert problem.searched(1, 1).tolist() == [errors.index(min(errors))]
    problem, error = problem_of(program, False)
    kept = problem.searched(24, 10).tolist()
    loss, rng = error(kept)[0], torch.Generator().manual_seed(3)
    assert len(kept) == 24 and kept == sorted(kept)
    for _ in range(30):
        assert loss < error(sorted(torch.randperm(NEURONS, generator=rng)[:24].tolist()))[0]
    gone = sorted(set(range(NEURONS)) - set(kept))
    better = [
        (out, back)
        for out, back in itertools.product(kept[:6], gone[:6])
        if error(sorted([*set(kept) - {out}, back]))[0] < 0.99 * loss
    ]
    assert not better


@torch.no_grad()
def test_osscar_removes_one_by_one_what_costs_least(program, monkeypatch):
    monkeypatch.setattr(program("osscar"), "EXCHANGES", 0)
    problem, error = problem_of(program, False)
    kept = set(range(NEURONS))
    while len(kept) > 42:
        kept.remove(min(kept, key=lambda unit: error(sorted(kept - {unit}))[0]))
    assert problem.searched(42, 1).tolist() == sorted(kept)


@torch.no_grad()
def test_osscar_exchanges_units_that_went_together(program):
    problem, _ = problem_of(program, False)
    problem.count, problem.weight = 4, torch.eye(4).double()
    problem.weight[:2] *= 2
    problem.products = torch.eye(4).double()
    problem.products[0, 1] = problem.products[1, 0] = 1 - 1e-4  # twins: each can be computed from the other
    assert problem.searched(2, 2).tolist() == [0, 1]  # both go at first, since the other seems to be left
    assert problem.searched(3, 2).tolist() in ([0, 2, 3], [1, 2, 3])


def test_osscar_keeps_the_share_of_groups_next_to_the_budget(program, peers):
    model = llama()
    units, whole = peers.units_of(model), peers.layer_parameters(model)
    assert program("osscar").even_counts(units, 0.57 * whole) == {True: 1, False: 29}  # 0.57 * 7680 = 4377.6
    assert program("osscar").even_counts(units, 0.8 * whole) == {True: 2, False: 32}  # 6144 - 3072 = 32 * 96


@torch.no_grad()
def test_osscar_sees_what_the_pruned_layers_put_out(program):
    model, whole = program("osscar").osscar(llama(), texts(), 0.8), llama()
    layer = model.model.layers[1]
    (inputs,) = inputs_of(model, [layer])
    whole.model.layers[0] = model.model.layers[0]
    original = whole.model.layers[1]
    (activations,) = inputs_of(whole, [original.mlp.down_proj])
    assert_close(inputs_of(whole, [original])[0], inputs, atol=FP32_NOISE, rtol=FP32_NOISE)
    tokens, weight = activations.flatten(0, 1).double(), original.mlp.down_proj.weight.double()
    gram = tokens.T @ tokens
    gram = gram + 0.01 * gram.diagonal().mean() * torch.eye(NEURONS).double()
    kept = [int((original.mlp.up_proj.weight == row).all(1).nonzero()) for row in layer.mlp.up_proj.weight]
    expected = torch.linalg.solve(gram[kept][:, kept], gram[kept] @ weight.T).T
    assert_close(layer.mlp.down_proj.weight, expected.float(), atol=FP32_NOISE, rtol=FP32_NOISE)
