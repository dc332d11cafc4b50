"""Importance of heads: what it measures, by another computation; what it leaves as it was; what it refuses."""

import pytest
import torch
from model_runs import swap
from model_sizes import EXACT64, HEAD_WIDTH, HEADS
from opening import gates_in
from unchanged import assert_unchanged, refused, snapshot

from collab_heads import get_adapter, prune_heads, swap_to_gated
from collab_heads.analysis import HeadCriterion, head_importance, most_important
from collab_heads.base.option_values import CRITERION_WORDS
from collab_heads.errors import ArgumentError, CalibrationError, NonFiniteError, UnsupportedModelError
from collab_heads.heads.criteria import CRITERIA, Gradient
from collab_heads.layers.layout import weight_of
from families import FAMILIES

FP32_STORED = 1e-6  # what is measured in float64 is added up in float32: relative; seen: 1.1e-7
STEP, COARSE = 1e-5, 1e-6  # of central differences in float64, and the relative error that they leave; seen: 1.2e-7
FP32_STEP, FP32_COARSE = 1e-3, 2e-3  # T5's norms and GPT-2's loss are in float32: noise by step; seen: 1.6e-4, 8.5e-4
IN_FLOAT32 = ("t5", "gpt2")
MEASURED = ("bert", "distilbert", "albert", "albert-groups", "marian", "gpt2", "t5", "vit", "mpnet", "esm")


def labelled(family) -> dict:
    """The family's batch with labels; sequences of equal length where the loss is a mean over tokens."""
    inputs = dict(family.inputs())
    generator = torch.Generator().manual_seed(5)
    if set(family.roles) == {"dec-self"}:
        del inputs["attention_mask"]
        inputs["labels"] = inputs["input_ids"]
    elif "dec-enc" in family.roles:
        del inputs["decoder_input_ids"]
        inputs["labels"] = torch.randint(3, 60, (3, 6), generator=generator)
    else:
        inputs["labels"] = torch.tensor([0, 1, 1])
    return inputs


def cast(inputs: dict) -> dict:
    return {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


def build(name: str):
    model = FAMILIES[name].build()
    if hasattr(model.config, "problem_type"):
        model.config.problem_type = "single_label_classification"  # or the stock forward writes it there
    return model


def model_of(name: str):
    return build(name).double()


def output_projections(model):
    adapter = get_adapter(model)
    return {s.path: (s, adapter.output_projection(model, s)) for s in adapter.sites(model) if s.num_heads}


def losses(model, inputs) -> list[float]:
    """The loss of every example by itself."""
    count = len(inputs["labels"])
    with torch.no_grad():
        return [float(model(**{k: v[i : i + 1] for k, v in inputs.items()}).loss) for i in range(count)]


@torch.no_grad()
def by_differences(model, inputs, step) -> dict[str, torch.Tensor]:
    """mean_b |d loss_b / d gate_h|: the columns of W_O are what a gate multiplies."""
    found = {}
    for path, (site, projection) in output_projections(model).items():
        found[path] = torch.zeros(site.num_heads)
        weight = weight_of(projection)
        width = weight.shape[1] // site.num_heads
        for head in range(site.num_heads):
            columns = weight[:, head * width : (head + 1) * width]
            kept, sides = columns.clone(), []
            for factor in (1 + step, 1 - step):
                columns.copy_(kept * factor)
                sides.append(losses(model, inputs))
            columns.copy_(kept)
            slopes = [(up - down) / (2 * step) for up, down in zip(*sides, strict=True)]
            found[path][head] = sum(map(abs, slopes)) / len(slopes)
    return found


@pytest.mark.parametrize("name", MEASURED)
def test_it_is_the_mean_absolute_gradient_of_every_example(name):
    """Two batches of different sizes: every example counts alike."""
    model, inputs = model_of(name), cast(labelled(FAMILIES[name]))
    step, tolerance = (FP32_STEP, FP32_COARSE) if name in IN_FLOAT32 else (STEP, COARSE)
    expected = by_differences(model, inputs, step)
    batches = [{k: v[part] for k, v in inputs.items()} for part in (slice(0, 2), slice(2, 3))]
    found = head_importance(model, batches, criterion=Gradient(normalize=False))
    assert found.keys() == expected.keys() and len(found) == FAMILIES[name].num_sites
    for path, values in expected.items():
        assert found[path].shape == (HEADS,) and found[path].dtype == torch.float32
        torch.testing.assert_close(found[path], values, rtol=0, atol=tolerance * float(values.max()))
    assert max(float(values.max()) for values in expected.values()) > 1e-3
    normal = head_importance(model, batches)
    for path, values in normal.items():
        torch.testing.assert_close(values, found[path] / found[path].norm(), rtol=FP32_STORED, atol=0)


def test_examples_do_not_cancel():
    """Gradients of opposite signs add up: two examples in one batch measure what they do one by one."""
    model, inputs = model_of("bert"), cast(labelled(FAMILIES["bert"]))
    twice = {k: torch.cat([v[:1], v[:1]]) for k, v in inputs.items()}
    twice["labels"] = torch.tensor([0, 1])  # the same sentence with either label pulls a head both ways
    alone = [{k: v[i : i + 1] for k, v in twice.items()} for i in (0, 1)]
    together, apart = (head_importance(model, each, criterion=Gradient(normalize=False)) for each in ([twice], alone))
    for path, values in apart.items():
        torch.testing.assert_close(together[path], values, rtol=FP32_STORED, atol=0)


@pytest.mark.parametrize("name", ("bert", "marian", "albert"))
def test_useless_heads_get_zero(name):
    model, inputs = model_of(name), cast(labelled(FAMILIES[name]))
    useless = {}
    with torch.no_grad():
        for index, (path, (_, projection)) in enumerate(output_projections(model).items()):
            useless[path] = index % HEADS
            projection.weight[:, useless[path] * HEAD_WIDTH : (useless[path] + 1) * HEAD_WIDTH] = 0.0
    for path, values in head_importance(model, [inputs]).items():
        assert (values == 0).nonzero().flatten().tolist() == [useless[path]]


@pytest.mark.parametrize("name", ("bert", "marian", "albert-groups", "t5"))
def test_the_model_is_left_as_it_was(name):
    """Modes, hooks, gradients, parameters: of a model in training, half of it frozen, with a gradient at hand."""
    model, inputs = build(name).train(), labelled(FAMILIES[name])
    model.base_model.eval()
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 2 == 0)
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    before = snapshot(model)
    with torch.no_grad():
        head_importance(model, [inputs])
        assert not torch.is_grad_enabled()
    assert_unchanged(model, before)
    assert torch.equal(first.grad, torch.ones_like(first))


def test_dropout_is_off_and_nothing_is_drawn():
    model, inputs = build("bert").train(), labelled(FAMILIES["bert"])
    state = torch.get_rng_state()
    found = [head_importance(model, [inputs]) for _ in range(2)]
    assert all(torch.equal(found[0][path], found[1][path]) for path in found[0])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ("bert", "marian"))
def test_frozen_and_collaborative_models(name):
    model, inputs = model_of(name), cast(labelled(FAMILIES[name]))
    expected = head_importance(model, [inputs])
    model.requires_grad_(False)
    frozen = head_importance(model, [inputs])
    swap(model, "shared")  # without loss
    collaborative = head_importance(model, [inputs])
    for path, values in expected.items():
        assert torch.equal(frozen[path], values)
        torch.testing.assert_close(collaborative[path], values, rtol=FP32_STORED, atol=EXACT64)


def test_gated_and_pruned_models():
    """A closed head has no say; the others have what they have in the pruned model, without sites without heads."""
    model, inputs = model_of("marian"), cast(labelled(FAMILIES["marian"]))
    swap_to_gated(model)
    gates = {site.path: each for site, each in gates_in(model)}
    empty, partial, *_ = gates
    with torch.no_grad():
        gates[empty].log_alpha.fill_(-1.0)
        gates[partial].log_alpha.copy_(torch.tensor([0.5, -1.0, 1.0, -0.5]))  # open ones pass a part
    gated = head_importance(model, [inputs], criterion=Gradient(normalize=False))
    assert not gated[empty].any()
    assert [bool(value) for value in gated[partial]] == [True, False, True, False]
    prune_heads(model)
    pruned = head_importance(model, [inputs], criterion=Gradient(normalize=False))
    assert pruned.keys() == gated.keys() - {empty}
    torch.testing.assert_close(pruned[partial], gated[partial][[0, 2]], rtol=FP32_STORED, atol=EXACT64)


def test_what_it_refuses():
    model, inputs = build("bert"), labelled(FAMILIES["bert"])
    with refused(model, CalibrationError, "empty"):
        head_importance(model, [])
    with refused(model, CalibrationError, "expected an iterable"):
        head_importance(model, inputs)
    without = {k: v for k, v in inputs.items() if k != "labels"}
    with refused(model, CalibrationError, "BertForSequenceClassification gives no loss for batch 1", "labels"):
        head_importance(model, [inputs, without])
    with refused(model.base_model, CalibrationError, "BertModel gives no loss"):
        head_importance(model.base_model, [without])
    with refused(model.train(), CalibrationError, "cannot take batch 1", "batch_size"):  # the model's own words
        head_importance(model, [inputs, {**inputs, "labels": torch.tensor([0, 1])}])
    with pytest.raises(UnsupportedModelError, match="DataParallel"):
        head_importance(torch.nn.DataParallel(model), [inputs])


def test_weights_that_are_nan_are_named():
    model, inputs = build("bert"), labelled(FAMILIES["bert"])
    path = "encoder.layer.1.attention.self"
    output_projections(model)[path][1].weight.data[0, 0] = float("nan")
    with refused(model, NonFiniteError, f"{path}: its weight", "attention.output.dense.weight contains NaN or inf"):
        head_importance(model, [inputs])


def test_the_most_important_heads_are_kept():
    model = build("marian")
    roles = {s.path: s.role for s, _ in output_projections(model).values()}
    order = {path: i for i, path in enumerate(roles)}
    scores = {path: torch.arange(HEADS) + 10.0 * order[path] for path in roles}
    for target in (3, 5, 11, 24):
        kept = most_important(model, scores, target)
        assert kept.keys() == roles.keys()
        assert sum(map(sum, kept.values())) == target
        assert {roles[path] for path, values in kept.items() if any(values)} == set(roles.values())
    per_role = {"enc-self": 3, "dec-self": 0, "dec-enc": 5}
    kept = most_important(model, scores, per_role)
    assert {r: sum(sum(kept[p]) for p in roles if roles[p] == r) for r in per_role} == per_role
    last = max((p for p in roles if roles[p] == "enc-self"), key=order.get)
    assert kept[last] == [0, 1, 1, 1]
    report = swap_to_gated(model, alive_heads=kept)
    assert report.open == 8 and report.heads == 24
    assert {s.path: s.open for s in report.sites}[last] == (1, 2, 3)


def test_only_measured_sites_are_chosen_from():
    model = build("marian")
    path = next(iter(output_projections(model)))
    assert most_important(model, {path: torch.tensor([0.1, 0.4, 0.3, 0.2])}, 2) == {path: [0, 1, 1, 0]}


def test_a_model_without_heads_has_nothing_to_measure():
    model, inputs = build("bert"), labelled(FAMILIES["bert"])
    prune_heads(model, heads={"enc-self": [list(range(HEADS))] * 2})
    assert head_importance(model, [inputs]) == {}


def test_targets_that_cannot_be_are_refused():
    model = build("marian")
    scores = {path: torch.rand(HEADS) for path in output_projections(model)}
    for target, message in (
        (25, "24 heads"),
        (2, "would empty a role"),
        ({"enc-self": 1}, "no number for"),
        (True, "True"),
    ):
        with pytest.raises(ArgumentError, match=message):
            most_important(model, scores, target)


class Last(HeadCriterion):
    """The last heads matter most."""

    name = "last"
    needs_batches = False

    def scores(self, model, sites, batches):
        return {site.path: torch.arange(float(site.num_heads)) for site in sites}


def test_a_criterion_that_forgets_a_site_is_named():
    class Forgets(Last):
        def scores(self, model, sites, batches):
            return super().scores(model, sites[1:], batches)

    model, batches = FAMILIES["bert"].build(), [FAMILIES["bert"].inputs()]
    with refused(model, ArgumentError, "criterion 'last' gives no scores for encoder.layer.0"):
        prune_heads(model, batches, keep=3, criterion=Forgets())


def test_a_criterion_of_ones_own_ranks_heads():
    model, batches = FAMILIES["bert"].build(), [FAMILIES["bert"].inputs()]
    scores = head_importance(model, batches, criterion=Last())
    alive = most_important(model, scores, 4)
    assert [heads for heads in alive.values()] == [[0, 0, 1, 1]] * 2


@pytest.mark.parametrize("name", CRITERIA)
def test_every_criterion_scores_every_head(name):
    assert tuple(CRITERIA) == CRITERION_WORDS  # what the commands offer
    model = FAMILIES["bert"].build()
    inputs = FAMILIES["bert"].inputs()
    batches = [{**inputs, "labels": torch.tensor([0, 1, 0])}] if CRITERIA[name].needs_labels else [inputs]
    scores = head_importance(model, batches, criterion=name)
    assert {path: values.shape for path, values in scores.items()} == dict.fromkeys(scores, (4,)) and len(scores) == 2
    assert all(values.dtype == torch.float32 and torch.isfinite(values).all() for values in scores.values())
