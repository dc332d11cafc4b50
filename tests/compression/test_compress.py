"""compress: the budget is kept, nothing else changes, what cannot be is refused, and the model loads again."""

import copy
import dataclasses
import json
import math
import operator
import sys

import numpy as np
import pytest
import torch
from compressing import ATTENTION, batches_of, first_site
from model_runs import aligned, output
from opening import layers_of
from slow_cases import slow
from unchanged import assert_unchanged, refused, snapshot

from collab_heads import compress, plan, prune_heads, swap_to_alpha, swap_to_collaborative, swap_to_gated
from collab_heads.base.option_values import SITE_PARTS as PARTS
from collab_heads.compression import fitting, latency, smallest
from collab_heads.compression.measures import COUNTED
from collab_heads.compression.parts.part import RefittedOutput
from collab_heads.compression.parts.shape import UNCHANGED
from collab_heads.errors import ArgumentError, CalibrationError, ModelStateError, NonFiniteError, UnsupportedModelError
from collab_heads.model import apply_state
from families import FAMILIES

BERT = FAMILIES["bert"]
compress_module = sys.modules["collab_heads.compression.compress"]  # the package has a function of this name
QUICK = {"refine_steps": 2}


def layer_parameters(model):
    """Parameters of the projections of all attention and feed-forward blocks, counted in their modules."""
    parts = [module for block in layers_of(model).feed_forwards for module in block.modules]
    for site in layers_of(model).attention:
        parts.append(site.output)
        if site.num_heads:
            parts += [site.value, *([site.query_key] if site.query_key else site.projections)]
    return sum(parameter.numel() for part in parts for parameter in part.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("budget", [0.5, 0.3])
def test_a_budget_of_parameters_is_kept_and_used(family, kind, budget):
    model = family.build()
    before, all_before = layer_parameters(model), model.num_parameters()
    report = compress(model, batches_of(family, 12), budget, kind=kind, **QUICK)
    after = layer_parameters(model)
    assert 0.75 * budget < after / before <= budget  # tiny heads of width 8 have few sizes
    assert report.costs["parameters"].before == before
    assert report.costs["parameters"].after == after
    assert (report.model_parameters_before, report.model_parameters_after) == (all_before, model.num_parameters())
    assert 0 < report.measured_error
    assert report.predicted_error > 0


def test_the_result_loads_again(family, kind, tmp_path):
    model = family.build().eval()
    compress(model, batches_of(family), 0.4, kind=kind, **QUICK)
    model.save_pretrained(tmp_path)
    again = aligned(type(model).from_pretrained(tmp_path)).eval()
    assert torch.equal(output(again, family.inputs()), output(aligned(model), family.inputs()))


@pytest.mark.parametrize("of", COUNTED)
def test_every_measure_is_kept(of):
    model = BERT.build()
    report = compress(model, batches_of(BERT), 0.6, of=of, **QUICK)
    assert report.costs[of].share <= 0.6
    if of == "cache":
        sites = layers_of(model).with_heads
        widths = [(s.query_key.cache_width if s.query_key else s.projections[1].out_features) for s in sites]
        without_heads = len(report.sites) - len(sites)  # each caches a zero per token
        tokens = sum(batch["input_ids"].numel() for batch in batches_of(BERT))
        per_token = sum(widths) + sum(site.dim_value for site in sites) + without_heads
        assert report.costs[of].after == tokens * per_token


@pytest.mark.parametrize("part", PARTS)
def test_only_the_named_part_changes(part):
    model = BERT.build()
    report = compress(model, batches_of(BERT), 0.8, parts=part, **QUICK)
    for name in PARTS:  # over all heads: fewer of these make both other widths smaller, too
        changes = [operator.ne(*site.sizes[name]) for site in report.sites if name in site.sizes]
        assert any(changes) == (part == name or (part == "heads" and name in ATTENTION))


def test_all_of_the_budget_changes_nothing(family):
    model = family.build()
    before = snapshot(model)
    report = compress(model, batches_of(family), 1.0, **QUICK)
    assert_unchanged(model, before)
    assert report.measured_error == 0
    assert report.costs["parameters"].share == 1


def test_it_is_reproducible():
    models = [BERT.build().eval() for _ in range(2)]
    reports = [compress(model, batches_of(BERT), 0.5, **QUICK) for model in models]
    assert reports[0].sites == reports[1].sites
    outputs = [output(aligned(model), BERT.inputs()) for model in models]
    assert torch.equal(*outputs)


def test_a_plan_changes_nothing_and_its_numbers_are_real(family):
    model = family.build()
    before = snapshot(model)
    made = plan(model, batches_of(family, 8), **QUICK)
    (point,) = made.measure([0.5])
    assert_unchanged(model, before)
    assert point[0] == 0.5
    curve = made.curve()
    assert [error for _, error in curve] == sorted((error for _, error in curve), reverse=True)
    assert curve[-1] == (1.0, 0.0)
    report = compress(model, made, 0.5)
    assert report.measured_error == pytest.approx(point[1], rel=1e-3)  # the same fits, installed again: float32
    assert "query/key width" in str(made)
    json.dumps(made.to_dict())
    json.dumps(report.to_dict())
    assert first_site(model).path in str(report)


@pytest.mark.slow
def test_errors_add_up_to_what_is_predicted():
    """Nearly: large errors of several sites meet, and a tiny model has few sites for them to average out."""
    encoder = FAMILIES["t5-encoder"]
    made = plan(encoder.build(), batches_of(encoder, 24), **QUICK)
    for budget, measured in made.measure([0.9, 0.75, 0.6]):
        assert measured == pytest.approx(made.predicted(made.choose(budget)), rel=0.3)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: prune_heads(model, heads={first_site(model).path: [0, 2]}),
        lambda model: prune_heads(model, heads={first_site(model).path: [0, 1, 2, 3]}),
        lambda model: swap_to_collaborative(model, dim_shared_query_key=12),
        lambda model: swap_to_collaborative(model, dim_shared_query_key=16, kind="per_head"),
        lambda model: swap_to_collaborative(model, dim_value=0.5),
        lambda model: compress(model, batches_of(FAMILIES[model.config.model_type]), 0.6, refine_steps=0),
    ],
    ids=["pruned", "without heads", "shared", "per_head", "values", "compressed"],
)
@pytest.mark.parametrize("name", ["bert", *slow("marian", "t5")])
def test_what_is_left_is_compressed_further(name, change):
    model = FAMILIES[name].build()
    change(model)
    before = layer_parameters(model)
    report = compress(model, batches_of(FAMILIES[name]), 0.8, refine_steps=0)
    assert layer_parameters(model) <= 0.8 * before
    assert report.costs["parameters"].before <= before


@pytest.mark.parametrize("swap", [swap_to_gated, swap_to_alpha])
def test_gates_and_alphas_are_refused(swap):
    model = BERT.build()
    swap(model)
    with refused(model, ModelStateError, first_site(model).path, "prune_heads(model) first", "fold_heads"):
        compress(model, batches_of(BERT), 0.5)


BAD = {
    "budget 0": ((0,), {}, ArgumentError, "budget 0 must be a share"),
    "budget above 1": ((1.5,), {}, ArgumentError, "budget 1.5 must be a share"),
    "budget nan": ((math.nan,), {}, ArgumentError, "budget nan must be a share"),
    "budget true": ((True,), {}, ArgumentError, "budget True must be a share"),
    "budget too small": (
        (0.001,),
        QUICK,
        ArgumentError,
        "which the fewest heads and neurons and the smallest widths give",
    ),
    "both": ((0.5,), {"max_error": 0.1}, ArgumentError, "exclude each other"),
    "error and loss": ((), {"max_error": 0.1, "max_loss": 1, "evaluate": len}, ArgumentError, "exclude each other"),
    "loss alone": ((), {"max_loss": 1}, ArgumentError, "max_loss and evaluate belong together"),
    "max_loss -1": ((), {"max_loss": -1, "evaluate": len}, ArgumentError, "max_loss -1 must be a number of 0 or more"),
    "max_error 0": ((), {"max_error": 0}, ArgumentError, "max_error 0 must be a number above 0"),
    "max_error nan": ((), {"max_error": math.nan}, ArgumentError, "max_error nan must be"),
    "max_error too low": ((), {"max_error": 1e-9, **QUICK}, ArgumentError, "no smaller model keeps below it"),
    "measure": ((0.5,), {"of": "weights"}, ArgumentError, "unknown measure 'weights'"),
    "mixing": ((0.5,), {"kind": "none"}, ArgumentError, "unknown kind 'none'"),
    "part": ((0.5,), {"parts": "value"}, ArgumentError, "unknown part 'value' (did you mean 'values'?)"),
    "site": ((0.5,), {"sites": "dec-enc"}, ArgumentError, "no dec-enc attention"),
    "site without the part": (
        (0.5,),
        {"sites": "enc-ffn", "parts": "heads"},
        ArgumentError,
        "sites='enc-ffn' and parts=heads leave nothing to compress",
    ),
    "refine": ((0.5,), {"refine_steps": -1}, ArgumentError, "refine_steps -1"),
    "seed": ((0.5,), {"seed": -1}, ArgumentError, "seed must be"),
}


@pytest.mark.parametrize("args, options, error, message", BAD.values(), ids=BAD)
def test_bad_arguments(args, options, error, message):
    model = BERT.build()
    with refused(model, error, message):
        compress(model, batches_of(BERT), *args, **options)


def raising():
    yield BERT.inputs()
    raise OSError("the disk is gone")


def test_bad_batches():
    model = BERT.build()
    for batches, message in (
        ([], "batches is empty"),
        ({"input_ids": 1}, "expected an iterable"),
        (["text"], "batch 0 is a str"),
        ([{"tokens": torch.ones(2, 3)}], "cannot take batch 0"),
    ):
        with refused(model, CalibrationError, message):
            compress(model, batches, 0.5)
    before = snapshot(model)
    with pytest.raises(OSError, match="the disk is gone"):
        compress(model, raising(), 0.5)
    assert_unchanged(model, before)


def test_one_token_is_too_little_and_says_so():
    model = BERT.build()
    with refused(model, CalibrationError, "hold one token each"):
        compress(model, [{"input_ids": torch.tensor([[5]])}], 0.5)


def test_bad_models():
    model = BERT.build()
    with torch.no_grad():
        first_site(model).value.weight[0, 0] = math.nan
    with refused(model, NonFiniteError, "NaN or inf"):
        compress(model, batches_of(BERT), 0.5)
    model = BERT.build()
    prune_heads(model, heads={site.path: [0, 1, 2, 3] for site in layers_of(model).with_heads})
    with refused(model, ModelStateError, "no heads left", "parts=heads"):
        compress(model, batches_of(BERT), 0.5, parts=ATTENTION)
    with pytest.raises(UnsupportedModelError, match="PreTrainedModel"):
        compress(torch.nn.Linear(2, 2), batches_of(BERT), 0.5)


def test_a_plan_is_for_one_model_as_it_was():
    model, other = BERT.build(), BERT.build()
    made = plan(model, batches_of(BERT), **QUICK)
    with refused(other, ArgumentError, "made for another model"):
        compress(other, made, 0.5)
    swap_to_collaborative(model, dim_value=0.5)
    with refused(model, ArgumentError, "changed since the plan was made"):
        compress(model, made, 0.5)
    made = plan(other, batches_of(BERT))
    other(**BERT.inputs()).logits.sum().backward()
    torch.optim.SGD(other.parameters(), 1e-3).step()
    with refused(other, ArgumentError, "changed since the plan was made"):
        compress(other, made, 0.5)


@pytest.mark.slow
def test_a_plan_that_did_not_hold_is_told():
    report = compress(BERT.build(), batches_of(BERT), 0.5, **QUICK)
    kept = dataclasses.replace(report, predicted_error=0.2, measured_error=0.3)
    missed = dataclasses.replace(report, predicted_error=0.2, measured_error=0.5)
    assert "note" not in str(kept)
    assert "the measured error is 2.5 times the predicted one" in str(missed)


def test_a_plan_has_options_of_its_own():
    model = BERT.build()
    made = plan(model, batches_of(BERT), **QUICK)
    with refused(model, ArgumentError, "of, seed: a plan has its own"):
        compress(model, made, 0.5, of="cache", seed=1)


@pytest.mark.parametrize("after, noted", ((0.1, False), (1.0, True)))
def test_a_budget_of_time_is_kept_by_the_measured_table_and_timed_again(after, noted, monkeypatch):
    """Of a model as tiny as this one nothing but noise would be measured."""

    def times(measured, site, shape):
        axes = [1, 2, 4], [4, 8], [4, 8]
        seconds = [[[heads * (width + value) for value in axes[2]] for width in axes[1]] for heads in axes[0]]
        return {None: latency.Table(axes, np.array(seconds, dtype=float))}

    def again(measured, site, shape, choices, turns):
        return [1.0 if choice == UNCHANGED else after for choice in choices]

    monkeypatch.setattr(latency, "time_site", times)
    model = BERT.build()
    made = plan(model, batches_of(BERT), of="time", parts=ATTENTION, **QUICK)
    assert made.least == pytest.approx(8 / 64)
    monkeypatch.setattr(latency, "time_choices", again)
    budget = (made.least + 1) / 2
    choices = made.choose(budget)
    assert made.share(choices) <= budget
    unchanged = [choice == UNCHANGED for choice in choices.values()]
    report = compress(model, made, budget)
    assert not all(unchanged) and report.costs["time"].before == len(unchanged)
    assert report.costs["time"].after == pytest.approx(sum(1.0 if same else after for same in unchanged))
    assert ("timed again" in str(report)) == noted


@pytest.mark.slow
@pytest.mark.parametrize("of", ["states", "classes"])
def test_the_error_on_examples_of_another_kind_is_that_of_the_model(of):
    """By hand, from the outputs before and after; padding does not count."""
    model = BERT.build().eval() if of == "classes" else BERT.build().base_model.eval()
    others = [
        {"input_ids": torch.randint(5, 60, (6, 9), generator=torch.Generator().manual_seed(seed))} for seed in (1, 2)
    ]
    for batch in others:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][0, 4:] = 0

    def rows():
        with torch.no_grad():
            found = [model(**batch)[0] for batch in others]
        if of == "classes":
            return torch.cat(found).log_softmax(-1)
        return torch.cat([each[batch["attention_mask"].bool()] for each, batch in zip(found, others, strict=True)])

    before = rows()
    report = compress(model, batches_of(BERT, 12), 0.4, validation=iter(others), refine_steps=0)
    after = rows()
    if of == "classes":
        expected = (2 * (before.exp() * (before - after)).sum() / len(before)).sqrt()
    else:
        expected = ((before - after).square().sum() / (before - before.mean(0)).square().sum()).sqrt()
    assert report.validation_error == pytest.approx(float(expected), rel=1e-3)
    assert report.validation_error != report.measured_error
    assert f"on the examples of validation {report.validation_error:.4f}" in str(report)


@pytest.mark.slow
def test_a_refit_must_help_on_examples_of_another_kind(monkeypatch):
    """The refit helps on the examples held out, and on the others it is much worse: it is left out."""
    kept = []

    def worse(measured, fitted, probe=None):
        is_refitted = any(isinstance(fit, RefittedOutput) for fits in fitted.values() for fit in fits)
        kept.append(is_refitted)
        return {False: 0.2, True: 0.1}[is_refitted] if probe in (None, measured.probe) else 0.2 + 0.3 * is_refitted

    monkeypatch.setattr(fitting, "fitted_error", worse)
    monkeypatch.setattr(smallest, "fitted_error", worse)
    model, batches = BERT.build().eval(), batches_of(BERT, 24)
    for validation, is_refitted in ((None, True), (batches_of(BERT, 2), False)):
        compress(copy.deepcopy(model), batches, 0.5, validation=validation, refine_steps=0)
        assert kept[-1] is is_refitted


def test_a_loss_on_examples_of_another_kind_alone_is_told():
    report = compress(BERT.build().eval(), batches_of(BERT), 1.0, validation=batches_of(BERT), refine_steps=0)
    assert (report.measured_error, report.validation_error) == (0, 0) and "note: on the examples" not in str(report)
    for measured, validation, said in ((0.0, 0.3, "inf times"), (0.1, 0.3, "3.0 times"), (0.1, 0.14, None)):
        text = str(dataclasses.replace(report, measured_error=measured, validation_error=validation))
        assert (f"the output moves {said} as far" in text) if said else "note: on the examples" not in text


def test_examples_of_another_kind_are_checked_before_the_plan(monkeypatch):
    monkeypatch.setattr(compress_module, "plan_for", None)
    model = BERT.build()
    before = snapshot(model)
    for wrong, message in (
        ([], "validation: batches is empty"),
        ([{"input_ids": torch.full((2, 3), 10**6)}], "validation: .*cannot take batch 0"),
    ):
        with pytest.raises(CalibrationError, match=message):
            compress(model, batches_of(BERT), 0.5, validation=wrong)
    assert_unchanged(model, before)


@pytest.mark.parametrize(
    ("budget", "of", "message"),
    (
        ("10MB", "operations", "the plan is of operations, a size needs one of bytes"),
        ("10MB", "cache", "the plan is of cache, a size needs one of bytes"),
        ("10GB", "bytes", r"the weights of the model take only 0\.\d+ MB"),
    ),
)
def test_sizes_that_cannot_be_are_refused_before_the_plan(budget, of, message, monkeypatch):
    monkeypatch.setattr(compress_module, "plan_for", None)
    with pytest.raises(ArgumentError, match=message):
        compress(BERT.build(), batches_of(BERT), budget, of=of)


@pytest.mark.slow
def test_the_seconds_of_a_plan_count():
    model = BERT.build()
    made = plan(model, batches_of(BERT), **QUICK)
    assert made.seconds > 0
    made.seconds = 1000.0
    assert compress(model, made, 0.5).seconds > 1000
    assert compress(BERT.build(), batches_of(BERT), 0.5, **QUICK).seconds < 1000


def test_an_error_that_nothing_keeps_is_refused_with_the_least_that_is_lost():
    model = BERT.build()
    made = plan(model, batches_of(BERT), **QUICK)
    assert made.least_error > 1e-9
    with refused(
        model, ArgumentError, f"the least that any is expected to move the output by is {made.least_error:.4g}"
    ):
        compress(model, made, max_error=1e-9)


@pytest.mark.parametrize("of", ("parameters", "time"))
def test_a_site_that_holds_stock_weights_as_they_are_is_compressed_further(of):
    """When heads go from such a Llama, a stock forward can run what is left, and gets its projections back."""
    family = FAMILIES["llama"]
    model = family.build()
    swap_to_collaborative(model, kind="per_head")
    made = plan(model, batches_of(family), of=of, refine_steps=1)
    report = compress(model, made, min(made.least + 0.02, 1.0))
    assert report.costs["parameters"].share < 0.8
    assert torch.isfinite(model(**family.inputs()).logits).all()


@pytest.mark.slow
def test_timing_does_not_depend_on_what_memory_held(monkeypatch):
    """The frequency pairs of a narrower rotary head are indices."""
    build = apply_state.build_query_key

    def poisoned(*arguments, **options):
        made = build(*arguments, **options)
        for buffer in made.buffers():
            buffer.fill_(1 << 40)
        return made

    monkeypatch.setattr(apply_state, "build_query_key", poisoned)
    family = FAMILIES["llama"]
    assert plan(family.build(), batches_of(family), of="time", refine_steps=1).least < 1
