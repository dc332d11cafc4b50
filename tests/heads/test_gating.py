"""swap_to_gated: where gates go, what the report says, what is refused."""

import json
import math
import warnings

import pytest
import torch
from changed_heads import adapter_sites, output_projections, set_gates
from model_inputs import batch
from model_runs import aligned, output, swap
from model_sizes import HEADS
from opening import gates_in, record_of
from unchanged import refused

from collab_heads import inspect, prune_heads, swap_to_alpha, swap_to_gated
from collab_heads.adapters.bert import BertAdapter
from collab_heads.errors import ArgumentError, ModelStateError
from collab_heads.layers.output import HeadOutputProjection
from collab_heads.sites.state import GateState
from collab_heads.training import HeadPenalty
from families import FAMILIES

LAYER_0, LAYER_1 = "encoder.layer.0.attention.self", "encoder.layer.1.attention.self"


def bert():
    return FAMILIES["bert"].build()


def gated_paths(model):
    return [path for path, p in output_projections(model).items() if isinstance(p, HeadOutputProjection)]


@pytest.mark.parametrize(
    "adapter, options, paths",
    (
        (None, {}, [LAYER_0, LAYER_1]),
        (BertAdapter, {"sites": "enc-self"}, [LAYER_0, LAYER_1]),
        (BertAdapter(), {"sites": LAYER_1}, [LAYER_1]),
        (None, {"sites": [LAYER_0]}, [LAYER_0]),
        (None, {"alive_heads": {LAYER_1: [1, 0, 0, 1]}}, [LAYER_1]),
    ),
)
def test_sites(adapter, options, paths):
    model = bert()
    report = swap_to_gated(model, adapter, **options)
    assert gated_paths(model) == [site.path for site in report.sites] == paths
    assert list(model.config.collab_heads["sites"]) == paths


def test_the_record():
    model = bert()
    swap_to_gated(model, temperature=0.5, stretch=(-0.2, 1.3), sites=LAYER_1)
    assert model.config.collab_heads == {
        "version": 1,
        "sites": {
            LAYER_1: {
                "role": "enc-self",
                "num_heads": 4,
                "gates": {"kind": "learned", "temperature": 0.5, "stretch": [-0.2, 1.3]},
            }
        },
    }
    assert output_projections(model)[LAYER_1].gates.state == GateState("learned", 0.5, (-0.2, 1.3))


@pytest.mark.parametrize("start, opened", ((2.5, HEADS), (0.1, HEADS), (0, 0), (-3.0, 0)))
def test_where_gates_start(start, opened):
    model = bert()
    report = swap_to_gated(model, init_log_alpha=start)
    for projection in output_projections(model).values():
        assert projection.gates.log_alpha.tolist() == pytest.approx([start] * HEADS)
    assert report.open == 2 * opened


@pytest.mark.parametrize(
    "options", ({}, {"stretch": (-0.1, 1.05)}, {"temperature": 2.0, "stretch": (-1.0, 1.1)}), ids=str
)
def test_new_gates_change_no_output(options):
    model = bert()
    expected = output(model, batch())
    assert swap_to_gated(model, **options).open == 2 * HEADS
    assert torch.equal(output(model, batch()), expected)


def test_fixed_gates_are_those_asked_for():
    model = FAMILIES["marian"].build()
    alive = {"enc-self": [[1, 0, 1, 1], [0, 1, 1, 1]], "dec-enc": [[0, 0, 0, 0], [1, 1, 1, 0]]}
    report = swap_to_gated(model, alive_heads=alive)
    found = {(site.role, site.open) for site in report.sites}
    assert found == {("enc-self", (0, 2, 3)), ("enc-self", (1, 2, 3)), ("dec-enc", ()), ("dec-enc", (0, 1, 2))}
    assert not any("log_alpha" in name for name, _ in model.named_parameters())
    before = output(model, FAMILIES["marian"].inputs())
    prune_heads(model)
    torch.testing.assert_close(
        output(model, FAMILIES["marian"].inputs()), before, rtol=0, atol=2e-5
    )  # float32 sums in another order; seen: 2e-6


def test_learned_beside_fixed():
    model = bert()
    swap_to_gated(model, alive_heads={LAYER_0: [1, 1, 1, 0]})
    with refused(model, ModelStateError, LAYER_0, "has gates already"):
        swap_to_gated(model)
    swap_to_gated(model, sites=LAYER_1)
    assert [site.path for site, _ in gates_in(model)] == [LAYER_0, LAYER_1]
    assert [site.path for site, _ in gates_in(model, learned=True)] == [LAYER_1]


@pytest.mark.parametrize("options", (None, {"alive_heads": {LAYER_0: [1, 1, 1, 0]}}))
def test_a_penalty_asks_for_learned_gates(options):
    model = bert()
    if options is not None:
        swap_to_gated(model, **options)
    with refused(model, ModelStateError, "the model has no learned gates: call swap_to_gated first"):
        HeadPenalty(model, gate_weight=1.0)


def test_a_subset_is_stored_as_one(tmp_path):
    """A checkpoint from the middle of a selection evaluates as it was measured: heads are open or closed, not half."""
    model = bert()
    swap_to_gated(model)
    penalty = HeadPenalty(model, target_heads=3, steps=4)
    for _ in range(2):
        penalty.step()
    expected = output(model, batch())
    values = torch.cat([gates.values() for _, gates in gates_in(model)])
    assert sorted(values.tolist()) == [0.0] * 2 + [1.0] * 6
    model.save_pretrained(tmp_path)
    loaded = aligned(type(model).from_pretrained(tmp_path).eval())
    assert {site["gates"]["kind"] for site in loaded.config.collab_heads["sites"].values()} == {"subset"}
    assert torch.equal(output(loaded, batch()), expected)
    HeadPenalty(loaded, gate_weight=1.0)
    assert {site["gates"]["kind"] for site in loaded.config.collab_heads["sites"].values()} == {"learned"}
    assert not torch.equal(output(loaded, batch()), expected)


@pytest.mark.parametrize("trained", (True, False))
@pytest.mark.parametrize("mode", (True, False))
def test_mode_dtype_and_frozen_parameters_are_kept(mode, trained):
    model = bert().to(torch.bfloat16).train(mode).requires_grad_(trained)
    swap_to_gated(model)
    assert all(module.training == mode for module in model.modules())
    for name, parameter in model.named_parameters():  # the part is trained, in steps that bfloat16 would lose
        assert parameter.dtype == (torch.float32 if name.endswith("gates.log_alpha") else torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (trained or name.endswith("gates.log_alpha"))


def test_report():
    model = bert()
    swap_to_gated(model, temperature=0.5)
    projections = output_projections(model)
    set_gates(projections[LAYER_0], (9.0, -9.0, 0.5, -0.5))
    set_gates(projections[LAYER_1], (-9.0, -9.0, -9.0, 0.0))
    report = inspect(model).gates
    first, second = report.sites

    def probability(log_alpha):
        return 1 / (1 + math.exp(-(log_alpha - 0.5 * math.log(0.1 / 1.1))))

    assert (first.path, first.role, first.heads, first.open) == (LAYER_0, "enc-self", 4, (0, 2))
    assert first.expected_open == pytest.approx(sum(map(probability, (9.0, -9.0, 0.5, -0.5))), abs=1e-5)
    assert (first.decided, second.decided) == (2, 3)
    assert second.open == ()
    assert (report.heads, report.open, report.decided) == (8, 2, 5)
    assert report.expected_open == pytest.approx(first.expected_open + second.expected_open)
    stored = json.loads(json.dumps(report.to_dict()))
    assert (stored["heads"], stored["open"], stored["decided"]) == (8, 2, 5)
    assert stored["sites"][0]["open"] == [0, 2]
    lines = str(report).splitlines()
    assert lines[0].split() == ["site", "role", "open", "expected", "decided", "heads"]
    assert lines[2].split()[:3] == [LAYER_0, "enc-self", "2/4"]
    assert lines[2].endswith("0 2") and lines[3].endswith("none")
    assert lines[-1] == f"2 of 8 heads open, {report.expected_open:.1f} expected in training"


def test_a_report_without_gates_is_empty():
    report = inspect(bert()).gates
    assert (report.heads, report.open, report.expected_open, report.sites) == (0, 0, 0, ())


def test_reports_draw_nothing():
    model = bert().train()
    swap_to_gated(model, init_log_alpha=0.0)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    inspect(model)
    assert torch.equal(torch.get_rng_state(), state)


WRONG = [
    ({"sites": "dec-self"}, ("no dec-self attention", "enc-self")),
    ({"sites": "encoder"}, ("'encoder' is neither a role nor a path",)),
    ({"sites": []}, ("sites is empty",)),
    ({"sites": 3}, ("sites 3",)),
    ({"temperature": 0}, ("temperature is 0", "above 0")),
    ({"temperature": -1.0}, ("temperature is -1.0",)),
    ({"temperature": True}, ("temperature is True",)),
    ({"temperature": "0.3"}, ("temperature is '0.3'",)),
    ({"temperature": math.nan}, ("temperature is nan",)),
    ({"stretch": (0.0, 1.1)}, ("stretch is (0.0, 1.1)", "one below 0 and one above 1")),
    ({"stretch": (-0.1, 1.0)}, ("stretch is (-0.1, 1.0)",)),
    ({"stretch": (-0.1,)}, ("stretch is (-0.1,)",)),
    ({"stretch": 1.1}, ("stretch is 1.1",)),
    ({"stretch": (-0.1, math.inf)}, ("stretch is (-0.1, inf)",)),
    ({"init_log_alpha": math.nan}, ("init_log_alpha nan",)),
    ({"init_log_alpha": "2"}, ("init_log_alpha '2'",)),
    ({"init_log_alpha": True}, ("init_log_alpha True",)),
    ({"alive_heads": {}}, ("alive_heads must be a dict",)),
    ({"alive_heads": {"enc-self": [[1, 0, 1, 2], [1, 1, 1, 1]]}}, (LAYER_0, "head 3: 2 is neither 0 nor 1")),
    ({"alive_heads": {"enc-self": [[1, 0, 1], [1, 1, 1, 1]]}}, (LAYER_0, "4 heads, the list 3 values")),
    ({"alive_heads": {"dec-enc": [[1, 0, 1, 0]]}}, ("no dec-enc attention",)),
    ({"alive_heads": {LAYER_0: [1, 0, 1, 1]}, "sites": LAYER_0}, ("leave sites out",)),
]


@pytest.mark.parametrize("options, fragments", WRONG, ids=[str(options) for options, _ in WRONG])
def test_what_cannot_work(options, fragments):
    model = bert()
    with refused(model, ArgumentError, *fragments):
        swap_to_gated(model, **options)


def test_sites_without_heads_are_passed_over():
    model = bert()
    prune_heads(model, heads={LAYER_0: list(range(HEADS))})
    assert [site.path for site in swap_to_gated(model).sites] == [LAYER_1]
    assert record_of(model).sites[LAYER_0].gates is None
    model = bert()
    prune_heads(model, heads={LAYER_0: list(range(HEADS))})
    with refused(model, ArgumentError, LAYER_0, "neither a role nor a path"):
        swap_to_gated(model, sites=LAYER_0)
    swap_to_gated(model, alive_heads={"enc-self": [[1, 0, 1, 1]]})  # one list: for the site that has heads
    assert inspect(model).gates.sites[0].open == (0, 2, 3)


def test_nothing_left_to_gate():
    model = bert()
    prune_heads(model, heads={site.path: list(range(HEADS)) for site in adapter_sites(model)})
    for options in ({}, {"sites": "encoder"}, {"alive_heads": {"x": [1]}}):
        with refused(model, ModelStateError, "no site of the model has heads left"):
            swap_to_gated(model, **options)


def test_gates_on_a_collaborative_model_stay_in_its_record():
    model = bert()
    swap(model, "shared", 20)
    swap_to_gated(model, sites=LAYER_0)
    states = record_of(model).sites
    assert states[LAYER_0].query_key == states[LAYER_1].query_key
    assert states[LAYER_0].gates == GateState()
    assert states[LAYER_1].gates is None


@pytest.mark.parametrize("change", (swap_to_gated, swap_to_alpha))
def test_the_report_of_a_change_needs_no_gradient(change):
    """Else torch warns, and where warnings are errors the model is changed by then."""
    model, always = bert(), torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            change(model)
    finally:
        torch.set_warn_always(always)
