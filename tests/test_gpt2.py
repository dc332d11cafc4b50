"""What only GPT-2 has: fused projections that are stored the other way, a second eager attention, a scale by layer."""

import copy

import pytest
import torch
from changed_heads import adapter_sites, change_heads, mix, output_projections
from model_configs import gpt2_config
from model_inputs import cast, cross_batch, lone_batch
from model_runs import output, set_backend, sites, swap
from model_sizes import EXACT64, FP32_NOISE, HEAD_WIDTH, HEADS, KINDS, NARROW, WIDTH
from opening import layers_of
from test_continuation_contract import generate
from torch import nn
from transformers import AutoModelForCausalLM, GPT2ForSequenceClassification, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D
from unchanged import assert_unchanged, refused, snapshot

from collab_heads import (
    collaborative_config,
    compress,
    distill,
    fold_heads,
    prune_heads,
    rotate_heads,
    swap_to_alpha,
    swap_to_collaborative,
    swap_to_gated,
)
from collab_heads.errors import ModelStateError
from collab_heads.layers.fused import FusedPart
from collab_heads.layers.output import ConstantOutput
from collab_heads.running.batches import token_masks
from families import FAMILIES, make

CROSS, ALONE = FAMILIES["gpt2-decoder"], FAMILIES["gpt2"]
FIRST, ATTENDS = "h.0.attn", "h.1.crossattention"
SPREAD = 4  # standard errors of a mean, or of a standard deviation, of normal draws
BF16 = 0.03  # relative, of bfloat16 logits after another basis of the values; seen: 6e-3


def opened(model):
    return {site.path: site for site in layers_of(model).with_heads}


def test_reading_leaves_a_stock_model_stock():
    model = CROSS.build()
    before = snapshot(model)
    for site in opened(model).values():
        assert site.read().num_heads == HEADS and site.query_key_width == site.dim_value == WIDTH
        assert {type(part) for part in (*site.projections, site.value)} == {FusedPart}
    assert_unchanged(model, before)
    assert {type(module) for module in model.modules() if hasattr(module, "nf")} == {Conv1D}


def test_the_scale_is_that_of_the_layer():
    scales = [opened(CROSS.build())[f"h.{layer}.attn"].read().scale for layer in range(2)]
    assert scales == pytest.approx([HEAD_WIDTH**-0.5, HEAD_WIDTH**-0.5 / 2], rel=1e-12)


def test_removed_heads_leave_columns_of_every_third():
    """By hand; `split_size` follows, so that the stock forward splits what is left."""
    stock, model = CROSS.build(), CROSS.build()
    prune_heads(model, heads={FIRST: [1], ATTENDS: [0, 3]})
    for path, kept, projections in ((FIRST, [0, 2, 3], {"c_attn": 3}), (ATTENDS, [1, 2], {"c_attn": 2, "q_attn": 1})):
        ours, theirs = sites(model)[path], sites(stock)[path]
        assert type(ours) is type(theirs) and (ours.num_heads, ours.split_size) == (len(kept), len(kept) * HEAD_WIDTH)
        rows = [head * HEAD_WIDTH + i for head in kept for i in range(HEAD_WIDTH)]
        for name, parts in projections.items():
            columns = [part * WIDTH + row for part in range(parts) for row in rows]
            assert torch.equal(getattr(ours, name).weight, getattr(theirs, name).weight[:, columns])
            assert torch.equal(getattr(ours, name).bias, getattr(theirs, name).bias[columns])
        assert torch.equal(ours.c_proj.weight, theirs.c_proj.weight[rows])
    fold_heads(model)
    removed = slice(HEAD_WIDTH, 2 * HEAD_WIDTH)
    assert sites(model)[FIRST].c_attn.weight.unflatten(1, (3, -1))[:, :, removed].abs().max() == 0
    assert sites(model)[FIRST].split_size == WIDTH


def test_stored_under_a_stock_name_a_weight_lies_as_in_stock():
    """A square matrix that lay the other way would load without our package, and be wrong."""
    model, before = ALONE.build(), ALONE.build().state_dict()
    swap_to_gated(model)
    swap_to_alpha(model)
    after = model.state_dict()
    assert [name for name in before if not torch.equal(after[name], before[name])] == []
    swap(model, "shared")
    after = model.state_dict()
    assert {name for name in before if name not in after} == {
        f"transformer.{path}.c_attn.{part}" for path in sites(model) for part in ("weight", "bias")
    }
    assert [name for name in before if name in after and not torch.equal(after[name], before[name])] == []


def rows(model, path, head):
    """The columns of a head in `c_attn`, as query, key and value: counted, not asked for."""
    columns = [part * WIDTH + head * HEAD_WIDTH + i for part in range(3) for i in range(HEAD_WIDTH)]
    return sites(model)[path].c_attn, columns


@pytest.mark.parametrize("trained", (False, True))
@torch.no_grad()
def test_heads_change_places(trained):
    """As by hand, with their moments; back again to the bit."""
    model = ALONE.build().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if trained:
        with torch.enable_grad():
            model(**lone_batch()).logits.square().mean().backward()
        optimizer.step()
    start = [p.clone() for p in model.parameters()]
    ends = [rows(model, "h.0.attn", 1), rows(model, "h.1.attn", 3)]
    tensors = [
        [part, *(optimizer.state[part][name] for name in ("exp_avg", "exp_avg_sq") if trained)]
        for c_attn, _ in ends
        for part in (c_attn.weight, c_attn.bias)
    ]
    chosen = [columns for _, columns in ends for _ in range(2)]
    before = [[t[..., columns].clone() for t in each] for each, columns in zip(tensors, chosen, strict=True)]
    rotate_heads(model, [(("h.0.attn", 1), ("h.1.attn", 3))], optimizer)
    after = [[t[..., columns] for t in each] for each, columns in zip(tensors, chosen, strict=True)]
    for found, expected in zip(after, [*before[2:], *before[:2]], strict=True):
        assert all(map(torch.equal, found, expected))
    assert sum(not torch.equal(p, q) for p, q in zip(model.parameters(), start, strict=True)) == 4
    rotate_heads(model, [(("h.0.attn", 1), ("h.1.attn", 3))], optimizer)
    assert all(map(torch.equal, model.parameters(), start))


def upcasting(dtype, **more):
    config = gpt2_config(reorder_and_upcast_attn=True, **more)
    return make(GPT2LMHeadModel, config).to(dtype)


@pytest.mark.parametrize("kind", (*KINDS, "pruned"))
@pytest.mark.parametrize("cross", (False, True))
def test_scores_in_float32_where_the_config_says_so(kind, cross, monkeypatch):
    """`reorder_and_upcast_attn` is for eager attention alone: there it is used, in every kind."""
    model, inputs = upcasting(torch.float32, add_cross_attention=cross), cross_batch() if cross else lone_batch()
    calls, stock_class = [], type(sites(model)[FIRST])
    stock = stock_class._upcast_and_reordered_attn
    monkeypatch.setattr(
        stock_class, "_upcast_and_reordered_attn", lambda self, *args: calls.append(1) or stock(self, *args)
    )
    change = {"pruned": lambda model: change_heads(model, "pruned")}.get(kind, lambda model: swap(model, kind))
    expected = copy.deepcopy(model)
    if kind == "pruned":
        change_heads(expected, "gated")
    change(model)
    attending = [module for module in sites(model).values() if module.num_heads]
    for backend, number in (("eager", len(attending)), ("sdpa", 0)):
        set_backend(model, backend)
        set_backend(expected, backend)
        before = output(expected, inputs)
        calls.clear()
        found = output(model, inputs)
        assert len(calls) == number
        seen = inputs["attention_mask"].bool()
        torch.testing.assert_close(found[seen], before[seen], rtol=0, atol=FP32_NOISE)


def test_the_second_eager_attention_in_half_precision():
    """Its scores are in float32 there: as close to stock as bfloat16 can be."""
    model = upcasting(torch.bfloat16)
    set_backend(model, "eager")
    inputs = lone_batch()
    expected = output(model, inputs)[inputs["attention_mask"].bool()].float()
    swap_to_collaborative(model, dim_value=1.0)
    found = output(model, inputs)[inputs["attention_mask"].bool()].float()
    assert (found - expected).square().mean().sqrt() < BF16 * expected.std()


@pytest.mark.slow
@pytest.mark.parametrize("change", ("shared", "per_head", "shared+values", "pruned", "mixed"))
def test_generation_with_cross_attention(change):
    """Prompts that another stack speaks to: cached once, in both kinds of cache, by beams."""
    model, inputs = CROSS.build().double(), cast(cross_batch(), torch.float64)
    stock = copy.deepcopy(model)
    if change == "pruned":
        change_heads(model, "pruned")
    elif change == "mixed":
        mix(model)
    else:
        swap(model, change, NARROW[change] if "values" in change else None)
    for mode in ("greedy", "beams"):
        expected = generate(model, inputs, mode)
        assert generate(model, inputs, mode, use_cache=False) == expected
        assert generate(model, inputs, mode, cache_implementation="static") == expected
        assert (generate(stock, inputs, mode) == expected) == (change in KINDS)


@pytest.mark.parametrize("mixing", KINDS)
def test_from_scratch(mixing):
    """Values begin as wide as stock ones, output projections by GPT-2's own rule."""
    config = gpt2_config(add_cross_attention=True)
    ours = collaborative_config(config, dim_shared_query_key=20, dim_value=16, kind=mixing)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(ours).eval()
    assert torch.isfinite(output(model, cross_batch())).all()
    for site in opened(model).values():
        assert site.is_swapped and site.dim_value == 16 and not hasattr(site.module, "c_attn")
        for weight, spread in ((site.value.weight, 0.3), (site.output.weight, 0.3 / 2)):
            draws = weight.detach().flatten()
            assert float(draws.std()) == pytest.approx(spread, rel=SPREAD / (2 * len(draws)) ** 0.5)
            assert float(draws.mean()) == pytest.approx(0, abs=SPREAD * spread / len(draws) ** 0.5)
        assert site.value.bias.abs().max() == 0


def test_a_classifier_reads_the_last_token():
    model = make(GPT2ForSequenceClassification, gpt2_config(num_labels=3)).double()
    inputs = lone_batch()
    expected = output(model, inputs)
    swap(model, "shared")
    torch.testing.assert_close(output(model, inputs), expected, rtol=0, atol=EXACT64)
    assert expected.shape == (3, 3)


@pytest.mark.slow
def test_compress_and_distill():
    """Of both kinds of attention; the site in its stock class learns, too."""
    model, inputs = CROSS.build(), cross_batch()
    original, batches = copy.deepcopy(model), [inputs] * 8
    report = compress(model, batches, 0.6, refine_steps=2)
    assert report.costs["parameters"].share <= 0.6 and {site.role for site in report.sites} == {*CROSS.roles, "dec-ffn"}
    assert torch.isfinite(output(model, inputs)).all()
    error = distill(model, original, batches, 8, learning_rate=0.003)
    assert error.after.hidden <= error.before.hidden and error.trained_parameters > 0
    pruned = CROSS.build()
    prune_heads(pruned, heads={"dec-self": [[0], []]})
    fused = sites(pruned)["h.0.attn"].c_attn.weight
    before = fused.detach().clone()
    distill(pruned, original, batches, 8, learning_rate=0.003)
    assert not torch.equal(fused, before)


class QuantisedConv1D(Conv1D):
    """What bitsandbytes or an adapter makes of it."""


def quantised(model):
    sites(model)[FIRST].c_attn.__class__ = QuantisedConv1D


def shared(model):
    sites(model)["h.1.attn"].c_attn = sites(model)[FIRST].c_attn


def tied(model):
    sites(model)["h.1.attn"].c_attn.weight = sites(model)[FIRST].c_attn.weight


def shared_output(model):
    sites(model)["h.1.attn"].c_proj = sites(model)[FIRST].c_proj


CALLS = {
    "swap": lambda model: swap_to_collaborative(model, dim_shared_query_key=16),
    "prune": lambda model: prune_heads(model, heads={"dec-self": [[0], [0]]}),
    "exchange": lambda model: rotate_heads(model, [((FIRST, 0), ("h.1.attn", 1))]),
    "gate": swap_to_gated,
}
REFUSED = [(quantised, "QuantisedConv1D", call) for call in ("swap", "prune", "exchange")]
REFUSED += [(spoil, "would change both", call) for spoil in (shared, tied) for call in ("swap", "prune", "exchange")]
REFUSED += [(shared_output, "would change both", call) for call in ("prune", "gate")]


@pytest.mark.parametrize("spoil, said, call", REFUSED)
def test_what_is_refused(spoil, said, call):
    model = ALONE.build()
    spoil(model)
    with refused(model, ModelStateError, FIRST, said):
        CALLS[call](model)


def test_a_site_without_heads_has_neither_projections_nor_weights():
    model = CROSS.build()
    prune_heads(model, heads={site.path: list(range(HEADS)) for site in adapter_sites(model)})
    for path, module in sites(model).items():
        assert type(module.c_proj) is ConstantOutput
        assert [name for name, _ in module.named_parameters()] == ["c_proj.bias"], path
    fold_heads(model)
    assert all(type(each) is Conv1D for each in output_projections(model).values())
    assert not any(isinstance(module, nn.Identity) for module in model.modules())


def test_roles_are_those_of_a_decoder():
    """A lone decoder by its family: its config says nothing."""
    model = ALONE.build()
    assert model.config.is_encoder_decoder is False and not getattr(model.config, "is_decoder", False)
    masks = token_masks(model, lone_batch())
    assert masks["encoder"] is None and torch.equal(masks["decoder"], lone_batch()["attention_mask"].bool())
