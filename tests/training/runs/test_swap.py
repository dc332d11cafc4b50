"""What the flags say of the swap: its phases, what is refused before them, and what is noted of it."""

from argparse import Namespace

import pytest
import torch
from later import Later
from model_runs import sites, swapped
from model_sizes import EXACT, HEADS
from unchanged import refused

from collab_heads.collaborative.report import SiteReport, SwapReport
from collab_heads.errors import ArgumentError, ModelStateError, UnsupportedModelError
from collab_heads.training.options import heads
from collab_heads.training.options.changes import COLLABORATIVE
from collab_heads.training.options.parser import Parser
from collab_heads.training.options.run import training_flags
from collab_heads.training.runs import swap as swapping
from families import FAMILIES

learner = Later("collab_heads.training.runs.learner")

LAYER_0, LAYER_1 = "encoder.layer.0.attention.self", "encoder.layer.1.attention.self"


def arguments(flags: str = "--collaborative") -> Namespace:
    parser = Parser()
    parser.add(*COLLABORATIVE, *heads.HEADS, *heads.ALPHAS, *training_flags())
    args = parser.parse_args(flags.split())
    args.model_name_or_path = "here"
    return args


def bert():
    return FAMILIES["bert"].build()


def other():
    """A model of a family without adapter."""
    from transformers import GPTNeoConfig, GPTNeoModel

    return GPTNeoModel(
        GPTNeoConfig(vocab_size=9, hidden_size=8, num_layers=1, num_heads=2, attention_types=[[["global"], 1]])
    )


SWAPS, TRAINS, BOTH = (True, False), (False, True), (True, True)


@pytest.mark.parametrize(
    "swap, plan",
    ((None, (TRAINS,)), ("before", (BOTH,)), ("after", (TRAINS, SWAPS)), ("between", (TRAINS, BOTH))),
)
def test_phases_swap_once_and_train_around_it(swap, plan):
    phases = swapping.phases(swap)
    assert tuple((phase.swaps, phase.trains) for phase in phases) == plan
    assert [phase.number for phase in phases] == list(range(len(plan)))
    (last,) = [phase for phase in phases if phase.is_last_training]
    assert last.trains and not any(phase.trains for phase in phases[last.number + 1 :])
    assert [phase.stage for phase in phases] == ["fine_tuned", "fine_tuned_again"][: len(plan)]


@pytest.mark.parametrize(
    "flags",
    (
        "--collaborative",
        "--collaborative --dim_shared_query_key 0.5 --sites enc-self",
        "--collaborative --dim_shared_query_key enc-self=12 --dim_value enc-self=0.5",
        f"--collaborative --dim_shared_query_key {EXACT} --sites {LAYER_1}",
        "--score_terms content",
    ),
)
def test_what_can_be_swapped_is_taken_and_left_alone(flags):
    model = bert()
    learner.check_flags_fit(arguments(flags), model)
    assert not any(swapped(model))


def test_widths_per_role_leave_the_other_roles_alone():
    """Also a site of another role that is collaborative already."""
    model = FAMILIES["marian"].build()
    asked = "--dim_shared_query_key enc-self=8,dec-enc=0.5 --dim_value dec-self=0.5"
    swapping.swap(arguments("--collaborative --sites dec-self"), model, None)
    learner.check_flags_fit(arguments(f"--collaborative {asked}"), model)
    with refused(model, ModelStateError, "is collaborative already", "decoder.layers.0.self_attn"):
        learner.check_flags_fit(arguments("--collaborative --dim_shared_query_key dec-self=8"), model)


@pytest.mark.parametrize(
    "flags, fragments",
    (
        (f"--dim_shared_query_key {EXACT + 1}", (str(EXACT + 1), LAYER_0, f"1 to {EXACT}")),
        ("--dim_shared_query_key 1.5", ("1.5", "share")),
        ("--dim_shared_query_key nan", ("nan", "share")),
        (f"--dim_value {EXACT + 1}", ("dim_value", str(EXACT + 1), LAYER_0, f"1 to {EXACT}")),
        ("--sites dec-enc", ("has no dec-enc attention",)),
        ("--dim_value dec-enc=0.5", ("has no dec-enc attention",)),
        (f"--dim_shared_query_key enc-self={EXACT + 1}", (str(EXACT + 1), LAYER_0, f"1 to {EXACT}")),
        (f"--dim_value enc-self={EXACT + 1}", ("dim_value", str(EXACT + 1), LAYER_0)),
        ("--sites enc-sefl", ("did you mean 'enc-self'?",)),
        (f"--sites {LAYER_0} encoder.layer.7.attention.self", ("encoder.layer.7",)),
    ),
)
def test_sites_and_widths_that_cannot_be_are_refused(flags, fragments):
    model, args = bert(), arguments(f"--collaborative {flags}")
    with refused(model, ArgumentError, *fragments):
        learner.check_flags_fit(args, model)


def test_a_swapped_site_is_refused_and_one_that_is_not_is_taken():
    model = bert()
    swapping.swap(arguments(f"--collaborative --sites {LAYER_0}"), model, None)
    with refused(model, ModelStateError, "here is collaborative already", LAYER_0, "leave --collaborative out"):
        learner.check_flags_fit(arguments(), model)
    learner.check_flags_fit(arguments(f"--collaborative --sites {LAYER_1}"), model)
    # alone it leaves query and key as they are
    learner.check_flags_fit(arguments("--collaborative --dim_value 0.5"), model)
    learner.check_flags_fit(arguments(""), model)


def test_a_family_without_adapter_is_refused_where_one_is_needed():
    model = other()
    learner.check_flags_fit(arguments(""), model)
    for flags in ("--collaborative", "--score_terms context"):
        with refused(model, UnsupportedModelError, "'gpt_neo'"):
            learner.check_flags_fit(arguments(flags), model)


def test_content_scores_of_a_model_without_query_biases_are_refused_early():
    model = FAMILIES["t5"].build()
    with refused(model, UnsupportedModelError, "no query bias"):
        learner.check_flags_fit(arguments("--score_terms content"), model)


def test_the_swap_is_as_the_flags_say(monkeypatch):
    asked = {}
    monkeypatch.setattr(swapping, "swap_to_collaborative", lambda model, **more: asked.update(more, model=model))
    flags = "--collaborative --dim_shared_query_key 12 --dim_value 0.5 --kind per_head --sites enc-self"
    flags += " --decomposition_tol 0.01"
    flags += " --decomposition_method parafac --refine_steps 7 --seed 5 --allocation balanced"
    swapping.swap(arguments(flags), "model", ["batch"])
    expected = {"dim_shared_query_key": 12, "kind": "per_head", "sites": ["enc-self"], "tol": 0.01, "seed": 5}
    expected |= {
        "dim_value": 0.5,
        "method": "parafac",
        "refine_steps": 7,
        "allocation": "balanced",
        "batches": ["batch"],
        "model": "model",
    }
    assert asked == expected


def test_a_swap_with_the_flags_of_the_command_line():
    model, batches = bert(), [{"input_ids": torch.arange(3, 11).view(2, 4)}]
    args = arguments("--collaborative --dim_shared_query_key 12 --kind per_head --refine_steps 2")
    report = swapping.swap(args, model, batches)
    assert report.calibrated
    assert {module.query_key.state.kind for module in sites(model).values()} == {"per_head"}
    found = swapping.summary(report)
    assert [site["dim"] for site in found["sites"]] == [4 * HEADS] * 2  # 3 per head, rounded up
    assert found["mean_output_error"] == pytest.approx(sum(site["output_error"] for site in found["sites"]) / 2)


def site_report(path, error, output):
    sizes = {"dim": 8, "dim_asked": 8, "dim_exact": 32, "sweeps": 3, "seconds": 0.5}
    counts = {"parameters_before": 9, "parameters_after": 5, "cache_before": 64, "cache_after": 48}
    errors = {"relative_error": error, "output_error_before": output, "output_error": output}
    return SiteReport(path=path, role="enc-self", kind="shared", **sizes, **counts, **errors)


def test_a_summary_has_totals_and_every_site():
    """An output error is known of the sites that were refined only."""
    reports = site_report("a", 0.25, None), site_report("b", 0.75, 0.125), site_report("c", 0.5, 0.375)
    found = swapping.summary(SwapReport(reports, True, 2.5, 100, 90))
    assert list(found)[:3] == ["decomposition_seconds", "mean_relative_error", "mean_output_error"]
    assert (found["decomposition_seconds"], found["mean_relative_error"], found["mean_output_error"]) == (
        2.5,
        0.5,
        0.25,
    )
    assert [site["path"] for site in found["sites"]] == ["a", "b", "c"]
    assert (found["model_parameters_before"], found["model_parameters_after"]) == (100, 90)
    assert swapping.summary(SwapReport(reports[:1], False, 2.5, 100, 90))["mean_output_error"] is None
