"""What every layout must pass with narrower values: the contract's own tests, and what only values can get wrong.

Alone, and with every kind of query/key projection (`model_sizes.WITH_VALUES`); at full width only the basis of the
heads changes, so nothing may be lost.
"""

import itertools
import json

import pytest
import torch
from changed_heads import change_heads, loss, mix, output_projections, projected, removal
from model_inputs import cast
from model_runs import aligned, is_swapped, output, set_backend, sites, swap
from model_sizes import EXACT, EXACT64, HEAD_WIDTH, HEADS, NARROW, NARROW_VALUES, WITH_VALUES
from opening import layers_of, record_of
from slow_cases import slow
from test_head_contract import assert_pruned_equals_gated, assert_same_state
from unchanged import refused

import test_contract as contract
from collab_heads import (
    fold_heads,
    get_adapter,
    prune_heads,
    rotate_heads,
    swap_to_alpha,
    swap_to_collaborative,
    swap_to_gated,
)
from collab_heads.errors import ArgumentError, ModelStateError
from collab_heads.fitting import values
from collab_heads.layers.layout import weight_of, widths
from families import FAMILIES, LAYOUTS, cannot_share

REGULARISED = 1e-6  # the little that is added to covariances depends on the basis; differences seen: 2e-8
FIRST = "encoder.layer.0.attention.self"
PER_HEAD = NARROW_VALUES // HEADS
GENERATORS = [name for name in LAYOUTS if FAMILIES[name].generates]
every_pair = pytest.mark.parametrize("name, kind", list(itertools.product(LAYOUTS, WITH_VALUES)))
every_layout = pytest.mark.parametrize("name, kind", list(zip(LAYOUTS, itertools.cycle(WITH_VALUES))))
every_generator = pytest.mark.parametrize("name, kind", list(itertools.product(GENERATORS, WITH_VALUES)))
OF_THE_CONTRACT = (
    contract.test_padding_is_ignored,
    contract.test_attention_maps,
    contract.test_frozen_stays_frozen,
    contract.test_training_is_the_stock_one,
    contract.test_deepcopy_and_pickle,
    contract.test_hooks_survive,
    contract.test_role_by_role_equals_at_once,
    contract.test_backends_agree_when_narrow,
)


@pytest.mark.parametrize("backend", ("eager", "sdpa"))
@every_pair
def test_only_the_basis_changes_at_full_width(name, kind, backend):
    assert_lossless(FAMILIES[name], kind, backend)


def assert_lossless(family, kind, backend):
    """Site by site, after W_O: between the two the heads have another basis."""
    model, inputs = family.build().double(), family.inputs()
    set_backend(model, backend)
    before, sites_before = output(model, inputs), projected(model, inputs)
    swap(model, kind)
    sites_after, tolerance = projected(model, inputs), family.eager64 if backend == "eager" else family.exact64
    for path, stock in sites_before.items():
        for ours, theirs in zip(sites_after[path], stock, strict=True):
            ours, theirs = contract.real(ours, inputs), contract.real(theirs, inputs)
            torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance, msg=path)
    after = contract.real(output(model, inputs), inputs)
    torch.testing.assert_close(after, contract.real(before, inputs), rtol=0, atol=tolerance)


@pytest.mark.parametrize("check", OF_THE_CONTRACT, ids=lambda check: check.__name__.removeprefix("test_"))
@pytest.mark.parametrize("number, name", list(enumerate(LAYOUTS)))
def test_the_contract(number, name, check):
    """Each check with one of the kinds."""
    family = FAMILIES[name]
    if check is contract.test_padding_is_ignored and not family.padded:
        pytest.skip("there is no padding")
    kinds = [kind for kind in WITH_VALUES if not cannot_share((name, kind))]
    check(family, kinds[(number + OF_THE_CONTRACT.index(check)) % len(kinds)])


@pytest.mark.parametrize("name, path", (("bert", FIRST), ("t5", "encoder.block.0.layer.0.SelfAttention")))
def test_the_report_predicts_what_a_site_loses(name, path, monkeypatch):
    """In the model, with its padding, on the calibration batch: a first site, whose inputs stay as they were."""
    monkeypatch.setattr(values, "DOUBT", 0.0)
    assert_predicted(name, path)


def assert_predicted(name, path, **more):
    family = FAMILIES[name]
    model, inputs = family.build().double(), family.inputs()
    before = contract.real(projected(model, inputs)[path][0], inputs)
    report = swap_to_collaborative(model, dim_value={path: 16}, batches=[inputs], **more)
    after = contract.real(projected(model, inputs)[path][0], inputs)
    centre = before.mean(0) if family.biased else 0.0
    lost = (after - before).square().sum() / (before - centre).square().sum()
    assert float(lost) == pytest.approx(report.sites[0].variance_lost, rel=1e-6)
    assert report.sites[0].variance_lost > 1e-6


@every_generator
def test_caches(name, kind):
    """Stepwise logits through dynamic and static caches, at full width and narrow."""
    contract.test_stepwise_logits(FAMILIES[name], kind)
    contract.test_stepwise_logits_when_narrow(FAMILIES[name], kind)


@pytest.mark.parametrize("mode", ("beams", *slow("greedy")))
@every_generator
def test_generation(name, kind, mode):
    contract.test_generation(FAMILIES[name], kind, mode)


@pytest.mark.parametrize("cross", (False, True))
@pytest.mark.parametrize("name", ("bert-decoder", "marian-decoder", "gpt2-decoder"))
def test_decoder_cache(name, cross):
    for kind in WITH_VALUES:
        contract.test_decoder_cache.__wrapped__(name, kind, cross)


@pytest.mark.slow
@every_layout
def test_flex_equals_eager(name, kind):
    contract.test_flex_equals_eager(FAMILIES[name], kind)


@pytest.mark.slow
@every_layout
def test_compiles_to_one_graph(name, kind):
    contract.test_compiles_to_one_graph(FAMILIES[name], kind)


@pytest.mark.slow
@every_layout
def test_load_in_a_fresh_process(name, kind, tmp_path):
    contract.test_load_in_a_fresh_process(FAMILIES[name], kind, tmp_path)


@torch.no_grad()
@every_generator
def test_cached_elements(name, kind):
    """Values take as much less room as the report promises."""
    model, inputs = FAMILIES[name].build(), FAMILIES[name].inputs()
    report = swap(model, kind, NARROW[kind])
    _, cache = contract.stepwise(model, inputs)
    promised = {site.path: site.cache_after for site in report.sites}
    for role, part in contract.caches_of(cache).items():
        paths = [site.path for site in report.sites if site.role == role]
        for path, layer in zip(paths, part.layers, strict=True):
            key_heads, width = layer.values.shape[1::2]
            assert key_heads * width == NARROW_VALUES * key_heads_of(model)[path] // HEADS
            assert key_heads * (layer.keys.shape[-1] + width) == promised[path]


def key_heads_of(model):
    return {site.path: site.num_key_heads for site in get_adapter(model).sites(model)}


@every_pair
def test_what_changes(name, kind):
    """Shapes, report, record; nothing but the value projection, W_O, its bias, and query and key."""
    family = FAMILIES[name]
    model, stock = family.build(), family.build()
    report = swap(model, kind, NARROW[kind])
    assert len(report.sites) == family.num_sites
    changed, before = set(), stock.state_dict()
    for site, reported in zip(layers_of(model).with_heads, report.sites, strict=True):
        of_keys = site.site.num_key_heads / HEADS
        assert site.value.weight.shape[0] == site.value.out_features == NARROW_VALUES * of_keys
        assert weight_of(site.output).shape[1] == widths(site.output)[0] == NARROW_VALUES
        values = reported.dim_value, reported.dim_value_asked, reported.dim_value_exact
        assert values == (NARROW_VALUES * of_keys, NARROW_VALUES * of_keys, EXACT * of_keys)
        assert 0 < reported.variance_lost < 1
        state = record_of(model).site(site.site).values
        assert (state.dim, state.dim_head) == (PER_HEAD, HEAD_WIDTH)
        parts = (site.query_key, site.value, site.output)
        assert reported.parameters_after == sum(p.numel() for part in parts for p in part.parameters())
        changed |= {id(parameter) for part in parts for parameter in part.parameters()}
        if site.adapter.width is not None:
            assert getattr(site.module, site.adapter.width) == NARROW_VALUES
    saved = sum(site.parameters_before - site.parameters_after for site in report.sites)
    assert stock.num_parameters() - model.num_parameters() == saved > 0
    for parameter_name, parameter in model.named_parameters():
        assert id(parameter) in changed or torch.equal(parameter, before[parameter_name]), parameter_name
    assert "values" in str(report) and f"{NARROW_VALUES * of_keys:.0f}/{EXACT * of_keys:.0f}" in str(report)


@every_layout
def test_save_and_load(name, kind, tmp_path):
    """Bit-equal, base and task model, from the same files."""
    family = FAMILIES[name]
    model, inputs = family.build(), family.inputs()
    swap(model, kind, NARROW[kind])
    model.save_pretrained(tmp_path)
    loaded = aligned(type(model).from_pretrained(tmp_path).eval())
    assert_same_state(loaded, model)
    assert torch.equal(output(loaded, inputs), output(model, inputs))
    base = family.base.from_pretrained(tmp_path)
    assert_same_state(base.base_model, model.base_model, subset=True)
    base.save_pretrained(tmp_path / "base")
    again = type(model).from_pretrained(tmp_path / "base")
    assert again.config.collab_heads == model.config.collab_heads
    assert_same_state(again.base_model, model.base_model, subset=True)
    contract.test_from_config(family, kind, tmp_path / "config")
    contract.test_bfloat16_sharded(family, kind, tmp_path / "bfloat16")


@every_layout
def test_gradients(name, kind):
    """The new parameters of values and output receive gradients."""
    model = FAMILIES[name].build().train()
    swap(model, kind, NARROW[kind])
    loss(model, FAMILIES[name].inputs()).backward()
    for site in layers_of(model).with_heads:
        for parameter in (site.value.weight, site.output.weight, *site.query_key.parameters()):
            assert parameter.requires_grad and parameter.grad.abs().sum() > 0
    contract.test_gradient_checkpointing(FAMILIES[name], kind) if model.supports_gradient_checkpointing else None


@every_pair
def test_pruned_equals_gated(name, kind):
    """Removing closed heads of a narrowed model changes nothing; alphas, too."""
    empty, alphas = kind != "stock+values", name in ("bert", "t5")
    model = assert_pruned_equals_gated(FAMILIES[name], kind, empty=empty, alphas=alphas)
    for site in layers_of(model).with_heads:
        assert site.dim_value == site.site.num_key_heads * PER_HEAD


ORDERS = ("bert", "gpt2-decoder", "qwen3")  # by default


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in ORDERS)) for n in LAYOUTS])
def test_every_order(name):
    """At full width: gates, narrower values beside a swap, removed heads and alphas, whatever comes first."""
    family, configs, outputs = FAMILIES[name], [], []
    kind = WITH_VALUES[LAYOUTS.index(name) % len(WITH_VALUES)] if family.shares else "stock+values"
    orders = list(itertools.permutations(("swap", "prune", "gate", "mix")))
    for order in orders if name in ("bert", "t5") else orders[::5]:
        model = family.build().double()
        for step in order:
            if step == "swap":
                swap(model, kind)
            elif step == "prune":
                prune_heads(model, heads=removal(model, empty=False))
            else:
                (swap_to_gated if step == "gate" else swap_to_alpha)(model)
        configs.append(json.dumps(model.config.collab_heads))
        outputs.append(contract.real(output(model, family.inputs()), family.inputs()))
    assert len(set(configs)) == 1
    for found in outputs:
        torch.testing.assert_close(found, outputs[0], rtol=0, atol=family.exact64)


@pytest.mark.parametrize("state", ("gated", "both"))
@pytest.mark.parametrize("name", ("bert", "marian", "t5", "gpt2-decoder"))
def test_gates_and_alphas_stay(name, state):
    """Narrowed at full width after its heads were changed, a model computes what it computed; alphas restart."""
    family = FAMILIES[name]
    model, inputs = family.build().double(), family.inputs()
    change_heads(model, state)
    mix(model)
    before = output(model, inputs)
    swap_to_collaborative(model, dim_value=1.0)
    torch.testing.assert_close(output(model, inputs), before, rtol=0, atol=EXACT64)
    for projection in output_projections(model).values():
        if getattr(projection, "mixing", None) is not None:
            assert torch.equal(projection.mixing.alpha, torch.eye(projection.mixing.num_heads).double())


@pytest.mark.parametrize("name", ("bert", "t5"))
def test_narrowed_before_or_after_removal(name):
    """Without calibration heads are narrowed one by one: removing some first or last is the same."""
    family, outputs, configs = FAMILIES[name], [], []
    for steps in ((0, 1), (1, 0)):
        model = family.build().double()
        for step in steps:
            if step:
                prune_heads(model, heads=removal(model))
            else:
                swap_to_collaborative(model, dim_value=0.5)
        configs.append(model.config.collab_heads)
        outputs.append(contract.real(output(model, family.inputs()), family.inputs()))
    assert configs[0] == configs[1]
    if name == "t5":  # without biases, which would take over the means of removed heads
        torch.testing.assert_close(*outputs, rtol=0, atol=EXACT64)


@pytest.mark.parametrize("kind", (None, "shared", "per_head"))
@pytest.mark.parametrize("name", ("bert", "marian", "t5", "gpt2-decoder"))
def test_values_after_query_and_key(name, kind):
    """A site that is collaborative already gets narrower values alone, the same as both at once."""
    family = FAMILIES[name]
    at_once, one_by_one = family.build().double(), family.build().double()
    dims = {} if kind is None else {"dim_shared_query_key": NARROW[kind], "kind": kind}
    swap_to_collaborative(at_once, dim_value=NARROW_VALUES, **dims)
    if kind is not None:
        swap_to_collaborative(one_by_one, **dims)
    report = swap_to_collaborative(one_by_one, dim_value=0.5)
    assert {site.kind for site in report.sites} == {kind or "per_head"}
    assert at_once.config.collab_heads == one_by_one.config.collab_heads
    torch.testing.assert_close(dict(one_by_one.state_dict()), dict(at_once.state_dict()), rtol=0, atol=EXACT64)
    with refused(at_once, ModelStateError, "collaborative already"):
        swap_to_collaborative(at_once, dim_shared_query_key=8, dim_value=8)


@pytest.mark.parametrize("calibrated", (False, True))
def test_narrowed_twice(calibrated):
    """The second time from what the first one left; wider again is refused. A share is one of what there is."""
    family = FAMILIES["bert"]
    model = family.build().double()
    inputs = [cast(family.inputs(), torch.float64)] if calibrated else None
    swap_to_collaborative(model, dim_value=1.0, batches=inputs)
    swap_to_collaborative(model, dim_value=0.5, batches=inputs)
    once = family.build().double()
    swap_to_collaborative(once, dim_value=16, batches=inputs)
    assert model.config.collab_heads == once.config.collab_heads
    torch.testing.assert_close(output(model, family.inputs()), output(once, family.inputs()), rtol=0, atol=REGULARISED)
    with refused(model, ArgumentError, "dim_value 20", "expected 1 to 16"):
        swap_to_collaborative(model, dim_value=20)


def test_narrow_values_cannot_be_folded_or_exchanged():
    model = FAMILIES["bert"].build()
    swap(model, "stock+values", {"encoder.layer.0.attention.self": 16})
    path = "encoder.layer.0.attention.self"
    with refused(model, ModelStateError, path, "no stock form"):
        fold_heads(model)
    with refused(model, ModelStateError, f"{path} is collaborative"):
        rotate_heads(model, [((path, 0), ("encoder.layer.1.attention.self", 0))])


def test_all_heads_removed():
    """A site without heads has no values either, narrow or not."""
    family = FAMILIES["bert"]
    model = family.build()
    swap(model, "shared+values", 20)
    prune_heads(model, heads={"encoder.layer.0.attention.self": [0, 1, 2, 3]})
    record = record_of(model).sites
    assert [state.values is None for state in record.values()] == [True, False]
    assert not is_swapped(sites(model)["encoder.layer.0.attention.self"])
    report = swap_to_collaborative(model, dim_value=4)
    assert [site.path for site in report.sites] == ["encoder.layer.1.attention.self"]
