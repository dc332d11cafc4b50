"""What only families with rotary positions and shared key heads can get wrong, for every one of them."""

import copy
import itertools

import pytest
import torch
from changed_heads import output_projections
from model_inputs import batch
from model_runs import output, set_backend, sites, swapped
from model_sizes import HEAD_WIDTH, HEADS, LAYERS
from test_value_contract import assert_lossless
from transformers import AttentionInterface, AttentionMaskInterface, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from unchanged import assert_unchanged, refused, snapshot

import test_contract
from collab_heads import (
    compress,
    fold_heads,
    get_adapter,
    prune_heads,
    rotate_heads,
    swap_to_collaborative,
    swap_to_gated,
)
from collab_heads.adapters import llama, modernbert
from collab_heads.analysis import head_statistics
from collab_heads.errors import ArgumentError, ConfigError, ModelStateError, ShapeError, UnsupportedModelError
from collab_heads.layers import rotary_attention as rotary
from collab_heads.layers.rotary_attention import rotary_attention
from collab_heads.layers.rotary_query_key import RotaryQueryKey
from collab_heads.rotation.rules import slot_scores
from collab_heads.training import HeadRotation
from families import FAMILIES, each
from test_contract import stepwise

NAMES = [name for name, family in FAMILIES.items() if family.beside == "qwen3" or name == "qwen3"]
of_every_family = pytest.mark.parametrize("name", each(NAMES))
of_every_decoder = pytest.mark.parametrize("name", each([name for name in NAMES if FAMILIES[name].generates]))
UNEQUAL = [1]  # of the heads 0 and 1, which share a key head, as 2 and 3 do
NOTICED = 1e-3  # what a group at another place does to the output at least
FP32 = 5e-5  # of logits of the size of 5, after norms in float32; differences seen: 4e-6


def remove(model, heads, **more):
    (role,) = {site.role for site in get_adapter(model).sites(model)}
    return prune_heads(model, heads={role: [heads] * LAYERS}, **more)


def closed(model, heads):
    """The same heads, but their columns of W_O are zero."""
    with torch.no_grad():
        for projection in output_projections(model).values():
            projection.weight.unflatten(1, (HEADS, -1))[:, heads] = 0
    return model


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=FP32)


@of_every_family
@pytest.mark.parametrize("backend", ("eager", "sdpa"))
@pytest.mark.parametrize("heads", ([1], [0, 1], [1, 2], [0, 1, 3], [2, 3, 0, 1]), ids=str)
def test_any_heads_can_go(name, heads, backend):
    """Key heads go with the last head that uses them; what is left computes what it did."""
    family = FAMILIES[name]
    model, inputs = family.build(), family.inputs()
    set_backend(model, backend)
    expected = output(closed(copy.deepcopy(model), heads), inputs)
    remove(model, heads)
    close(output(model, inputs), expected)
    left = [head for head in range(HEADS) if head not in heads]
    key_heads = {head // 2 for head in left}
    for site in get_adapter(model).sites(model):
        assert (site.num_heads, site.num_key_heads) == (len(left), len(key_heads))
    equal = len({sum(head // 2 == key for head in left) for key in key_heads}) <= 1
    assert all(changed != equal or not left for changed in swapped(model))


@of_every_decoder
def test_key_heads_leave_the_cache(name):
    model = FAMILIES[name].build()
    report = remove(model, [0, 1])
    assert {(site.cache_before, site.cache_after) for site in report.sites} == {(4 * HEAD_WIDTH, 2 * HEAD_WIDTH)}
    cache = model(**batch(), use_cache=True).past_key_values
    assert {(layer.keys.shape[1], layer.values.shape[1]) for layer in cache.layers} == {(1, 1)}


@of_every_decoder
@pytest.mark.parametrize("heads", ([], UNEQUAL, [0, 1]), ids=str)
def test_narrow_values_step_by_step(name, heads):
    """Token by token, through dynamic and static caches (of windows, where the family has them), as in one pass."""
    family = FAMILIES[name]
    model, inputs = family.build(), family.inputs()
    if heads:
        remove(model, heads)
    swap_to_collaborative(model, dim_value=0.5)
    whole = output(model, inputs)
    with torch.no_grad():
        for cache in (None, StaticCache(config=model.config, max_cache_len=12)):
            close(stepwise(model, inputs, cache)[0], whole)


def test_other_backends_have_one_width_at_any_length(monkeypatch):
    """Flash attention takes no other; a step of decoding looks the same to it after few keys and after many."""
    widths = []

    def one_width(module, query, key, value, attention_mask, **more):
        widths.append({tensor.shape[-1] for tensor in (query, key, value)})
        return sdpa_attention_forward(module, query, key, value, attention_mask, **more)

    AttentionInterface.register("one_width", one_width)
    AttentionMaskInterface.register("one_width", sdpa_mask)
    monkeypatch.setattr(rotary, "LONG", 6)
    family = FAMILIES["qwen3"]
    model, inputs = family.build(), family.inputs()
    swap_to_collaborative(model, dim_value=0.5)
    whole = output(model, inputs)
    set_backend(model, "one_width")
    with torch.no_grad():
        close(stepwise(model, inputs)[0], whole)
    assert len(widths) > LAYERS and all(len(each) == 1 for each in widths)


@of_every_family
def test_heads_come_back_however_they_went(name):
    """By one removal or two: the record says what is left, and folding gives a stock model."""
    models = [FAMILIES[name].build() for _ in range(2)]
    remove(models[0], [0, 3])
    for heads in ([0], [3]):
        remove(models[1], heads)
    assert models[0].config.collab_heads == models[1].config.collab_heads
    remove(models[0], [1])
    remove(models[1], [2])  # one of the unequal halves each
    for model, removed in zip(models, ([0, 1, 3], [0, 2, 3]), strict=True):
        inputs = FAMILIES[name].inputs()
        before = output(model, inputs)
        fold_heads(model)
        stock = type(model)(model.config)  # as whoever does not know this package makes it
        assert not hasattr(model.config, "collab_heads")
        assert {k: v.shape for k, v in model.state_dict().items()} == {
            k: v.shape for k, v in stock.state_dict().items()
        }
        close(output(model, inputs), before)
        close(before, output(closed(FAMILIES[name].build(), removed), inputs))


@of_every_family
@pytest.mark.parametrize("heads", (UNEQUAL, [0, 1]), ids=str)
def test_save_and_load(name, heads, tmp_path):
    model = FAMILIES[name].build()
    remove(model, heads)
    swap_to_collaborative(model, sites=[next(iter(sites(model)))], dim_value=0.5)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert {n: tuple(t.shape) for n, t in loaded.state_dict().items()} == {
        n: tuple(t.shape) for n, t in model.state_dict().items()
    }
    close(output(loaded, FAMILIES[name].inputs()), output(model, FAMILIES[name].inputs()))
    fresh = type(model)(loaded.config)  # from the config alone
    for module in sites(fresh).values():
        for parameter in module.parameters():
            assert torch.isfinite(parameter).all()


@of_every_decoder
def test_generation_with_what_generates(name):
    """Greedy with prefill in chunks, and beams: token by token what the model without a cache says."""
    model = FAMILIES[name].build()
    remove(model, UNEQUAL)
    swap_to_collaborative(model, dim_value=0.5)
    prompt = {k: v[:1] for k, v in FAMILIES[name].inputs().items()}
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    for more in ({"num_beams": 1}, {"num_beams": 3}):
        expected = model.generate(**prompt, **options, **more, use_cache=False)
        assert torch.equal(model.generate(**prompt, **options, **more), expected)
    expected = model.generate(**prompt, **options)
    assert torch.equal(model.generate(**prompt, **options, prefill_chunk_size=3), expected)
    assistant = FAMILIES[name].build()
    assert torch.equal(model.generate(**prompt, **options, assistant_model=assistant), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", each(["qwen3", "gemma3"]))
def test_compression_by_key_heads(name):
    """A budget of the cache takes key heads and values, with all heads of a key head at once."""
    model = FAMILIES[name].build()
    generator = torch.Generator().manual_seed(0)
    batches = [{"input_ids": torch.randint(3, 61, (8, 9), generator=generator)} for _ in range(3)]
    report = compress(model, batches, 0.5, of="cache")
    assert report.costs["cache"].share <= 0.5
    caches = [model(**each, use_cache=True).past_key_values for each in batches]
    counted = sum(layer.keys.numel() + layer.values.numel() for cache in caches for layer in cache.layers)
    assert counted == report.costs["cache"].after
    for site in get_adapter(model).sites(model):
        assert site.num_heads == 2 * site.num_key_heads
    assert {site.sizes["query_key"][0] for site in report.sites} == {HEADS * HEAD_WIDTH}


def rows_of_group(model, path, key_head):
    """Rows of queries, keys and values of a key head and the two heads that share it, found by counting."""
    module = model.base_model.get_submodule(path)
    counts = {"q_proj": 2, "k_proj": 1, "v_proj": 1}
    return {
        f"{name}.{part}": parameter.data[key_head * count * HEAD_WIDTH : (key_head + 1) * count * HEAD_WIDTH]
        for name, count in counts.items()
        for part, parameter in getattr(module, name).named_parameters()
    }


def projections_by_hand(name):
    """Families whose query, key and value projections have the names that `rows_of_group` knows."""
    return hasattr(FAMILIES[name].build().base_model.get_submodule(next(iter(sites(FAMILIES[name].build())))), "q_proj")


@pytest.mark.parametrize("heads", ((0, 2), (1, 3), (1, 1)), ids=str)
@of_every_family
def test_heads_that_share_keys_change_places_together(name, heads):
    """Whichever of them is named: as the rows exchanged by hand; twice is not at all."""
    if not projections_by_hand(name):
        pytest.skip("its projections have other names")
    model, expected, inputs = FAMILIES[name].build(), FAMILIES[name].build(), FAMILIES[name].inputs()
    paths, before = list(sites(model)), output(model, inputs)
    for one, other in zip(
        *(rows_of_group(expected, path, head // 2).values() for path, head in zip(paths, heads, strict=True)),
        strict=True,
    ):
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)
    pairs = [tuple(zip(paths, heads, strict=True))]
    start = snapshot(model)
    rotate_heads(model, pairs)
    for (key, found), wanted in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(found, wanted), key
    assert (output(model, inputs) - before).abs().max() > NOTICED
    rotate_heads(model, pairs)
    assert_unchanged(model, start)


def test_gates_and_moments_travel_with_the_group():
    model = FAMILIES["qwen3"].build()
    swap_to_gated(model)
    (first, one), (second, other) = sites(model).items()
    gates = [output_projections(model)[path].gates for path in (first, second)]
    with torch.no_grad():
        for gate in gates:
            gate.log_alpha.normal_(generator=torch.Generator().manual_seed(len(first)))
        gates[1].log_alpha += 1
    optimizer = torch.optim.Adam(model.parameters())
    output(model, FAMILIES["qwen3"].inputs())
    model(**FAMILIES["qwen3"].inputs()).logits.square().mean().backward()
    optimizer.step()
    before = [gate.log_alpha.clone() for gate in gates]
    adam = [optimizer.state[module.q_proj.weight]["exp_avg"] for module in (one, other)]
    moments = [each.clone().unflatten(0, (HEADS, -1)) for each in adam]
    rotate_heads(model, [((first, 2), (second, 0))], optimizer)
    assert torch.equal(gates[0].log_alpha, torch.cat([before[0][:2], before[1][:2]]))
    assert torch.equal(gates[1].log_alpha, torch.cat([before[0][2:], before[1][2:]]))
    now = adam[0].unflatten(0, (HEADS, -1))
    assert torch.equal(now, torch.cat([moments[0][:2], moments[1][:2]]))
    assert not torch.equal(now, moments[0])


def test_groups_that_cannot_change_places():
    model = FAMILIES["qwen3"].build()
    first, second = sites(model)
    with refused(model, ArgumentError, "the places 0 and 1 in theirs", "pair heads of the same place"):
        rotate_heads(model, [((first, 0), (second, 1))])
    with refused(model, ArgumentError, "head 0 of ", "head 1 of ", "share a key head", "name one of them"):
        rotate_heads(model, [((first, 0), (first, 1))])
    with refused(model, ArgumentError, "share a key head", "name one of them"):
        rotate_heads(model, [((first, 0), (second, 0)), ((first, 1), (second, 1))])
    remove(model, UNEQUAL)
    with refused(model, ShapeError, "1 and 2 heads share their key heads", "groups of one size"):
        rotate_heads(model, [((first, 0), (second, 2))])
    with refused(model, ModelStateError, "before heads are removed that share key heads"):
        rotate_heads(model, [((first, 2), (second, 2))])


@pytest.mark.parametrize("policy", ("hard", "soft", "local", "random"))
def test_rotation_takes_a_head_of_each_group(policy):
    """And ranks groups by the mean of their heads."""
    model, inputs = FAMILIES["qwen3"].build(), FAMILIES["qwen3"].inputs()
    rotation = HeadRotation(policy=policy, start=1, end=1)
    rotation.check(model, epochs=2)
    start = snapshot(model)
    pairs = rotation.apply(model, epoch=1, batches=[inputs])
    assert pairs and {slot.head for pair in pairs for slot in pair} <= {0, 2}
    rotation.apply(model, epoch=2, batches=[inputs])
    assert_unchanged(model, start)
    adapter = get_adapter(model)
    scores = slot_scores(model, [inputs], adapter, ["confidence"])["confidence"]
    of_heads = head_statistics(model, [inputs], measures=("confidence",)).confidence
    for slot, score in scores.items():
        of_group = of_heads[slot.path][slot.head : slot.head + 2].tolist()
        assert score == pytest.approx(sum(of_group) / 2, rel=1e-6)
    assert len(scores) == LAYERS * HEADS // 2


def test_queries_and_keys_alone_cannot_become_smaller():
    """Said before anything is measured, and why."""
    model = FAMILIES["qwen3"].build()
    for mixing, why in (("shared", "rotary positions"), ("per_head", "normed per head")):
        with refused(model, UnsupportedModelError, why, "narrower values"):
            compress(model, [batch()], parts="query_key", kind=mixing)
        with refused(model, UnsupportedModelError, why, "narrower values"):
            swap_to_collaborative(model, dim_shared_query_key=0.5, kind=mixing)


def test_the_state_holds_the_groups():
    model = FAMILIES["qwen3"].build()
    remove(model, UNEQUAL)
    for module in sites(model).values():
        assert isinstance(module.query_key, RotaryQueryKey)
        assert module.query_key.state.groups == (0, 1, 1)
        assert module.query_key.group_size is None
        assert module.num_key_value_groups == 1
    records = model.config.collab_heads["sites"].values()
    assert all(record["query_key"]["groups"] == [0, 1, 1] for record in records)


def test_other_groups_than_those_of_the_model_are_refused():
    """Tensors of the same shapes would load, and heads would use the keys of others."""
    model = FAMILIES["qwen3"].build()
    remove(model, UNEQUAL)
    config = copy.deepcopy(model.config)
    for record in config.collab_heads["sites"].values():
        record["query_key"]["groups"] = [0, 0, 1]
    with pytest.raises(ConfigError, match=r"'key heads': \(0, 0, 1\)\} do not fit .*'key heads': \(0, 1, 1\)"):
        type(model)(config)


def unrotated(monkeypatch):
    replace_core(monkeypatch, lambda options: options | {"rotate": lambda query, key, cos, sin: (query, key)})


def rotated_alike(monkeypatch):
    """Every token as if it stood where the last one stands."""

    def last(options):
        return options | {"positions": tuple(angles[:, -1:] for angles in options["positions"])}

    replace_core(monkeypatch, last)


def without_norms(monkeypatch):
    replace_core(monkeypatch, lambda options: options | {"norms": None})


def no_dropout(monkeypatch):
    replace_core(monkeypatch, lambda options: options | {"dropout": 0.0})


def padding_attended(monkeypatch):
    replace_core(monkeypatch, lambda options: options, mask=None)


def replace_core(monkeypatch, change, **mask):
    """Let every adapter call the core with other options."""

    def core(module, value, states, attention_mask, cache, **options):
        return rotary_attention(module, value, states, mask.get("mask", attention_mask), cache, **change(options))

    for adapter in (llama, modernbert):
        monkeypatch.setattr(adapter, "rotary_attention", core)


@pytest.mark.parametrize(
    "name, mutation",
    [
        ("qwen3", without_norms),
        *itertools.product(("qwen3", "modernbert"), (unrotated, rotated_alike, padding_attended)),
    ],
)
def test_the_contract_catches(name, mutation, monkeypatch):
    family = FAMILIES[name]
    mutation(monkeypatch)
    with pytest.raises(AssertionError):
        assert_lossless(family, "stock+values", "eager")


@pytest.mark.parametrize("name", ("qwen3", "modernbert"))
def test_a_lost_dropout_is_caught(name, monkeypatch):
    no_dropout(monkeypatch)
    with pytest.raises(AssertionError):
        test_contract.test_training_is_the_stock_one(FAMILIES[name], "stock+values")


def test_a_wrong_key_head_is_caught(monkeypatch):
    """Heads of unequal groups that use the key head of another."""
    stock = RotaryQueryKey.for_each_head
    monkeypatch.setattr(RotaryQueryKey, "for_each_head", lambda self, tensor: stock(self, tensor).flip(1))
    with pytest.raises(AssertionError):
        test_any_heads_can_go("qwen3", UNEQUAL, "eager")
