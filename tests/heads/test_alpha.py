"""swap_to_alpha: where alphas go, what the report says, what is refused."""

import json
import math

import pytest
import torch
from changed_heads import adapter_sites, gate, mix, mixings, output_projections
from model_inputs import batch
from model_runs import output, swap
from model_sizes import HEADS
from opening import alphas_in, record_of
from unchanged import refused

from collab_heads import fold_heads, inspect, prune_heads, swap_to_alpha, swap_to_gated
from collab_heads.adapters.bert import BertAdapter
from collab_heads.errors import ArgumentError, ModelStateError, NonFiniteError, UnsupportedModelError
from collab_heads.layers.output import HeadOutputProjection
from families import FAMILIES

LAYER_0, LAYER_1 = "encoder.layer.0.attention.self", "encoder.layer.1.attention.self"


def bert():
    return FAMILIES["bert"].build()


@pytest.mark.parametrize(
    "adapter, options, paths",
    (
        (None, {}, [LAYER_0, LAYER_1]),
        (BertAdapter, {"sites": "enc-self"}, [LAYER_0, LAYER_1]),
        (BertAdapter(), {"sites": LAYER_1}, [LAYER_1]),
        (None, {"sites": [LAYER_0]}, [LAYER_0]),
    ),
)
def test_sites(adapter, options, paths):
    model = bert()
    report = swap_to_alpha(model, adapter, **options)
    assert [*mixings(model)] == [site.path for site in report.sites] == paths
    assert [path for path, p in output_projections(model).items() if isinstance(p, HeadOutputProjection)] == paths
    assert list(model.config.collab_heads["sites"]) == paths


@pytest.mark.parametrize("role", ("enc-self", "dec-self", "dec-enc"))
def test_one_role_of_three(role):
    model = FAMILIES["marian"].build()
    assert {site.role for site in swap_to_alpha(model, sites=role).sites} == {role}
    assert [*mixings(model)] == [site.path for site in adapter_sites(model) if site.role == role]


def test_site_by_site_equals_at_once():
    at_once, one_by_one = FAMILIES["t5"].build(), FAMILIES["t5"].build()
    swap_to_alpha(at_once)
    for role in ("enc-self", "dec-self", "dec-enc"):
        report = swap_to_alpha(one_by_one, sites=role)
    assert report == inspect(at_once).alphas
    assert one_by_one.config.collab_heads == at_once.config.collab_heads
    assert one_by_one.state_dict().keys() == at_once.state_dict().keys()


def test_the_record():
    model = bert()
    swap_to_alpha(model, sites=LAYER_1)
    record = {"role": "enc-self", "num_heads": 4, "alphas": True}
    assert model.config.collab_heads == {"version": 1, "sites": {LAYER_1: record}}
    swap_to_gated(model, sites=LAYER_1)
    prune_heads(model, heads={LAYER_1: [1]})
    record = record_of(model).sites[LAYER_1]
    assert (record.kept, record.gates is None, record.alphas) == ((0, 2, 3), False, True)


def test_removal_changes_the_record():
    """Alphas stay with two heads and end with one."""
    model = bert()
    mix(model)
    removed = {LAYER_0: [1, 3], LAYER_1: [0, 1, 2]}
    report = prune_heads(model, heads=removed)
    assert report.sites == prune_heads(bert(), heads=removed).sites  # alphas are not parameters of a projection
    assert report.model_parameters_after == prune_heads(bert(), heads=removed).model_parameters_after + 2 * 2
    assert {path: state.alphas for path, state in record_of(model).sites.items()} == {
        LAYER_0: True,
        LAYER_1: False,
    }
    assert [(site.path, site.heads) for site in inspect(model).alphas.sites] == [(LAYER_0, 2)]
    assert mixings(model).keys() == {LAYER_0}
    prune_heads(model, heads={LAYER_0: [0, 2]})
    assert not mixings(model) and not inspect(model).alphas.sites


def test_alphas_can_come_back():
    """Folded, they leave a stock model, which can be mixed again."""
    model = bert()
    mix(model)
    report = fold_heads(model)
    assert (report.alphas, report.gates, report.restored) == ((LAYER_0, LAYER_1), (), {})
    assert report.model_parameters_before - report.model_parameters_after == 2 * HEADS**2
    assert json.loads(json.dumps(report.to_dict()))["alphas"] == [LAYER_0, LAYER_1]
    assert "gates of 0 sites and alphas of 2 folded into W_O, 0 removed heads" in str(report)
    assert not hasattr(model.config, "collab_heads")
    expected = output(model, batch())
    assert {site.distance for site in swap_to_alpha(model).sites} == {0.0}
    assert torch.equal(output(model, batch()), expected)


@pytest.mark.parametrize("trained", (True, False))
@pytest.mark.parametrize("mode", (True, False))
def test_mode_dtype_device_and_frozen_parameters_are_kept(mode, trained):
    model = bert().to(torch.bfloat16).train(mode).requires_grad_(trained)
    swap_to_alpha(model)
    assert all(module.training == mode for module in model.modules())
    for name, parameter in model.named_parameters():  # the part is trained, in steps that bfloat16 would lose
        assert parameter.dtype == (torch.float32 if name.endswith("mixing.alpha") else torch.bfloat16)
    assert {p.device for p in model.parameters()} == {torch.device("cpu")}
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (trained or name.endswith("mixing.alpha"))
    assert sum(name.endswith("mixing.alpha") for name, _ in model.named_parameters()) == 2


def test_alphas_of_a_frozen_model_learn():
    model = bert().requires_grad_(False)
    swap_to_alpha(model)
    model(**batch()).logits.square().sum().backward()
    learning = [name for name, p in model.named_parameters() if p.grad is not None]
    assert len(learning) == 2 and all(name.endswith("mixing.alpha") for name in learning)


def test_report():
    model = bert()
    first, second = swap_to_alpha(model).sites
    assert (first.path, first.role, first.heads) == (LAYER_0, "enc-self", 4)
    assert first.nuclear_norm == second.nuclear_norm == HEADS
    assert first.distance == second.distance == 0
    alphas = mixings(model)
    alphas[LAYER_0].alpha.data.copy_(torch.diag(torch.tensor([1.0, -2.0, 3.0, 1.0])).roll(1, 0))
    alphas[LAYER_1].alpha.data.fill_diagonal_(0.5)
    report = inspect(model).alphas
    first, second = report.sites
    assert first.nuclear_norm == pytest.approx(7)  # |1| + |-2| + |3| + |1|: a permutation keeps singular values
    assert first.distance == pytest.approx(math.sqrt(4 + 1 + 4 + 9 + 1))
    assert (second.nuclear_norm, second.distance) == (pytest.approx(2), pytest.approx(1))
    stored = json.loads(json.dumps(report.to_dict()))
    assert stored["sites"][1] == {
        "path": LAYER_1,
        "role": "enc-self",
        "heads": 4,
        "nuclear_norm": second.nuclear_norm,
        "distance": second.distance,
    }
    lines = str(report).splitlines()
    assert lines[0].split() == ["site", "role", "heads", "nuclear", "norm", "from", "identity"]
    assert lines[2].split() == [LAYER_0, "enc-self", "4", "7.0000", f"{math.sqrt(19):.4f}"]
    assert lines[3].split() == [LAYER_1, "enc-self", "4", "2.0000", "1.0000"]
    assert lines[-1] == "2 sites mix their heads"


def test_reports_change_nothing():
    model = bert().to(torch.bfloat16).train()
    mix(model)
    torch.manual_seed(0)
    before, state = [p.clone() for p in model.parameters()], torch.get_rng_state()
    assert all(isinstance(site.nuclear_norm, float) for site in inspect(model).alphas.sites)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, model.parameters(), before))


def test_a_report_without_alphas_is_empty():
    model = bert()
    assert inspect(model).alphas.sites == ()
    swap_to_gated(model)
    assert inspect(model).alphas.sites == ()
    assert str(inspect(model).alphas).splitlines()[-1] == "0 sites mix their heads"


def test_beside_gates():
    """Reports and lists of the ones do not see the others."""
    model = FAMILIES["marian"].build()
    swap_to_gated(model, sites="dec-enc")
    swap_to_alpha(model, sites=("dec-enc", "dec-self"))
    assert {site.role for site in inspect(model).gates.sites} == {"dec-enc"}
    assert [site.role for site in inspect(model).alphas.sites] == ["dec-self", "dec-enc"] * 2
    swap_to_gated(model, sites="dec-self")
    assert len(inspect(model).gates.sites) == len(inspect(model).alphas.sites) == 4
    with refused(model, ModelStateError, "has gates already"):
        swap_to_gated(model, sites="dec-self")


def test_alphas_of_a_collaborative_model_stay_in_its_record():
    model = bert()
    swap(model, "shared", 20)
    swap_to_alpha(model, sites=LAYER_0)
    states = record_of(model).sites
    assert states[LAYER_0].query_key == states[LAYER_1].query_key
    assert (states[LAYER_0].alphas, states[LAYER_1].alphas) == (True, False)
    assert [site.path for site, _ in alphas_in(model)] == [LAYER_0]
    with refused(model, ModelStateError, "heads that share their queries and keys have no stock form"):
        fold_heads(model)


WRONG = [
    ({"sites": "dec-self"}, ("no dec-self attention", "enc-self")),
    ({"sites": "encoder"}, ("'encoder' is neither a role nor a path",)),
    ({"sites": [LAYER_0, LAYER_0 + "x"]}, (f"'{LAYER_0}x' is neither a role nor a path", f"did you mean '{LAYER_0}'")),
    ({"sites": []}, ("sites is empty",)),
    ({"sites": 3}, ("sites 3",)),
]


@pytest.mark.parametrize("options, fragments", WRONG, ids=[str(options) for options, _ in WRONG])
def test_what_cannot_work(options, fragments):
    model = bert()
    with refused(model, ArgumentError, *fragments):
        swap_to_alpha(model, **options)


@pytest.mark.parametrize("first", ({}, {"sites": LAYER_1}), ids=("all", "one"))
def test_a_second_swap(first):
    model = bert()
    gate(model, empty=False)
    swap_to_alpha(model, **first)
    with refused(model, ModelStateError, f"{LAYER_1 if first else LAYER_0} has alphas already: fold_heads", "sites="):
        swap_to_alpha(model)


def test_a_single_head():
    model = bert()
    prune_heads(model, heads={LAYER_1: [0, 1, 3]})
    with refused(model, ModelStateError, f"{LAYER_1} has a single head", "leave the site out with sites="):
        swap_to_alpha(model)
    with refused(model, ModelStateError, f"{LAYER_1} has a single head"):
        swap_to_alpha(model, sites=LAYER_1)
    assert [site.path for site in swap_to_alpha(model, sites=LAYER_0).sites] == [LAYER_0]


def test_sites_without_heads_are_passed_over():
    model = bert()
    prune_heads(model, heads={LAYER_0: list(range(HEADS))})
    with refused(model, ArgumentError, LAYER_0, "neither a role nor a path"):
        swap_to_alpha(model, sites=LAYER_0)
    assert [site.path for site in swap_to_alpha(model).sites] == [LAYER_1]
    assert not record_of(model).sites[LAYER_0].alphas


@pytest.mark.parametrize("sites", (None, "enc-self", "encoder", LAYER_0))
def test_nothing_left_to_mix(sites):
    model = bert()
    prune_heads(model, heads={site.path: list(range(HEADS)) for site in adapter_sites(model)})
    with refused(model, ModelStateError, "no site of the model has heads left to mix"):
        swap_to_alpha(model, sites=sites)


def test_an_adapter_that_cannot():
    class Cautious(BertAdapter):
        capabilities = frozenset({"gated", "prune"})

    model = bert()
    with refused(model, UnsupportedModelError, "Cautious does not say it can do 'alpha'; it can: gated, prune"):
        swap_to_alpha(model, Cautious)
    assert "alpha" in BertAdapter.capabilities


@pytest.mark.parametrize("first, second", ((swap_to_gated, swap_to_alpha), (swap_to_alpha, swap_to_gated)))
def test_weights_on_the_meta_device_are_refused(first, second):
    model = bert()
    first(model)
    model.to("meta")
    with refused(model, ModelStateError, "meta device"):
        second(model)


def test_the_report_names_the_site_of_broken_alphas():
    model = bert()
    swap_to_alpha(model)
    mixings(model)[LAYER_1].alpha.data[0, 1] = float("nan")
    with pytest.raises(NonFiniteError, match=f"{LAYER_1}: its alphas contain NaN"):
        inspect(model)
