"""What the flags say of the compression, and what is refused before hours of training."""

from argparse import Namespace

import pytest
import torch
from later import Later
from model_sizes import HEADS, LAYERS
from unchanged import refused

from collab_heads import plan, swap_to_gated
from collab_heads.errors import ArgumentError, ModelStateError
from collab_heads.training.runs import swap as swapping
from families import FAMILIES

learner = Later("collab_heads.training.runs.learner")


def bert():
    return FAMILIES["bert"].build()


@pytest.mark.slow
def test_a_budget_that_the_compression_would_refuse_is_refused_before_training(parse):
    model = bert()
    least = plan(model, [FAMILIES["bert"].inputs()]).least
    too_small = f"{least - 0.001:.4f}"
    with refused(
        model, ArgumentError, f"--compress_budget: budget {too_small} of parameters is below 0.", "the fewest heads"
    ):
        learner.check_flags_fit(parse(f"--compress_budget {too_small}"), model)
    learner.check_flags_fit(parse(f"--compress_budget {least + 0.001:.4f}"), model)
    learner.check_flags_fit(parse(f"--compress_budget {too_small} --compress_of operations"), model)  # not known yet


def test_sites_that_cannot_be_compressed_are_refused_before_training(parse):
    model = bert()
    with refused(model, ArgumentError, "has no dec-enc attention"):
        learner.check_flags_fit(parse("--compress_budget 0.5 --sites dec-enc"), model)
    swap_to_gated(model)
    with refused(model, ModelStateError, "gates", "prune_heads"):
        learner.check_flags_fit(parse("--compress_budget 0.5"), model)


@pytest.mark.parametrize(
    "flags, said", (("--compress_of bytes", "of bytes is below 0."), ("--compress_shape uniform", "shape 'uniform'"))
)
def test_the_least_counts_bytes_and_the_shape(flags, said, parse):
    model = bert()
    with refused(model, ArgumentError, "--compress_budget: budget 0.01", said):
        learner.check_flags_fit(parse(f"--compress_budget 0.01 --compress_parts values neurons {flags}"), model)


def test_the_compression_is_as_the_flags_say(monkeypatch, parse):
    asked = {}
    monkeypatch.setattr(swapping, "compress", lambda *positional, **more: asked.update(more, given=positional))
    flags = "--compress_budget 0.4 --compress_of cache --sites enc-self --refine_steps 7 --seed 5"
    flags += " --compress_parts heads values"
    swapping.compress_as_asked(parse(flags), "model", ["batch"])
    expected = {"of": "cache", "kind": "per_head", "sites": ["enc-self"], "refine_steps": 7, "seed": 5}
    expected["shape"] = None
    expected["parts"] = ["heads", "values"]
    assert asked == {"given": ("model", ["batch"], 0.4), **expected}
    swapping.compress_as_asked(parse("--compress_budget 0.4 --compress_kind shared --compress_shape free"), "model", [])
    assert (asked["of"], asked["kind"], asked["shape"]) == ("parameters", "shared", "free")


def test_a_run_compresses_in_the_place_of_the_swap(parse):
    model, batch = bert().eval(), {"input_ids": torch.arange(3, 35).view(8, 4)}
    alone = Namespace(is_main_process=True, num_processes=1)
    report = swapping.swap_everywhere(alone, parse("--compress_budget 0.5 --refine_steps 0"), model, [batch])
    found = swapping.summary(report)
    assert found["budget"] == 0.5 and found["of"] == "parameters" and len(found["sites"]) == 2 * LAYERS
    assert found["model_parameters_after"] == model.num_parameters() < found["model_parameters_before"]
    assert sum(site.get("heads_after", 0) for site in found["sites"]) <= LAYERS * HEADS
