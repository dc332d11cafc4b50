"""The refinement lowers a site's own output error, touches nothing else, and repeats."""

import itertools

import pytest
import torch
from model_inputs import cast
from model_runs import output, sites, swap
from model_sizes import KINDS, VOCABULARY
from slow_cases import slow

import collab_heads
from collab_heads.running.batches import sides, token_masks
from families import FAMILIES, LAYOUTS

NARROW = {"shared": 12, "per_head": 16}  # of 32
STEPS = 25
OF_EITHER = pytest.mark.parametrize("family, kind", list(zip(LAYOUTS, itertools.cycle(KINDS))), indirect=["family"])
SMALL = ("bert", "marian-decoder", "t5-encoder")  # one per family, where the stack does not matter
FP32 = 1e-4  # relative error of an error measured in float32; seen: 7e-7 between backends


def another(inputs):
    """A second batch, so that the order of the calls matters."""
    return {name: (value + 5) % VOCABULARY if "input_ids" in name else value for name, value in inputs.items()}


def batches(family, model):
    return [cast(each, model.dtype) for each in (family.inputs(), another(family.inputs()))]


def build(family):
    """A tiny random Marian attends so evenly that scores hardly matter: sharpen it."""
    model = family.build()
    if model.config.model_type == "marian":
        for module in sites(model).values():
            module.q_proj.weight.data *= 6.0
    return model


def assert_refined(report):
    """No site's error grew, and errors fell; deep in the tiny Marian there is little left that could fall."""
    certain = report.sites[:1] if "layers" in report.sites[0].path else report.sites
    for site in report.sites:
        assert 0 < site.output_error <= site.output_error_before, site.path
    for site in certain:
        assert site.output_error < site.output_error_before, site.path


def refined(family, kind="shared", steps=STEPS, dtype=torch.float32, prepare=lambda model: None, **more):
    """Model and report of a calibrated swap."""
    model = build(family).to(dtype)
    prepare(model)
    calibration = batches(family, model)
    return model, swap(model, kind, NARROW[kind], batches=calibration, refine_steps=steps, **more)


def output_error(family, path, ours):
    """Relative error of one site's output after W_O over real tokens, on what the stock model's site receives."""
    stock = build(family).to(ours.dtype)
    adapter = collab_heads.get_adapter(stock)
    site = next(site for site in adapter.sites(stock) if site.path == path)
    gap, rows = 0.0, []
    for inputs in batches(family, stock):
        mask = token_masks(stock, inputs)[sides(site)[0]]
        calls = []
        handle = sites(stock)[path].register_forward_hook(
            lambda module, args, kwargs, _, calls=calls: calls.append((args, kwargs)), with_kwargs=True
        )
        output(stock, inputs)
        handle.remove()
        for args, kwargs in calls:
            kwargs |= {name: None for name in ("cache", "past_key_values") if name in kwargs}
            expected, found = (projected(model, site, args, kwargs) for model in (stock, ours))
            expected, found = (each.flatten(0, 1) if mask is None else each[mask] for each in (expected, found))
            gap += (expected - found).square().sum()
            rows.append(expected)
    size = sum((expected - expected.mean(0)).square().sum() for expected in rows)
    return float((gap / size).sqrt())


@torch.no_grad()
def projected(model, site, args, kwargs):
    """What the output projection of a site gives; some families apply it outside the attention module."""
    projection, heads = collab_heads.get_adapter(model).output_projection(model, site), []
    module = sites(model)[site.path]
    inside = any(part is projection for part in module.modules())
    if not inside:
        return projection(module(*args, **kwargs)[0])
    handle = projection.register_forward_hook(lambda *call: heads.append(call[2]))
    module(*args, **kwargs)
    handle.remove()
    return heads[0]


def states_equal(ours, theirs):
    theirs = theirs.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in ours.state_dict().items())


BY_DEFAULT = ("bert", "albert-groups", "gpt2-decoder")


@pytest.fixture(params=[pytest.param(n, marks=[pytest.mark.slow] * (n not in BY_DEFAULT)) for n in FAMILIES])
def family(request):
    return FAMILIES[request.param]


def test_output_error_falls_at_every_site(family, kind):
    _, report = refined(family, kind)
    assert_refined(report)


def test_reported_error_is_what_the_site_computes(family, kind):
    """Site by site, so that its inputs are those of the original."""
    for role in family.roles:
        path = next(s.path for s in collab_heads.get_adapter(family.build()).sites(family.build()) if s.role == role)
        before, plain = refined(family, kind, 0, sites=path)
        after, report = refined(family, kind, sites=path)
        site = report.sites[0]
        assert output_error(family, path, before) == pytest.approx(site.output_error_before, rel=FP32)
        assert output_error(family, path, after) == pytest.approx(site.output_error, rel=FP32)
        assert site.relative_error == plain.sites[0].relative_error
        assert plain.sites[0].output_error is plain.sites[0].output_error_before is None


@OF_EITHER
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float64))
def test_other_precisions(family, kind, dtype):
    """Fitted in float32 or better, stored in the dtype of the model."""
    model, report = refined(family, kind, dtype=dtype)
    assert_refined(report)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert torch.isfinite(output(model, family.inputs())).all()


@pytest.mark.parametrize("name", ("bert", *slow("marian", "t5")))
def test_bfloat16_stays_refined_after_rounding(name):
    family, role = FAMILIES[name], next(iter(FAMILIES[name].roles))
    models = [refined(family, "shared", steps, torch.bfloat16, sites=role) for steps in (0, STEPS)]
    path = models[0][1].sites[0].path
    plain, ours = (output_error(family, path, model) for model, _ in models)
    assert ours < plain


@OF_EITHER
def test_gradients_of_the_model_are_left_alone(family, kind):
    for dtype in (torch.float32, torch.float64):
        model, _ = refined(family, kind, 2, dtype=dtype)
        assert [name for name, parameter in model.named_parameters() if parameter.grad is not None] == []


@OF_EITHER
def test_only_the_new_parameters_change(family, kind):
    stock = build(family).state_dict()
    model, _ = refined(family, kind)
    plain, _ = refined(family, kind, 0)
    assert model.state_dict().keys() == plain.state_dict().keys()
    for name, tensor in model.state_dict().items():
        if ".query_key." not in name:
            assert torch.equal(tensor, plain.state_dict()[name]), name
            assert name not in stock or torch.equal(tensor, stock[name]), name
    for ours, theirs in zip(
        *(next(iter(sites(each).values())).query_key.parameters() for each in (model, plain)), strict=True
    ):
        assert not torch.equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("family", SMALL, indirect=True)
def test_repeats_with_the_seed(family):
    (model, _), (again, _), (other, _) = (refined(family, seed=seed) for seed in (0, 0, 1))
    assert states_equal(model, again)
    assert not states_equal(model, other)


@pytest.mark.parametrize("family", SMALL, indirect=True)
def test_the_global_seed_does_not_matter(family):
    torch.manual_seed(0)
    model, _ = refined(family)
    torch.manual_seed(1)
    again, _ = refined(family)
    assert states_equal(model, again)


@pytest.mark.parametrize("family", SMALL, indirect=True)
def test_training_mode_does_not_matter(family, kind):
    """Dropout stays off while fitting."""
    expected, report = refined(family, kind)
    model, of_training = refined(family, kind, prepare=lambda model: model.train())
    assert model.training
    assert [site.output_error_before for site in of_training.sites] == [
        site.output_error_before for site in report.sites
    ]
    assert states_equal(model, expected)


@pytest.mark.parametrize("family", SMALL, indirect=True)
def test_with_eager_attention(family):
    models = [
        refined(family, prepare=lambda model, name=name: model.set_attn_implementation(name))
        for name in ("eager", "sdpa")
    ]
    for eager, sdpa in zip(*(report.sites for _, report in models), strict=True):
        assert eager.output_error_before == pytest.approx(sdpa.output_error_before, rel=FP32)
    for model, report in models:
        assert_refined(report)
        assert torch.isfinite(output(model, family.inputs())).all()


@pytest.mark.parametrize("family", SMALL, indirect=True)
def test_under_no_grad(family):
    with torch.no_grad():
        model, _ = refined(family)
        assert not torch.is_grad_enabled()
    assert states_equal(model, refined(family)[0])
    assert all(p.requires_grad for module in sites(model).values() for p in module.query_key.parameters())


@pytest.mark.parametrize("steps", (0, 3))
def test_under_inference_mode(kind, steps):
    """Also then the new parameters can be trained."""
    family = FAMILIES["bert"]
    model = build(family)
    calibration = batches(family, model)
    with torch.inference_mode():
        swap(model, kind, NARROW[kind], batches=calibration, refine_steps=steps)
    assert states_equal(model, refined(family, kind, steps)[0])
    model(**family.inputs())[0].sum().backward()
    assert all(p.grad is not None for module in sites(model).values() for p in module.query_key.parameters())


@pytest.mark.parametrize("mode", (torch.enable_grad, torch.inference_mode))
def test_outputs_of_an_encoder_in_the_batch(mode):
    """They come with gradients, or can have none; no gradient reaches the model that made them."""
    family = FAMILIES["marian"]
    model, inputs = build(family), dict(family.inputs())
    with mode():
        states = model.base_model.get_encoder()(inputs.pop("input_ids"), inputs["attention_mask"])
    report = swap(model, "shared", 12, batches=[{**inputs, "encoder_outputs": states}], sites="dec-enc", refine_steps=3)
    assert all(site.output_error is not None for site in report.sites)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_no_steps(kind):
    """The decomposition as it is, and no output error measured."""
    family = FAMILIES["marian"]
    model, report = refined(family, kind, 0)
    expected = build(family)
    swap(expected, kind, NARROW[kind], batches=batches(family, expected), refine_steps=0, seed=7)
    assert states_equal(model, expected)
    assert {site.output_error for site in report.sites} == {None}
    assert " -> " not in str(report).splitlines()[2].split("q/k")[0].split("  ")[5]


def test_exact_width_is_not_refined(family, kind):
    model, plain = family.build(), family.build()
    report = swap(model, kind, batches=batches(family, model), refine_steps=STEPS)
    swap(plain, kind)
    assert {site.output_error for site in report.sites} == {None}
    assert {site.relative_error for site in report.sites} == {0.0}
    assert states_equal(model, plain)


def test_without_calibration_nothing_is_refined(kind):
    model, plain = (FAMILIES["bert"].build() for _ in range(2))
    swap(plain, kind, 16, refine_steps=0)
    report = swap(model, kind, 16, refine_steps=STEPS)
    assert states_equal(model, plain)
    assert {site.output_error for site in report.sites} == {None}


@pytest.mark.parametrize("name", ("bert", *slow("marian")))
@pytest.mark.parametrize("kind", KINDS)
def test_whole_model_is_closer_with_refinement(name, kind):
    family, distances = FAMILIES[name], []
    expected = output(build(family), family.inputs())
    for steps in (0, 60):
        model, _ = refined(family, kind, steps)
        distances.append(float((output(model, family.inputs()) - expected).norm()))
    assert distances[1] < distances[0]


def test_a_fit_that_makes_it_worse_is_dropped(monkeypatch):
    from collab_heads.fitting import refine

    monkeypatch.setattr(refine, "RELATIVE_RATE", 30.0)
    family = FAMILIES["bert"]
    model, report = refined(family, steps=3)
    for site in report.sites:
        assert site.output_error == site.output_error_before
    assert states_equal(model, refined(family, steps=0)[0])


def test_a_step_takes_a_piece_of_a_call(monkeypatch):
    """Short steps fit better per second; what is measured does not depend on how calls are cut."""
    from collab_heads.fitting import refine

    family, cut, reports = FAMILIES["bert"], [], []
    in_pieces = refine.in_pieces
    monkeypatch.setattr(refine, "in_pieces", lambda sample: cut.append(in_pieces(sample)) or cut[-1])
    for positions in (10**6, 1):
        monkeypatch.setattr(refine, "POSITIONS", positions)
        monkeypatch.setattr(refine, "ROWS", 1)
        reports.append(refined(family)[1])
    whole, pieces = cut[: len(cut) // 2], cut[len(cut) // 2 :]
    assert {len(each) for each in whole} == {1} and {len(each) for each in pieces} != {1}
    for (sample,), parts in zip(whole, pieces, strict=True):
        assert torch.equal(sample.target, torch.cat([part.target for part in parts]))
        assert {len(part.used) for part in parts} == {1}
    for one, other in zip(*(report.sites for report in reports), strict=True):
        assert one.output_error_before == pytest.approx(other.output_error_before, rel=FP32)
        assert one.output_error != other.output_error
