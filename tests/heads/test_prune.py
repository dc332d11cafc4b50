"""prune_heads: which heads go, what is left of the parameters, what the report says."""

import json

import pytest
import torch
from changed_heads import change_queries, output_projections, set_gates
from model_inputs import batch
from model_runs import output, sites
from model_sizes import HEAD_WIDTH, HEADS, WIDTH
from opening import layers_of, record_of
from torch.testing import assert_close
from unchanged import refused

from collab_heads import fold_heads, get_adapter, inspect, prune_heads, swap_to_gated
from collab_heads.analysis import head_importance, most_important
from collab_heads.errors import ArgumentError, ModelStateError
from families import FAMILIES

LAYER_0, LAYER_1 = "encoder.layer.0.attention.self", "encoder.layer.1.attention.self"
CONSTANT = 1e-4  # float32; differences seen: 1.1e-6
PER_HEAD = 4 * WIDTH * HEAD_WIDTH + 3 * HEAD_WIDTH  # rows of W_Q, W_K, W_V with biases, columns of W_O


def bert():
    return FAMILIES["bert"].build()


def gated(*log_alphas):
    model = bert()
    swap_to_gated(model)
    for projection, values in zip(output_projections(model).values(), log_alphas, strict=True):
        set_gates(projection, values)
    return model


def test_rows_and_columns_of_the_kept_heads():
    model, stock = bert(), bert()
    prune_heads(model, heads={"enc-self": [[1, 2], [0, 1, 3]]})
    for layer, kept in enumerate(([0, 3], [2])):
        rows = [head * HEAD_WIDTH + i for head in kept for i in range(HEAD_WIDTH)]
        ours, theirs = (m.bert.encoder.layer[layer].attention for m in (model, stock))
        for name in ("query", "key", "value"):
            assert torch.equal(getattr(ours.self, name).weight, getattr(theirs.self, name).weight[rows])
            assert torch.equal(getattr(ours.self, name).bias, getattr(theirs.self, name).bias[rows])
        assert torch.equal(ours.output.dense.weight, theirs.output.dense.weight[:, rows])
        assert torch.equal(ours.output.dense.bias, theirs.output.dense.bias)


def test_by_path_and_by_role():
    by_path, by_role = bert(), bert()
    prune_heads(by_path, heads={LAYER_1: [2, 0]})
    prune_heads(by_role, heads={"enc-self": [[], [0, 2]]})
    assert by_path.config.collab_heads == by_role.config.collab_heads
    assert list(by_path.config.collab_heads["sites"]) == [LAYER_1]
    assert by_path.config.collab_heads["sites"][LAYER_1]["kept"] == [1, 3]


def test_report():
    model = bert()
    before = model.num_parameters()
    report = prune_heads(model, heads={"enc-self": [[0, 1, 2, 3], [1]]})
    first, second = report.sites
    assert (first.path, first.role, first.heads_before, first.heads_after, first.kept) == (
        LAYER_0,
        "enc-self",
        4,
        0,
        (),
    )
    assert (second.heads_before, second.heads_after, second.kept) == (4, 3, (0, 2, 3))
    assert first.parameters_before == second.parameters_before == HEADS * PER_HEAD + WIDTH
    assert (first.parameters_after, second.parameters_after) == (WIDTH, 3 * PER_HEAD + WIDTH)
    assert (first.cache_before, first.cache_after, second.cache_after) == (0, 0, 0)  # an encoder has none
    assert report.removed == 5
    assert (report.model_parameters_before, report.model_parameters_after) == (before, before - 5 * PER_HEAD)
    assert model.num_parameters() == before - 5 * PER_HEAD
    stored = json.loads(json.dumps(report.to_dict()))
    assert stored["removed"] == 5 and stored["sites"][1]["kept"] == [0, 2, 3]
    lines = str(report).splitlines()
    assert lines[0].split() == ["site", "role", "heads", "parameters", "kept"]
    assert "4 -> 0" in lines[2] and lines[2].endswith("none")
    assert "4 -> 3" in lines[3] and lines[3].endswith("0 2 3")
    change = (before - 5 * PER_HEAD) / before - 1
    assert lines[-1] == f"5 heads removed; model parameters {before:,} -> {before - 5 * PER_HEAD:,} ({change:+.1%})"


@pytest.mark.parametrize("kind", ("shared", "per_head"))
def test_report_of_a_collaborative_model(kind):
    model = bert()
    change_queries(model, kind)
    shapes = {path: sum(p.numel() for p in module.parameters()) for path, module in sites(model).items()}
    outputs = {path: sum(p.numel() for p in module.parameters()) for path, module in output_projections(model).items()}
    report = prune_heads(model, heads={"enc-self": [[0], [1, 2]]})
    for site in report.sites:
        module, projection = sites(model)[site.path], output_projections(model)[site.path]
        assert site.parameters_before == shapes[site.path] + outputs[site.path]
        parameters = [*module.parameters(), *projection.parameters()]
        assert site.parameters_after == sum(p.numel() for p in parameters) < site.parameters_before
        assert record_of(model).sites[site.path].query_key == module.query_key.state


def test_report_of_gates():
    """Gates are not parameters of a projection, and go."""
    model = gated((3.0, -1.0, 3.0, 3.0), (3.0,) * HEADS)
    before = model.num_parameters()
    report = prune_heads(model)
    assert [(site.heads_after, site.kept) for site in report.sites] == [(3, (0, 2, 3)), (4, (0, 1, 2, 3))]
    assert [site.parameters_before for site in report.sites] == [HEADS * PER_HEAD + WIDTH] * 2
    assert [site.parameters_after for site in report.sites] == [3 * PER_HEAD + WIDTH, 4 * PER_HEAD + WIDTH]
    assert report.model_parameters_before - report.model_parameters_after == PER_HEAD + 2 * HEADS
    assert report.model_parameters_before == before
    assert list(model.config.collab_heads["sites"]) == [LAYER_0]


def test_open_gates_alone_leave_a_stock_model():
    model = gated((3.0,) * HEADS, (1.0,) * HEADS)
    expected = output(model, FAMILIES["bert"].inputs())
    prune_heads(model)
    assert not hasattr(model.config, "collab_heads")
    assert model.state_dict().keys() == bert().state_dict().keys()
    torch.testing.assert_close(
        output(model, FAMILIES["bert"].inputs()), expected, rtol=0, atol=2e-5
    )  # float32 sums in another order; seen: 1e-6


def test_by_name_leaves_the_gates_of_the_others():
    model = gated((0.1, 0.2, 0.3, 0.4), (0.5, 0.6, 0.7, 0.8))
    prune_heads(model, heads={LAYER_0: [1], LAYER_1: [0, 1, 2, 3]})
    first, second = output_projections(model).values()
    assert first.gates.log_alpha.tolist() == pytest.approx([0.1, 0.3, 0.4])
    assert not hasattr(second, "gates")
    assert [site.path for site in inspect(model).gates.sites] == [LAYER_0]
    states = record_of(model).sites
    assert states[LAYER_0].gates is not None and states[LAYER_1].gates is None


@pytest.mark.parametrize("trained", (True, False))
@pytest.mark.parametrize("mode", (True, False))
@pytest.mark.parametrize("origin", (None, "shared", "per_head"))
@pytest.mark.parametrize("undo", (False, True))
def test_mode_dtype_and_frozen_parameters_are_kept(mode, trained, origin, undo):
    model = bert().to(torch.bfloat16)
    change_queries(model, origin)
    model.train(mode).requires_grad_(trained)
    prune_heads(model, heads={"enc-self": [[0, 1, 2, 3], [0, 2]]})
    if undo and origin is None:
        fold_heads(model)
    assert all(module.training == mode for module in model.modules())
    assert {(p.dtype, p.requires_grad) for p in model.parameters()} == {(torch.bfloat16, trained)}


def test_partly_frozen_parameters():
    model = bert()
    for layer in model.bert.encoder.layer:
        layer.attention.self.value.requires_grad_(False)
        layer.attention.output.dense.bias.requires_grad_(False)
    expected = {name: p.requires_grad for name, p in model.named_parameters()}
    prune_heads(model, heads={"enc-self": [[3], [0, 2]]})
    assert {name: p.requires_grad for name, p in model.named_parameters()} == expected
    fold_heads(model)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == expected


def test_no_gates_and_no_list():
    model = bert()
    with refused(model, ModelStateError, "the model has no gates", "name the heads to remove", "swap_to_gated"):
        prune_heads(model)
    prune_heads(model, heads={LAYER_0: [1]})
    with refused(model, ModelStateError, "the model has no gates"):
        prune_heads(model)


@pytest.mark.parametrize(
    "heads, fragments",
    (
        ({}, ("heads must be a dict",)),
        ([[0], [1]], ("heads must be a dict",)),
        ({"dec-self": [[0]]}, ("no dec-self attention", "enc-self")),
        ({"encoder": [0]}, ("'encoder' is neither a role nor a path",)),
        ({LAYER_0: [4]}, (LAYER_0, "no head 4; it has 0, 1, 2, 3")),
        ({LAYER_0: [0], LAYER_1: [0, 7]}, (LAYER_1, "no head 7")),
        ({"enc-self": [[0]]}, ("2 in all, not 1 entries",)),
    ),
    ids=str,
)
def test_heads_that_do_not_exist(heads, fragments):
    for model in (bert(), gated((3.0,) * HEADS, (3.0,) * HEADS)):
        with refused(model, ArgumentError, *fragments):
            prune_heads(model, heads=heads)


def test_a_head_that_is_gone():
    model = bert()
    prune_heads(model, heads={LAYER_0: [1], LAYER_1: [0, 1, 2, 3]})
    with refused(model, ArgumentError, LAYER_0, "no head 1; it has 0, 2, 3"):
        prune_heads(model, heads={LAYER_0: [1]})
    with refused(model, ArgumentError, LAYER_1, "no head 0; it has none"):
        prune_heads(model, heads={LAYER_1: [0]})


def test_nothing_to_remove_changes_nothing():
    model = bert()
    expected = output(model, FAMILIES["bert"].inputs())
    report = prune_heads(model, heads={"enc-self": [[], []]})
    assert (report.sites, report.removed) == ((), 0)
    assert not hasattr(model.config, "collab_heads")
    assert torch.equal(output(model, FAMILIES["bert"].inputs()), expected)


def test_position_bias_keeps_its_original_columns():
    """T5: pruned twice, a site looks at the columns of its original heads."""
    model = FAMILIES["t5"].build()
    path = get_adapter(model).sites(model)[0].path
    prune_heads(model, heads={path: [0]})
    prune_heads(model, heads={path: [2]})
    assert sites(model)[path].kept_heads == [1, 3]
    fold_heads(model)
    assert not hasattr(sites(model)[path], "kept_heads")


def test_keep_is_the_ranking_and_the_removal_in_one_call():
    inputs = FAMILIES["bert"].inputs()
    batches = [inputs, {name: tensor.flip(0) for name, tensor in inputs.items()}]
    ours, theirs = bert(), bert()
    report = prune_heads(ours, iter(batches), keep=5)
    alive = most_important(theirs, head_importance(theirs, batches, criterion="reconstruction"), 5)
    removed = {path: [head for head, stays in enumerate(heads) if not stays] for path, heads in alive.items()}
    prune_heads(theirs, batches, heads=removed)
    assert sum(site.heads_after for site in report.sites) + 4 * (2 - len(report.sites)) == 5
    assert ours.config.collab_heads == theirs.config.collab_heads
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_heads_that_put_out_constants(dtype):
    """Around their mean only rounding is left, which is not a positive definite matrix."""
    for seed in range(4):
        model = bert().to(dtype)
        with torch.no_grad():
            for site in layers_of(model).with_heads:
                torch.manual_seed(seed)
                site.value.weight.zero_()
                site.value.bias.normal_(std=10)
        inputs = FAMILIES["bert"].inputs()
        before = output(model, inputs)
        prune_heads(model, [inputs], keep=5)
        assert_close(output(model, inputs), before, atol=CONSTANT, rtol=CONSTANT)  # biases make up for them


def test_keep_by_role_by_any_criterion_and_after_a_removal():
    inputs = FAMILIES["marian"].inputs()
    labelled = [{**inputs, "labels": inputs["decoder_input_ids"]}]
    for criterion, batches in (("gradient", labelled), ("random", None)):
        model = FAMILIES["marian"].build()
        prune_heads(model, heads={"dec-enc": [[0], [0]]})
        report = prune_heads(model, batches, keep={"dec-enc": 4}, criterion=criterion)
        assert {site.role for site in report.sites} == {"dec-enc"}
        kept = [state["kept"] for state in model.config.collab_heads["sites"].values()]
        assert sum(map(len, kept)) == 4 and all(0 not in numbers for numbers in kept)


@pytest.mark.parametrize(
    "arguments, fragments",
    (
        ({"keep": 4, "heads": {"enc-self": [[0], [1]]}}, "heads and keep exclude each other"),
        ({"keep": 4}, "criterion 'reconstruction' ranks heads by what they do: pass batches"),
        ({"keep": 9, "batches": [batch()]}, "8"),
        ({"keep": {"dec-self": 1}, "batches": [batch()]}, "unknown role in keep 'dec-self'"),
        ({"keep": {}, "batches": [batch()]}, "keep names no number"),
        ({"keep": 0, "batches": [batch()]}, "keep 0 would empty a role"),
        ({"heads": {"enc-self": [[0], [1]]}, "criterion": "chance"}, "unknown criterion 'chance'"),
        ({"batches": {"enc-self": [[0], [1]]}}, "name the heads to remove with heads="),
        ({"keep": 4, "batches": [batch()], "criterion": "gradiant"}, "did you mean 'gradient'"),
    ),
)
def test_a_keep_that_cannot_be(arguments, fragments):
    model = bert()
    with refused(model, ArgumentError, fragments):
        prune_heads(model, **arguments)
