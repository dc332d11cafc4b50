"""The refit in order: least squares near the present weights, which makes up for the errors of the sites before."""

import functools
import weakref
from contextlib import contextmanager

import pytest
import torch
from compressing import batches_of
from model_runs import aligned, output
from opening import layers_of
from slow_cases import slow
from unchanged import assert_unchanged, snapshot

from collab_heads import compress, plan
from collab_heads.calibration import calibrate
from collab_heads.compression import fitting
from collab_heads.compression.fitting import Sums, error, fit_choices, fitted_error, fitted_in_order, nearby_least
from collab_heads.compression.parts.heads import KeptHeads
from collab_heads.compression.parts.part import RefittedOutput, install
from collab_heads.fitting.neuron_regression import NeuronRegression
from collab_heads.layers.layout import weight_of
from collab_heads.model.apply_state import OutputWeights, undone
from collab_heads.running.blocks import BlockStarts
from collab_heads.running.portions import whole as whole_of
from collab_heads.running.residual_readers import find_readers
from families import FAMILIES

UNDONE = 1e-2  # of an error: the sums of products are rounded to float32, which is 0.0011 of it on an Intel Xeon
MANY = 24  # batches, each of them a portion: enough for a ridge to be chosen


def shifted(site):
    """A site whose output is wrong by a constant."""
    weight = weight_of(site.output).detach().double()
    shift = torch.randn(len(weight), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return {site.path: [RefittedOutput(OutputWeights(weight, shift))]}


@functools.cache
def measured_of(name, count=MANY):
    """A plan, which nothing below changes."""
    return plan(FAMILIES[name].build().eval(), batches_of(FAMILIES[name], count), refine_steps=0)


def starts_of(made, examples):
    return BlockStarts(made.measured.model, made.measured.sites, examples, whole_of)


@pytest.mark.parametrize("has_bias", [True, False])
def test_least_squares_near_the_present_weights(has_bias):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(50, 6, generator=generator, dtype=torch.float64)
    rows[:, -1] = 1
    missing = torch.randn(50, 3, generator=generator, dtype=torch.float64)
    sums, ridge = Sums.zeros(5, 3, torch.empty(0)), 0.3
    for part in (slice(20), slice(20, None)):
        sums.add(rows[part], missing[part])
    size = (rows[:, :-1].square().sum(0)).mean()
    used = 6 if has_bias else 5
    near = torch.eye(6, dtype=torch.float64)[:5, :used] * (ridge * size).sqrt()
    change = torch.linalg.lstsq(
        torch.cat([rows[:, :used], near]), torch.cat([missing, torch.zeros(5, 3, dtype=torch.float64)])
    ).solution
    found = sums.solve(ridge, has_bias)
    torch.testing.assert_close(found[:used], change)
    assert not found[used:].any()
    halves = [(rows[part], missing[part]) for part in (slice(20), slice(20, None))]
    assert error(found, halves) == pytest.approx(float((rows @ found - missing).square().sum()))
    assert error(torch.zeros_like(found), halves) == pytest.approx(float(missing.square().sum()))


@pytest.mark.parametrize("least", range(5))
def test_the_least_error_is_found_where_errors_fall_towards_it(least):
    asked = []

    def error_with(value):
        asked.append(value)
        return abs(value - least) + 1

    assert nearby_least(range(5), functools.cache(error_with)) == least
    assert len(asked) == len(set(asked)) <= 4


def test_a_site_without_inputs_gets_a_bias():
    targets = torch.randn(9, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ones = torch.ones(9, 1, dtype=torch.float64)
    found = Sums(ones.mT @ ones, ones.mT @ targets).solve(0.1, True)
    torch.testing.assert_close(found, targets.mean(0, keepdim=True))


@pytest.mark.parametrize("name", ["bert", *slow("gpt2", "marian")])
def test_an_error_that_can_be_undone_is_undone(name):
    """A constant that is added to the output of the first site is taken out of it again."""
    made = measured_of(name)
    wrong = shifted(made.measured.sites[0])
    right = fitted_in_order(made.measured, wrong, {})
    assert fitted_error(made.measured, wrong) > 0.1
    assert fitted_error(made.measured, right) < UNDONE * fitted_error(made.measured, wrong)


@pytest.mark.slow
def test_an_error_before_a_scale_is_undone():
    """DINOv2 multiplies what a site puts out by a number per dimension before it is added."""
    family = FAMILIES["dinov2"]
    model = family.build().eval()
    for layer in model.base_model.encoder.layer:
        for scale in (layer.layer_scale1, layer.layer_scale2):
            torch.nn.init.constant_(scale.lambda1, 0.1)
    made = plan(model, batches_of(family, MANY), refine_steps=0)
    wrong = {
        path: [RefittedOutput(OutputWeights(fit.output.weight, 20 * fit.output.bias))]
        for path, (fit,) in shifted(made.measured.sites[0]).items()
    }
    right = fitted_in_order(made.measured, wrong, {})
    assert fitted_error(made.measured, wrong) > 0.1
    assert fitted_error(made.measured, right) < UNDONE * fitted_error(made.measured, wrong)


def tokens_seen(model, reader, examples):
    """Record by portion, at real tokens, what a last projection reads and puts out, and what its reader reads."""
    found, now = [], {}
    hooks = [
        model.get_submodule(reader.output).register_forward_hook(lambda _, args, out: now.update(u=args[0], y=out)),
        model.get_submodule(reader.name).register_forward_pre_hook(lambda _, args: now.update(s=args[0])),
    ]
    with torch.no_grad():
        for example in examples:
            model(**example)
            real = example["attention_mask"].bool()
            found.append([now[name][real].double() for name in "uys"])
    for hook in hooks:
        hook.remove()
    return found


def least_squares(rows, targets, present, ridge):
    """Weights with the bias as a last row, near the present ones but for the bias."""
    near = torch.eye(len(present), dtype=torch.float64)[:-1] * (ridge * rows[:, :-1].square().sum(0).mean()).sqrt()
    return torch.linalg.lstsq(torch.cat([rows, near]), torch.cat([targets, near @ present])).solution


@pytest.mark.slow
def test_a_refit_is_a_regression_that_others_validate():
    """By hand: weights by the variance of what is read, padding left out, every eighth portion for the ridge."""
    made = measured_of("bert", 64)
    model, (first, second) = made.measured.model, made.measured.sites[1:3]
    examples, _ = fitting.examples_of(made.measured)
    examples = [{**each, "attention_mask": each["attention_mask"].clone()} for each in examples]
    for number, example in enumerate(examples):
        example["attention_mask"][:, -1 - number % 3 :] = 0
    (reader,) = [each for each in find_readers(model, [second], examples[0])]
    targets = fitting.targets_of(model, [reader], examples, starts_of(made, examples))[reader.output]
    original = tokens_seen(model, reader, examples)
    with undone(made.measured.layers, made.measured.sites) as tried:
        install(tried, shifted(first))
        output = model.get_submodule(reader.output)
        output.weight = torch.nn.Parameter(0.97 * output.weight.detach())
        found = fitting.refit(model, reader, examples, targets)
        output = model.get_submodule(reader.output)
        present = torch.cat([output.weight.mT, output.bias[None]]).detach().double()
        seen = tokens_seen(model, reader, examples)
    rows, wanted = [], []
    for (_, _, before), (read, put_out, now) in zip(original, seen, strict=True):
        variances = before.var(-1, keepdim=True)
        root = variances.clamp(min=0.01 * float(variances.median())).rsqrt()
        rows.append(torch.cat([read, torch.ones(len(read), 1)], dim=1) * root)
        wanted.append((put_out + before - now) * root)
    fitted = [number for number in range(len(rows)) if number % 8 != 7]
    chosen = [number for number in range(len(rows)) if number % 8 == 7]
    train, other, whole = (
        [torch.cat([each[number] for number in numbers]) for each in (rows, wanted)]
        for numbers in (fitted, chosen, range(len(rows)))
    )
    errors = {
        ridge: float((other[0] @ least_squares(*train, present, ridge) - other[1]).square().sum())
        for ridge in fitting.RIDGES
    }
    ridge = min(errors, key=errors.get)
    assert ridge != min(fitting.RIDGES)  # which fits best where it is fitted
    expected = least_squares(*whole, present, ridge)
    torch.testing.assert_close(found.weight, expected[:-1].mT, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.bias, (expected - present)[-1], rtol=1e-3, atol=1e-4)
    assert found.bias.untyped_storage().nbytes() == found.bias.nbytes  # it outlives the change that it was part of


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_site_whose_heads_put_out_zeros(name):
    model = FAMILIES[name].build().eval()
    value = layers_of(model).with_heads[1].value
    with torch.no_grad():
        for parameter in (value.weight, value.bias):  # views of one for all three, in GPT-2
            parameter.zero_()
    compress(model, batches_of(FAMILIES[name], MANY), 0.7, parts=("query_key", "neurons"), refine_steps=0)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-22, 1e20])
def test_products_that_single_precision_cannot_hold(scale):
    """The same function, with values of another size."""
    model = FAMILIES["bert"].build().eval()
    with torch.no_grad():
        for site in layers_of(model).with_heads:
            for parameter in (site.value.weight, site.value.bias):
                parameter *= scale
            site.output.weight /= scale
    compress(model, batches_of(FAMILIES["bert"], MANY), 0.7, parts="heads", refine_steps=0)


@pytest.mark.slow
def test_what_overflows_is_not_refitted(monkeypatch):
    made, add = measured_of("bert"), Sums.add
    fitted = fit_choices(made.measured, made.choose(0.4))
    assert fitted_in_order(made.measured, fitted, {})

    def overflowing(self, rows, missing):
        rows = rows.clone()
        rows[0, 0] = torch.inf
        add(self, rows, missing)

    monkeypatch.setattr(Sums, "add", overflowing)
    assert fitted_in_order(made.measured, fitted, {}) == {}


@pytest.mark.slow
def test_what_loses_as_much_on_other_portions_is_not_refitted(monkeypatch):
    made = measured_of("bert")
    fitted = fit_choices(made.measured, made.choose(0.4))
    monkeypatch.setattr(fitting, "error", lambda change, held: 1.0)
    assert fitted_in_order(made.measured, fitted, {}) == {}


@pytest.mark.slow
def test_a_site_without_heads_gets_a_bias():
    made = measured_of("distilbert", 64)
    last = layers_of(made.measured.model).with_heads[-1]
    width = weight_of(last.output).shape[0]
    found = fitted_in_order(made.measured, shifted(made.measured.sites[0]) | {last.path: [KeptHeads((), None)]}, {})
    refitted = found[last.path][-1].output
    assert refitted.weight.shape == (width, 0) and refitted.bias.abs().max() > 0


def test_later_sites_make_up_for_earlier_ones():
    """The first site stays wrong by a constant; the second one takes this out of the residual stream."""
    made = measured_of("bert")
    first, second = made.measured.sites[:2]
    example = batches_of(FAMILIES["bert"], 1)[0]
    readers = find_readers(made.measured.model, made.measured.sites, example)
    (reader,) = [reader for reader in readers if reader.site.path == second.path]
    shown, _ = fitting.examples_of(made.measured)
    targets = fitting.targets_of(made.measured.model, [reader], shown, starts_of(made, shown))[reader.output]
    with undone(made.measured.layers, made.measured.sites) as tried:
        install(tried, shifted(first))
        found = fitting.refit(made.measured.model, reader, shown, targets)
        before = made.measured.probe.error()
        install(tried, {second.path: [RefittedOutput(found)]})
        assert made.measured.probe.error() < 0.9 * before


@pytest.mark.slow
def test_the_error_falls_and_the_model_stays(family):
    made = plan(family.build(), batches_of(family, 64), refine_steps=0)
    before = snapshot(made.measured.model)
    fitted = fit_choices(made.measured, made.choose(0.4))
    assert_unchanged(made.measured.model, before)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "fitted_in_order", lambda measured, fitted, choices: {})
        plain = fit_choices(made.measured, made.choose(0.4))
    kept = [fit for fits in fitted.values() for fit in fits if isinstance(fit, RefittedOutput)]
    if family.name not in ("albert", "qwen3"):  # layers that share their modules; nothing helps on held-out examples
        assert kept and fitted_error(made.measured, fitted) < fitted_error(made.measured, plain)
    outputs = [fit.output for fits in fitted.values() for fit in fits if hasattr(fit, "output")]
    dtypes = {each.weight.dtype for each in outputs if each.weight.numel()}
    assert dtypes == {torch.float32}  # as the model stores them


@pytest.mark.slow
def test_a_refit_that_does_not_help_is_left_out(monkeypatch):
    made = measured_of("bert")
    choices = made.choose(0.4)
    worse = fit_choices(made.measured, made.choose(0.2))
    monkeypatch.setattr(fitting, "fitted_in_order", lambda measured, fitted, choices: worse)
    assert fit_choices(made.measured, choices) is not worse
    better = fit_choices(made.measured, made.choose(0.9))
    monkeypatch.setattr(fitting, "fitted_in_order", lambda measured, fitted, choices: better)
    assert fit_choices(made.measured, choices) is better


def test_few_examples_are_not_fitted_to():
    made = measured_of("bert", 4)
    assert fitted_in_order(made.measured, fit_choices(made.measured, made.choose(0.4)), {}) == {}
    assert fitted_in_order(measured_of("bert").measured, {}, {}) == {}


@pytest.mark.slow
def test_many_tokens_are_sampled(monkeypatch):
    made = measured_of("bert", 64)
    examples, tokens = fitting.examples_of(made.measured)
    monkeypatch.setattr(fitting, "MOST_TOKENS", tokens // 2)
    half, fewer = fitting.examples_of(made.measured)
    assert len(half) == -(-len(examples) // 2) and abs(fewer - tokens / 2) < 0.05 * tokens
    monkeypatch.setattr(fitting, "TOKENS", 1)  # of long examples a few stay
    assert len(fitting.examples_of(made.measured)[0]) == fitting.FEWEST
    wrong = shifted(made.measured.sites[0])  # and are enough
    right = fitted_in_order(made.measured, wrong, {})
    assert right and fitted_error(made.measured, right) < UNDONE * fitted_error(made.measured, wrong)


@pytest.mark.slow
def test_portions_of_all_lengths_choose_the_ridge():
    """Those of a batch are sorted by length, and batches have as many portions."""
    model, generator = FAMILIES["bert"].build().eval(), torch.Generator().manual_seed(0)
    batches = []
    for _ in range(16):
        lengths = torch.randint(4, 32, (24,), generator=generator)
        ids = torch.randint(4, 60, (24, 32), generator=generator)
        batches.append({"input_ids": ids, "attention_mask": (torch.arange(32) < lengths[:, None]).long()})
    examples, _ = fitting.examples_of(plan(model, batches, refine_steps=0).measured)
    lengths = [float(each["attention_mask"].sum(1).float().mean()) for each in examples]
    chosen = lengths[7::8]
    assert abs(sum(chosen) / len(chosen) - sum(lengths) / len(lengths)) < 6
    assert max(chosen) - min(chosen) > 8


@pytest.mark.parametrize("name", ["bert", *slow("marian", "gpt2")])
def test_groups_of_targets_do_not_change_the_result(name, monkeypatch):
    """Each installs what runs in its turn alone."""
    made, installed = measured_of(name), list[tuple]()
    wrong = {path: fits for site in made.measured.sites for path, fits in shifted(site).items()}
    whole = fitted_in_order(made.measured, wrong, {})

    def spied(tried, fitted):
        if all(tried is not other for other, _ in installed):  # the first time in a group
            installed.append((tried, fitted.keys()))
        install(tried, fitted)

    monkeypatch.setattr(fitting, "TARGETS", 1)
    monkeypatch.setattr(fitting, "install", spied)
    parts = fitted_in_order(made.measured, wrong, {})
    assert whole.keys() == parts.keys()
    outputs = [[fit.output.weight for fit in fits] for fits in whole.values()]
    again = [[fit.output.weight for fit in fits] for fits in parts.values()]
    torch.testing.assert_close(outputs, again, rtol=0, atol=0)
    assert any(len(fits) > 1 for fits in outputs)
    assert len(installed) == len(made.measured.sites)
    for _, paths in (installed[0], installed[-1]):
        assert paths < wrong.keys()


def test_the_copies_of_a_group_are_gone_before_the_next(monkeypatch):
    made, copies, groups = measured_of("bert"), list[weakref.ref](), 0

    @contextmanager
    def spied(layers, sites):
        nonlocal groups
        assert not any(copy() for copy in copies)
        groups += 1
        with undone(layers, sites) as tried:
            yield tried
            copies.extend(weakref.ref(module) for site in sites for module in tried.at(site.path).modules)

    fitted = fit_choices(made.measured, made.choose(0.4))
    monkeypatch.setattr(fitting, "TARGETS", 1)
    monkeypatch.setattr(fitting, "undone", spied)
    assert fitted_in_order(made.measured, fitted, {})
    assert groups > 1 and copies


def test_memory_is_given_back_around_the_installation_of_a_trial(monkeypatch):
    """Memory that an installation frees stays in the heap: a twentieth of the peak of MPNet."""
    made, steps = measured_of("bert"), []
    fitted = fit_choices(made.measured, made.choose(0.4))
    monkeypatch.setattr(fitting, "give_back_memory", lambda: steps.append("given back"))
    monkeypatch.setattr(fitting, "install", lambda *given: steps.append("installed") or install(*given))
    fitted_error(made.measured, fitted)
    assert steps == ["given back", "installed", "given back"]


def test_the_moments_of_neurons_are_gone_while_they_are_fitted(monkeypatch):
    """Where there are several groups: the regression takes their place."""
    monkeypatch.setattr(calibrate, "SHARE", 0)
    monkeypatch.setattr(calibrate, "LEAST", 0)
    made, taken, fits = plan(FAMILIES["bert"].build().eval(), batches_of(FAMILIES["bert"]), refine_steps=0), [], 0
    of_block, output = NeuronRegression.of_block, NeuronRegression.output

    def set_up(block, moments):
        taken.append(weakref.ref(moments))
        return of_block(block, moments)

    def fitted(regression, kept):
        nonlocal fits
        fits += 1
        assert not any(moments() for moments in taken)
        return output(regression, kept)

    monkeypatch.setattr(NeuronRegression, "of_block", set_up)
    monkeypatch.setattr(NeuronRegression, "output", fitted)
    fit_choices(made.measured, made.choose(0.4))
    assert fits == len(taken) > 1


def test_the_result_loads_again(tmp_path):
    family = FAMILIES["bert"]
    model = family.build().eval()
    compress(model, batches_of(family, MANY), 0.4, refine_steps=0)
    model.save_pretrained(tmp_path)
    again = aligned(type(model).from_pretrained(tmp_path)).eval()
    assert torch.equal(output(again, family.inputs()), output(aligned(model), family.inputs()))
