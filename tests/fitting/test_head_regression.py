"""Heads that others stand in for: the regression, the greedy order, and W_O refitted when heads are removed."""

import copy
import itertools

import pytest
import torch
from changed_heads import gate, mix
from model_inputs import cast
from model_runs import aligned, output, sites, swap
from model_sizes import EXACT64, HEADS, KINDS
from opening import layers_of
from unchanged import refused

from collab_heads import get_adapter, prune_heads, swap_to_gated
from collab_heads.analysis import head_importance, most_important
from collab_heads.calibration.input_moments import InputMoments
from collab_heads.errors import ArgumentError, CalibrationError, NonFiniteError
from collab_heads.fitting import head_regression
from collab_heads.fitting.head_regression import HeadRegression
from collab_heads.model import apply_state
from families import FAMILIES

SOME = pytest.mark.parametrize("name", ("bert", "distilbert", "albert-groups", "marian", "t5", "vit"))
WIDTH, DIM, TOKENS = 3, 5, 4000
FIT = 1e-5  # the ridge, and float64 through a solve


@pytest.fixture(autouse=True)
def as_shown(monkeypatch):
    """Few tokens are taken at their word, so that what is planted can be found."""
    monkeypatch.setattr(head_regression, "DOUBT", 0.0)


def weight_and_outputs(*, redundant=True, offset=2.0) -> tuple[torch.Tensor, torch.Tensor]:
    """W_O [D, H * d_v] and heads' outputs [1, tokens, H * d_v]; head 2 is made of heads 0 and 1, if redundant."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    heads = [draw(TOKENS, WIDTH) + offset for _ in range(HEADS)]
    if redundant:
        heads[2] = heads[0] @ draw(WIDTH, WIDTH) + heads[1] @ draw(WIDTH, WIDTH) + offset
    return draw(DIM, HEADS * WIDTH), torch.cat(heads, dim=-1)[None]


def regression(weight, heads, **options) -> HeadRegression:
    return HeadRegression.of(weight, InputMoments.of(heads), HEADS, **{"gates": None, "has_bias": True} | options)


def columns(kept):
    return [head * WIDTH + i for head in kept for i in range(WIDTH)]


def test_a_head_that_others_make_up_for_is_not_missed():
    weight, heads = weight_and_outputs()
    fit = regression(weight, heads).refit([0, 1, 3])
    assert fit.share_lost < 1e-6
    missing = heads @ weight.mT - (heads[..., columns([0, 1, 3])] @ fit.weight.mT + fit.bias)
    assert missing.abs().max() < FIT * weight.norm() * heads.norm(dim=-1).max()


def test_it_is_least_squares():
    """By torch's solver, on the tokens themselves."""
    weight, heads = weight_and_outputs(redundant=False)
    kept = [1, 3]
    inputs = torch.cat([heads[0][:, columns(kept)], torch.ones(TOKENS, 1, dtype=torch.float64)], dim=1)
    expected = torch.linalg.lstsq(inputs, heads[0] @ weight.mT).solution.mT
    fit = regression(weight, heads).refit(kept)
    torch.testing.assert_close(torch.cat([fit.weight, fit.bias[:, None]], dim=1), expected, rtol=FIT, atol=FIT)
    error = heads[0] @ weight.mT - inputs @ expected.mT
    whole = (heads[0] - heads[0].mean(0)) @ weight.mT
    assert fit.share_lost == pytest.approx(float(error.square().sum() / whole.square().sum()), rel=1e-4)


def test_without_a_bias_the_means_stay():
    weight, heads = weight_and_outputs(redundant=False)
    fit = regression(weight, heads, has_bias=False).refit([0, 1])
    expected = torch.linalg.lstsq(heads[0][:, columns([0, 1])], heads[0] @ weight.mT).solution.mT
    torch.testing.assert_close(fit.weight, expected, rtol=FIT, atol=FIT)
    assert not fit.bias.any()


def test_gates_that_stay_scale_what_is_regressed_on():
    weight, heads = weight_and_outputs(redundant=False)
    gates = torch.tensor([1.0, 0.5, 0.25, 2.0], dtype=torch.float64)
    scaled = (heads.unflatten(-1, (HEADS, WIDTH)) * gates[:, None]).flatten(-2)
    fit, expected = regression(weight, heads, gates=gates).refit([1, 3]), regression(weight, scaled).refit([1, 3])
    torch.testing.assert_close(fit.weight, expected.weight, rtol=FIT, atol=FIT)


def test_the_greedy_order_is_that_of_trying_every_head():
    weight, heads = weight_and_outputs(redundant=False)
    found = regression(weight, heads)
    costs, left = found.removal_costs(), list(range(HEADS))
    for _ in range(HEADS - 1):
        tried = {head: found.refit([each for each in left if each != head]).share_lost for head in left}
        best = min(tried, key=tried.__getitem__)
        assert float(costs[best]) == pytest.approx(tried[best], rel=1e-4)
        left.remove(best)
    assert float(costs[left[0]]) == 1.0
    cheapest = int(regression(*weight_and_outputs()).removal_costs().argmin())
    assert cheapest in (0, 1, 2)  # each is made of the two others


def test_few_tokens_say_little_of_relations(monkeypatch):
    """With doubt, what one head makes of another counts less; what it does itself counts all the same."""
    weight, heads = weight_and_outputs()
    sure, heads = regression(weight, heads), heads[:, :20]
    monkeypatch.setattr(head_regression, "DOUBT", 1.0)
    doubtful = regression(weight, heads)
    assert doubtful.refit([0, 1, 3]).share_lost > 0.01 > sure.refit([0, 1, 3]).share_lost
    monkeypatch.setattr(head_regression, "DOUBT", 0.0)
    block = slice(0, WIDTH)
    torch.testing.assert_close(doubtful.scatter[block, block], regression(weight, heads).scatter[block, block])


def model_and_batches(name, kind=None):
    family = FAMILIES[name]
    model = family.build().double().eval()
    if kind is not None:
        swap(model, kind, 16)
    inputs = cast(family.inputs(), torch.float64)
    return model, inputs, [inputs]


def some_heads(model) -> dict[str, list[int]]:
    return {site.path: [1] for site in get_adapter(model).sites(model)}


def site_errors(model, stock, batch, removed) -> float:
    """How far the outputs of all sites are from those of the model with all heads, squared, site by site."""
    found = head_regression.regressions(stock, opened(stock), [batch])
    total = 0.0
    for site in opened(model):
        regressed = found[site.path]
        kept = [head for head in range(HEADS) if head not in removed[site.path]]
        missing = regressed.weight.clone()
        missing[:, regressed.columns(kept)] -= site.output_weight()
        total += float(((missing @ regressed.scatter) * missing).sum())
    return total


def opened(model):
    return layers_of(model).with_heads


@SOME
@pytest.mark.parametrize("kind", (None, *KINDS))
def test_a_repaired_site_is_closer(name, kind):
    stock, inputs, batches = model_and_batches(name, kind)
    plain, repaired = model_and_batches(name, kind)[0], model_and_batches(name, kind)[0]
    removed = some_heads(stock)
    prune_heads(plain, heads=removed)
    report = prune_heads(repaired, heads=removed, batches=batches)
    assert all(0 < site.share_lost < 1 for site in report.sites)
    assert "of what sites add is lost" in str(report)
    assert site_errors(repaired, stock, inputs, removed) < 0.9 * site_errors(plain, stock, inputs, removed)
    assert repaired.config.collab_heads == plain.config.collab_heads
    assert [p.shape for p in repaired.parameters()] == [p.shape for p in plain.parameters()]


@SOME
def test_it_loads_again(name, tmp_path):
    model, inputs, batches = model_and_batches(name)
    prune_heads(model, heads=some_heads(model), batches=batches)
    model.save_pretrained(tmp_path)
    loaded = aligned(type(model).from_pretrained(tmp_path, dtype=torch.float64).eval())
    assert torch.equal(output(loaded, inputs), output(model, inputs))


@SOME
def test_without_removed_heads_nothing_changes(name):
    model, inputs, batches = model_and_batches(name)
    before = output(model, inputs)
    prune_heads(model, heads={site.path: [] for site in get_adapter(model).sites(model)}, batches=batches)
    assert torch.equal(output(model, inputs), before)


def test_heads_that_learned_gates_closed_are_not_missed():
    """The model was trained without them: there is nothing to make up for."""
    plain, inputs, batches = model_and_batches("bert")
    repaired = model_and_batches("bert")[0]
    for model in (plain, repaired):
        gate(model, empty=False)
    prune_heads(plain)
    prune_heads(repaired, batches=batches)
    torch.testing.assert_close(output(repaired, inputs), output(plain, inputs), rtol=0, atol=1e-4)


@pytest.mark.parametrize("is_mixed", (False, True))
def test_heads_that_fixed_gates_close_are_made_up_for(is_mixed):
    """As if they had been named."""
    named, inputs, batches = model_and_batches("bert")
    closed = model_and_batches("bert")[0]
    for model in (named, closed) if is_mixed else ():
        mix(model)
    prune_heads(named, heads=some_heads(named), batches=batches)
    swap_to_gated(closed, alive_heads={path: [1, 0, 1, 1] for path in some_heads(closed)})
    prune_heads(closed, batches=batches)
    torch.testing.assert_close(output(closed, inputs), output(named, inputs), rtol=0, atol=EXACT64)


def first_output(model, batch) -> torch.Tensor:
    """What the first site, an encoder's, adds for the tokens of a batch."""
    caught = []
    handle = opened(model)[0].output.register_forward_hook(lambda module, inputs, out: caught.append(out))
    model(**batch)
    handle.remove()
    return caught[0][batch["attention_mask"].bool()]


def pull(model, expected, batch) -> float:
    """How much the error of the first site would still fall by another W_O: the norm of its gradient."""
    with torch.enable_grad():
        error = (first_output(model, batch) - expected).square().sum()
        weights = list(opened(model)[0].output.parameters(recurse=False))
        return float(torch.cat([each.flatten() for each in torch.autograd.grad(error, weights)]).norm())


def test_alphas_and_gates_that_stay_are_seen(monkeypatch):
    """The W_O of the kept heads is the least-squares one, beside the gates and alphas that the model has."""
    monkeypatch.setattr(head_regression, "DOUBT", 0.0)
    model, inputs, batches = model_and_batches("marian")
    gate(model, empty=False)
    mix(model)
    expected = first_output(model, inputs).detach()
    plain, removed = (
        copy.deepcopy(model),
        {site.path: [int(site.output.gates.values().argmax())] for site in opened(model)},
    )
    prune_heads(plain, heads=removed)
    prune_heads(model, heads=removed, batches=batches)
    assert pull(model, expected, inputs) < FIT * pull(plain, expected, inputs)


def test_all_heads_of_a_site_can_go():
    model, _, batches = model_and_batches("bert")
    path = next(iter(sites(model)))
    report = prune_heads(model, heads={path: [0, 1, 2, 3]}, batches=batches)
    assert report.sites[0].share_lost is None and report.sites[0].heads_after == 0


@SOME
def test_a_ranking_without_labels(name):
    model, inputs, batches = model_and_batches(name)
    batches = [
        {key: value for key, value in batch.items() if key != "labels" or "decoder_input_ids" not in batch}
        for batch in batches
    ]
    before = output(model, inputs)
    scores = head_importance(model, batches, criterion="reconstruction")
    assert torch.equal(output(model, inputs), before)
    assert scores.keys() == some_heads(model).keys()
    for values in scores.values():
        assert values.dtype == torch.float32 and values.shape == (HEADS,)
        assert (values > 0).all()
    assert most_important(model, scores, len(scores) * 2)


def test_what_cannot_be(monkeypatch):
    model, _, batches = model_and_batches("bert")
    removed = some_heads(model)
    with refused(model, ArgumentError, "unknown criterion 'gradients' (did you mean 'gradient'?)"):
        head_importance(model, batches, criterion="gradients")
    with refused(model, CalibrationError, "batches is empty"):
        prune_heads(model, heads=removed, batches=[])
    with refused(model, CalibrationError, "cannot take batch 0"):
        prune_heads(model, heads=removed, batches=[{"input_idz": batches[0]["input_ids"]}])
    model.bert.embeddings.word_embeddings.weight.data[batches[0]["input_ids"][0, 0]] = torch.nan
    with pytest.raises(NonFiniteError, match=r"encoder\.layer\.0\.attention\.self"):
        prune_heads(model, heads=removed, batches=batches)


def test_the_mean_of_what_a_site_adds_is_kept():
    """Of the first site, whose inputs do not change; padding does not count."""
    stock, inputs, batches = model_and_batches("bert")
    repaired = model_and_batches("bert")[0]
    prune_heads(repaired, heads=dict(itertools.islice(some_heads(stock).items(), 1)), batches=batches)
    means = []
    for model in (stock, repaired):
        heard = []
        hook = opened(model)[0].output.register_forward_hook(lambda module, args, out, heard=heard: heard.append(out))
        output(model, inputs)
        hook.remove()
        means.append(heard[0][inputs["attention_mask"].bool()].mean(0))
    torch.testing.assert_close(*means, rtol=0, atol=EXACT64)


def forgets_the_bias(output, weights):
    output.weight.data.copy_(weights.weight)


def test_wrong_versions_are_caught(monkeypatch):
    """A bias that does not take up the means; a regression on heads as if none had to do with another."""
    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="not close"):
        patch.setattr(apply_state, "refit_output", forgets_the_bias)
        test_the_mean_of_what_a_site_adds_is_kept()
    monkeypatch.setattr(head_regression, "DOUBT", 1e12)
    with pytest.raises(AssertionError, match="assert"):
        test_a_repaired_site_is_closer("bert", None)


@pytest.mark.parametrize("scale", (1, 10, 100))
def test_a_dominant_head_of_low_rank_does_not_round_below_zero(scale):
    """Products of float32 round by the size of this head, whose covariance has directions of nothing."""
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(2000, 8, 16, generator=generator)
    outputs[:, 0] = scale * outputs[:, 0, :8] @ torch.randn(8, 16, generator=generator)
    weight = torch.randn(24, 128, generator=generator)
    moments = InputMoments.of(outputs.flatten(1)[None], torch.ones(1, 2000, dtype=torch.bool))
    fit = HeadRegression.of(weight, moments, 8)
    assert fit.refit(range(8)).share_lost < 1e-5
    assert fit.removal_costs().isfinite().all()


def test_rounding_above_the_ridge():
    """Equal texts leave directions in which heads put out nothing, and products of float32 round there."""
    scatter, weight = torch.eye(128, dtype=torch.float64), torch.randn(24, 128, dtype=torch.float64)
    scatter[3, 3] = -5 * head_regression.RIDGE
    fit = HeadRegression(weight, scatter, torch.zeros(128, dtype=torch.float64), 8)
    for kept in ([0], [0, 1, 2], range(8)):
        assert (fit.refit(kept).weight[:, 4:16] - weight[:, 4:16]).abs().max() < 1e-3
    scatter[3, 3] = -1
    with pytest.raises(torch.linalg.LinAlgError):
        fit.refit([0])
