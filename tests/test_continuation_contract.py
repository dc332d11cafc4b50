"""What every lone decoder that continues a prompt must pass: caches of both kinds, left padding, beams.

Parametrised over the families that generate and whose only role is `dec-self`: one joins by being listed in
`families.FAMILIES`.
"""

import pytest
import torch
from changed_heads import change_heads, mix
from model_inputs import batch
from model_runs import output, set_backend, swap
from model_sizes import FP32_NOISE, NARROW, WITH_VALUES
from transformers.cache_utils import DynamicCache, StaticCache

from collab_heads import compress, prune_heads, swap_to_collaborative
from families import FAMILIES
from test_contract import GENERATION, real

DECODERS = [
    name for name, family in FAMILIES.items() if set(family.roles) == {"dec-self"} and family.build().can_generate()
]
of_decoder = pytest.mark.parametrize("name", DECODERS)
NEW_TOKENS = 10
LOSSLESS = {
    "swapped, shared": lambda model: swap(model, "shared"),
    "swapped, per_head": lambda model: swap(model, "per_head"),
    "other basis of the values": lambda model: swap_to_collaborative(model, dim_value=1.0),
}


def gated(model):
    change_heads(model, "gated", empty=False)


def pruned(model):
    """Heads removed from the stock module, which runs what is left; the first site has none."""
    change_heads(model, "pruned")


def pruned_and_mixed(model):
    change_heads(model, "both")
    mix(model)


def narrow_and_pruned(model):
    swap(model, "shared+values", NARROW["shared+values"])
    prune_heads(model, heads={"dec-self": [[1], [2, 3]]})


def narrow(kind):
    return lambda model: swap(model, kind, NARROW[kind])


CHANGES = {**LOSSLESS, **{kind: narrow(kind) for kind in (*WITH_VALUES, "shared", "per_head")}}
CHANGES |= {change.__name__: change for change in (gated, pruned, pruned_and_mixed, narrow_and_pruned)}
BY_DEFAULT = ("swapped, shared", "per_head+values", "shared+values", "pruned", "narrow_and_pruned")
of_change = pytest.mark.parametrize(
    "change", [pytest.param(name, marks=[pytest.mark.slow] * (name not in BY_DEFAULT)) for name in CHANGES]
)


def made(name, change, dtype=torch.float64):
    model = FAMILIES[name].build().to(dtype)
    CHANGES[change](model)
    return model


def left_padded():
    return {name: tensor.flip(1) for name, tensor in batch().items()}


def positions(mask):
    """Those of left-padded tokens, as `generate` counts them."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


@torch.no_grad()
def in_one_pass(model, inputs):
    mask = inputs["attention_mask"]
    return model(**inputs, position_ids=positions(mask), use_cache=False).logits


@torch.no_grad()
def in_chunks(model, inputs, sizes, cache):
    """Logits of a batch that goes through a cache in pieces."""
    ids, mask, logits, start = inputs["input_ids"], inputs["attention_mask"], [], 0
    for size in sizes:
        now = slice(start, start + size)
        seen = mask[:, : start + size]
        more = {"position_ids": positions(seen)[:, now], "past_key_values": cache, "use_cache": True}
        logits.append(model(input_ids=ids[:, now], attention_mask=seen, **more).logits)
        start += size
    assert start == ids.shape[1]
    return torch.cat(logits, dim=1)


@of_change
@of_decoder
def test_caches(name, change):
    """Token by token and in chunks, dynamic and static, left-padded: as in one pass, and as the original if exact."""
    model, inputs = made(name, change), left_padded()
    assert not inputs["attention_mask"][:, 0].all() and inputs["attention_mask"][:, -1].all()
    expected, length = real(in_one_pass(model, inputs), inputs), inputs["input_ids"].shape[1]
    for sizes in ([1] * length, [4, 1, 1, length - 6]):
        for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=length + 3)):
            found = real(in_chunks(model, inputs, sizes, cache), inputs)
            torch.testing.assert_close(found, expected, rtol=0, atol=FAMILIES[name].exact64)
    stock = real(in_one_pass(FAMILIES[name].build().double(), inputs), inputs)
    assert ((expected - stock).abs().max() < FAMILIES[name].exact64) == (change in LOSSLESS)


def generate(model, inputs, mode, **more):
    torch.manual_seed(0)
    options = {**GENERATION[mode], "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS - 2, **more}
    return model.generate(**inputs, **options).tolist()


@of_change
@of_decoder
def test_generation(name, change):
    """Token-identical: exact to the original; cached to uncached; static to dynamic; greedy, beams, sampling."""
    model, inputs = made(name, change), left_padded()
    stock = FAMILIES[name].build().double()
    for mode in GENERATION:
        expected = generate(model, inputs, mode)
        assert len({tuple(row[-NEW_TOKENS:]) for row in expected}) > 1
        assert generate(model, inputs, mode, use_cache=False) == expected
        assert generate(model, inputs, mode, cache_implementation="static") == expected
        if change in LOSSLESS:
            assert generate(stock, inputs, mode) == expected


@of_change
@of_decoder
def test_padding_on_the_left_changes_nothing(name, change):
    """A sentence continues as it does alone."""
    model, inputs = made(name, change), left_padded()
    together = generate(model, inputs, "greedy")
    for row, mask, expected in zip(inputs["input_ids"], inputs["attention_mask"], together, strict=True):
        alone = {"input_ids": row[mask.bool()][None], "attention_mask": mask[mask.bool()][None]}
        (continued,) = generate(model, alone, "greedy")
        new = continued[int(mask.sum()) :]
        assert expected[len(mask) :][: len(new)] == new  # what ends early is padded


@pytest.mark.slow
@of_decoder
def test_assisted_generation(name):
    """A compressed model drafts for its original: the tokens are those of the original."""
    stock, inputs = FAMILIES[name].build().double(), left_padded()
    alone = {part: tensor[:1, -4:] for part, tensor in inputs.items()}
    expected = generate(stock, alone, "greedy")
    draft = made(name, "shared+values")
    assert generate(stock, alone, "greedy", assistant_model=draft) == expected
    swap(stock, "shared")
    assert generate(stock, alone, "greedy", assistant_model=draft) == expected


@pytest.mark.slow
@of_decoder
def test_compress_and_continue(name):
    """After `compress`, the caches hold what was promised and generation goes on."""
    model, inputs = FAMILIES[name].build(), left_padded()
    compress(model, [inputs] * 8, 0.6, refine_steps=2)
    expected = generate(model, inputs, "beams")
    assert generate(model, inputs, "beams", cache_implementation="static") == expected


@pytest.mark.slow
@of_change
@of_decoder
@torch.no_grad()
def test_compiled_decoding(name, change):
    """A step of decoding through a static cache is one graph."""
    model, inputs = made(name, change, torch.float32), left_padded()
    expected, cache = in_one_pass(model, inputs), StaticCache(config=model.config, max_cache_len=12)
    first = {part: tensor[:, :5] for part, tensor in inputs.items()}
    logits = [in_chunks(model, first, [5], cache)]
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for place in range(5, inputs["input_ids"].shape[1]):
        seen = inputs["attention_mask"][:, : place + 1]
        more = {"position_ids": positions(seen)[:, -1:], "past_key_values": cache, "use_cache": True}
        ids = inputs["input_ids"][:, place : place + 1]
        logits.append(compiled(input_ids=ids, attention_mask=seen, **more).logits)
    found = real(torch.cat(logits, dim=1), inputs)
    torch.testing.assert_close(found, real(expected, inputs), rtol=0, atol=FP32_NOISE)


@of_decoder
def test_backends_agree(name):
    """Eager and sdpa, with and without a mask."""
    for change in BY_DEFAULT:
        model, inputs = made(name, change), FAMILIES[name].inputs()
        for given in (inputs, {"input_ids": inputs["input_ids"]}):
            outputs = []
            for backend in ("eager", "sdpa"):
                set_backend(model, backend)
                outputs.append(real(output(model, given), given))
            torch.testing.assert_close(*outputs, rtol=0, atol=FAMILIES[name].eager64)
