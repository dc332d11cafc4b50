"""Refusals of rotate_heads: places that cannot be, sites that do not fit, wrapped models, sharded optimizers.

Everything is planned before anything moves: a bad pair comes after a good one, and nothing has changed.
"""

import pytest
import torch
from changed_heads import change_queries, loss, output_projections
from model_runs import sites
from model_sizes import KINDS
from torch import nn
from unchanged import refused

from collab_heads import prune_heads, rotate_heads, swap_to_alpha, swap_to_gated
from collab_heads.errors import ArgumentError, ModelStateError, ShapeError, UnsupportedModelError
from collab_heads.training import HeadPenalty
from families import FAMILIES

BERT = "encoder.layer.{}.attention.self"


def build(name, dtype=torch.float64):
    return FAMILIES[name].build().to(dtype)


GOOD = ((BERT.format(0), 0), (BERT.format(1), 1))


def good_pair_first(*pair):
    """A bad pair after a good one: planned before anything moves."""
    return [GOOD, pair]


@pytest.mark.parametrize(
    "pairs, fragments",
    (
        (good_pair_first((BERT.format(2), 0), (BERT.format(1), 1)), (BERT.format(2), "did you mean", "relative to")),
        (good_pair_first((BERT.format(0), 4), (BERT.format(1), 1)), ("head 4 of", "does not exist", "0, 1, 2, 3")),
        (good_pair_first((BERT.format(0), -1), (BERT.format(1), 1)), ("head -1 of", "does not exist")),
        (good_pair_first((BERT.format(0), True), (BERT.format(1), 1)), ("head True of", "does not exist")),
        (good_pair_first((BERT.format(0), "0"), (BERT.format(1), 1)), ("head '0' of", "does not exist")),
        (good_pair_first((BERT.format(0), 2), (BERT.format(0), 2)), ("head 2 of", "with itself")),
        (good_pair_first(([0], 2), (BERT.format(0), 2)), ("[0]", "not the path")),
        (good_pair_first((BERT.format(0), 2)), ("pairs must be pairs",)),
        (good_pair_first("ab", "cd"), ("a place must be",)),
        (good_pair_first(0, 1), ("a place must be a Slot or (path, head), not 0",)),
        (3, ("pairs must be pairs", "3")),
        ("ab", ("pairs must be pairs", "'a'")),
    ),
)
def test_places_that_cannot_be(pairs, fragments):
    with refused(model := build("bert"), ArgumentError, *fragments):
        rotate_heads(model, pairs)


def test_across_roles_or_stacks():
    model = build("marian")
    for first, second, role in (
        ("encoder.layers.0.self_attn", "decoder.layers.0.self_attn", "dec-self"),
        ("encoder.layers.0.self_attn", "decoder.layers.0.encoder_attn", "dec-enc"),
    ):
        with refused(model, ArgumentError, f"head 0 of {first} (enc-self)", f"({role})", "across roles or stacks"):
            rotate_heads(model, [((first, 0), (second, 0))])


def test_removed_heads():
    model = build("bert")
    prune_heads(model, heads={"enc-self": [[1], [0, 1, 2, 3]]})
    with refused(model, ArgumentError, "head 1 of", "was removed", "0, 2, 3"):
        rotate_heads(model, [((BERT.format(0), 1), (BERT.format(0), 2))])
    with refused(model, ArgumentError, BERT.format(1), "all heads of the site were removed"):
        rotate_heads(model, [((BERT.format(0), 0), (BERT.format(1), 2))])


@pytest.mark.parametrize("kind", KINDS)
def test_collaborative_heads(kind):
    model = build("bert")
    change_queries(model, kind, None)
    with refused(model, ModelStateError, BERT.format(0), "is collaborative, or has queries, keys or values of other"):
        rotate_heads(model, [GOOD])


def wider_heads(model):
    module = sites(model)[BERT.format(1)]
    module.num_attention_heads, module.attention_head_size = 2, 16


def without_bias(model):
    sites(model)[BERT.format(1)].value.bias = None


def in_half(model):
    sites(model)[BERT.format(1)].query.to(torch.bfloat16)


def one_gated(model):
    swap_to_gated(model, sites=BERT.format(1))


def fixed_and_learned(model):
    swap_to_gated(model, sites=BERT.format(0))
    swap_to_gated(model, alive_heads={BERT.format(1): [1, 1, 1, 0]})


def two_temperatures(model):
    swap_to_gated(model, sites=BERT.format(0))
    swap_to_gated(model, sites=BERT.format(1), temperature=0.5)


def gates_and_alphas(model):
    swap_to_gated(model)
    swap_to_alpha(model, sites=BERT.format(1))


def one_drawn(model):
    swap_to_gated(model)
    HeadPenalty(model, target_heads=3, steps=4)
    output_projections(model)[BERT.format(1)].gates.draw = None


class QuantisedLinear(nn.Linear):
    """What bitsandbytes or torchao makes of a Linear."""


def quantised(model):
    sites(model)[BERT.format(1)].value.__class__ = QuantisedLinear


def on_meta(model):
    sites(model)[BERT.format(1)].key.to("meta")


class DTensor(nn.Parameter):
    """By name: what FSDP 2 and tensor parallelism make of a parameter."""


def dtensor(model):
    linear = sites(model)[BERT.format(1)].key
    linear.weight = DTensor(linear.weight.data)


def flat(model):
    """What FSDP 1 leaves of a parameter on one rank."""
    linear = sites(model)[BERT.format(1)].key
    linear.weight = nn.Parameter(linear.weight.data.flatten()[:100])


def emptied_by_deepspeed(model):
    weight = sites(model)[BERT.format(1)].key.weight
    weight.ds_id, weight.data = 7, weight.data.new_empty(0)


SPOILED = {
    wider_heads: (ShapeError, "(8, 32)", "(16, 32)", "one width"),
    without_bias: (ModelStateError, "only head 0 of", "value.bias"),
    in_half: (ModelStateError, "query.weight", "torch.float64", "torch.bfloat16"),
    one_gated: (ModelStateError, "only head 1 of", "gates.log_alpha", "gate both"),
    fixed_and_learned: (ModelStateError, "gates of different kinds", "'fixed'", "'learned'"),
    two_temperatures: (ModelStateError, "gates of different kinds", "temperature=0.5"),
    gates_and_alphas: (ModelStateError, BERT.format(1), "gates and alphas", "fold_heads"),
    one_drawn: (ModelStateError, "only head 0 of", "gates.open"),
    quantised: (ModelStateError, BERT.format(1), "QuantisedLinear"),
    on_meta: (ModelStateError, BERT.format(1), "meta device"),
    dtensor: (ModelStateError, BERT.format(1), "key.weight is sharded (a DTensor of shape (32, 32))"),
    flat: (ModelStateError, BERT.format(1), "key.weight is sharded", "(100,)", "DDP"),
    emptied_by_deepspeed: (ModelStateError, BERT.format(1), "key.weight is sharded", "(0,)", "ZeRO-3"),
}


@pytest.mark.parametrize("spoil", SPOILED, ids=lambda spoil: spoil.__name__)
def test_sites_that_do_not_fit(spoil):
    """The second of two pairs does not fit; sites that are not named may be whatever they are."""
    model = build("bert")
    spoil(model)
    error, *fragments = SPOILED[spoil]
    inside = ((BERT.format(0), 2), (BERT.format(0), 3))
    with refused(model, error, *fragments):
        rotate_heads(model, [inside, GOOD])
    rotate_heads(model, [inside])


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


def with_lora(model):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"]))


class FSDPModule(nn.Module):
    """By name: the class that fully_shard mixes into a model's own."""


def fully_sharded(model):
    model.__class__ = type("FSDPBert", (FSDPModule, type(model)), {})
    return model


WRAPPERS = {
    nn.DataParallel: ("DataParallel", "pass .module"),
    torch.compile: ("OptimizedModule", "pass ._orig_mod"),
    fully_sharded: ("FSDPModule",),
    compiled_in_place: ("compiled",),
    with_lora: ("PeftModel", "merge_and_unload"),
    nn.Sequential: ("PreTrainedModel, got Sequential",),
}


@pytest.mark.parametrize("wrap", WRAPPERS, ids=lambda wrap: wrap.__name__)
def test_wrapped_models(wrap):
    model = wrap(build("bert", torch.float32))
    with refused(model, UnsupportedModelError, *WRAPPERS[wrap]):
        rotate_heads(model, [GOOD])


def named(name, base=torch.optim.AdamW):
    return type(name, (base,), {})


class Wrapping:
    """What frameworks put around an optimizer."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


class DeepSpeedOptimizerWrapper(Wrapping):
    """By name."""


OPTIMIZER_ERRORS = {
    "zero": (lambda p: named("ZeroRedundancyOptimizer")(p), "ZeroRedundancyOptimizer", "other ranks", "DDP"),
    "derived": (lambda p: named("Own", named("ZeroRedundancyOptimizer"))(p), "ZeroRedundancyOptimizer"),
    "inside": (lambda p: Wrapping(named("BF16_Optimizer")(p)), "BF16_Optimizer", "flat copies"),
    "deepspeed": (lambda p: DeepSpeedOptimizerWrapper(torch.optim.SGD(p)), "DeepSpeedOptimizerWrapper", "flat copies"),
    "none": (lambda p: object(), "torch.optim.Optimizer", "not a object"),
    "other": (lambda p: torch.optim.SGD(build("bert").parameters()), "holds no parameter of this model"),
}


@pytest.mark.parametrize("case", OPTIMIZER_ERRORS)
def test_optimizers_that_cannot_follow(case):
    make, *fragments = OPTIMIZER_ERRORS[case]
    model = build("bert")
    with refused(model, ArgumentError, *fragments):
        rotate_heads(model, [GOOD], make(list(model.parameters())))


class OptimState8bit(torch.Tensor):
    """By name: a quantised moment of the right shape."""


def factored(optimizer, parameter):
    optimizer.state[parameter]["exp_avg_sq"] = torch.zeros(32)


def quantised_moment(optimizer, parameter):
    optimizer.state[parameter]["exp_avg"] = torch.zeros(32, 32).as_subclass(OptimState8bit)


def lone(optimizer, parameter):
    del optimizer.state[parameter]


STATES = {
    factored: ("exp_avg_sq of", f"{BERT.format(1)}: value.weight", "(32,)", "(32, 32)", "AdamW"),
    quantised_moment: ("exp_avg of", "a OptimState8bit of shape (32, 32)", "quantised"),
    lone: (f"only head 0 of {BERT.format(0)} has exp_avg of value.weight", "train both or none"),
}


@pytest.mark.parametrize("spoil", STATES, ids=lambda spoil: spoil.__name__)
def test_moments_that_cannot_follow(spoil):
    model = build("bert")
    optimizer = torch.optim.AdamW(model.parameters())
    loss(model, FAMILIES["bert"].inputs()).backward()
    optimizer.step()
    optimizer.zero_grad()
    spoil(optimizer, sites(model)[BERT.format(1)].value.weight)
    before = [{name: t.clone() for name, t in state.items()} for state in optimizer.state.values()]
    with refused(model, ModelStateError, *STATES[spoil]):
        rotate_heads(model, [((BERT.format(0), 2), (BERT.format(0), 3)), GOOD], optimizer)
    assert len(before) == len(optimizer.state)  # looking for moments makes none
    for old, new in zip(before, optimizer.state.values(), strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old)


def test_moments_in_a_list_are_refused():
    """Some optimizers keep a list of tensors per parameter: no head's rows can be found in it."""
    model = build("bert")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = next(model.base_model.get_submodule(BERT.format(1)).parameters())
    optimizer.state[weight]["preconditioners"] = [torch.eye(4)]
    with refused(model, ModelStateError, "preconditioners", "list of tensors", "AdamW or SGD"):
        rotate_heads(model, [GOOD], optimizer)
