"""Which sizes the sites of a compressed model have beside each other."""

import pytest
import torch
from compressing import batches_of
from model_sizes import HEADS
from opening import layers_of
from slow_cases import slow

from collab_heads import compress, fold_heads, plan, prune_heads, prune_neurons, swap_to_collaborative
from collab_heads.compression.parts.table import resized
from collab_heads.errors import ArgumentError, ModelStateError, UnsupportedModelError
from collab_heads.model.site_size import Geometry
from families import FAMILIES


def neurons_of(model):
    return {block.path: block.num_neurons for block in layers_of(model).feed_forwards}


@pytest.mark.parametrize(
    "name, stacks",
    (
        ("bert", 1),
        ("marian", 2),
        ("gpt2", 1),
        *slow(("t5", 1), ("clip", 2), ("albert", 1)),
    ),
)
def test_even_blocks_of_a_stack_have_as_many_neurons_or_none(name, stacks):
    """T5's config has one number for both stacks."""
    model = FAMILIES[name].build()
    made = plan(model, batches_of(FAMILIES[name]), refine_steps=0, shape="even")
    for budget in (0.7, 0.5, 0.3):
        counts = {}
        for block in layers_of(model).feed_forwards:
            number = made.choose(budget)[block.path].get("neurons")
            counts.setdefault((block.config.model_type, block.entry), set()).add(number)
        assert len(counts) == stacks and all(len(each - {0}) <= 1 for each in counts.values())


def test_a_block_of_an_even_stack_that_adds_nothing_goes_whole_and_the_others_stay():
    model = FAMILIES["bert"].build()
    first, second = layers_of(model).feed_forwards
    with torch.no_grad():
        first.output.weight.mul_(1e-4)
    made = plan(model, batches_of(FAMILIES["bert"]), refine_steps=0, parts="neurons", shape="even")
    choices = made.choose(0.6)
    assert (choices[first.path].get("neurons"), choices[second.path].get("neurons")) == (0, None)


def test_models_without_a_head_are_even():
    family = FAMILIES["bert"]
    for model, shape in ((family.build().base_model, "even"), (family.build(), "free")):
        made = plan(model, batches_of(family), refine_steps=0, parts="neurons")
        assert made.shape == made.to_dict()["shape"] == shape


def test_free_blocks_have_less_predicted_error():
    model, found = FAMILIES["bert"].build(), {}
    for shape in ("even", "free"):
        made = plan(model, batches_of(FAMILIES["bert"]), refine_steps=0, shape=shape, parts="neurons")
        found[shape] = made.predicted(made.choose(0.7))
    assert found["free"] < found["even"]


def test_blocks_that_differ_already_become_even():
    model, family = FAMILIES["bert"].build(), FAMILIES["bert"]
    first = next(iter(neurons_of(model)))
    prune_neurons(model, batches_of(family), keep={first: 24})
    report = compress(model, batches_of(family), 0.6, parts="neurons", shape="even", refine_steps=0)
    assert len({*neurons_of(model).values()} - {0}) <= 1 and report.costs["parameters"].share <= 0.6


def test_an_unknown_shape_is_refused():
    with pytest.raises(ArgumentError, match="unknown shape 'round'"):
        plan(FAMILIES["bert"].build(), batches_of(FAMILIES["bert"]), shape="round")


@pytest.mark.parametrize(
    "name, budget, parts",
    (
        ("bert", 0.8, "neurons"),
        ("llama", 0.6, "heads"),
        *slow(
            ("marian", 0.9, "neurons"),
            ("t5", 0.5, ("query_key", "values", "neurons")),
            ("gpt2", 0.8, "neurons"),
            ("vit", 0.8, ("query_key", "values")),
            ("gemma3", 0.6, "heads"),
            ("clip", 0.8, "neurons"),
        ),
    ),
)
def test_uniform_models_are_stock_models_as_large(name, budget, parts):
    """Nothing is restored as zeros."""
    model = FAMILIES[name].build()
    report = compress(model, batches_of(FAMILIES[name]), budget, shape="uniform", parts=parts, refine_steps=0)
    small = model.num_parameters()
    folded = fold_heads(model)
    assert report.costs["parameters"].share <= budget and folded.neurons == {} and not any(folded.restored.values())
    assert model.num_parameters() <= 1.01 * small  # key biases, which the softmax cancels, come back
    found = {"neurons": folded.neuron_counts, "heads": folded.head_count, "values": folded.head_width}
    assert all(value for part, value in found.items() if part in parts)


@pytest.mark.slow
def test_uniform_leaves_what_the_config_does_not_count_alone():
    """SigLIP's entry counts the neurons of its pooling, too; DINOv2 has one that it ignores."""
    for name in ("dinov2", "siglip"):
        made = plan(FAMILIES[name].build(), batches_of(FAMILIES[name]), refine_steps=0, shape="uniform")
        chosen = made.choose(max(made.least, 0.9))
        ours = {path: choice for path, choice in chosen.items() if choice.get("neurons") is not None}
        assert not any("vision" in path for path in ours) and (name == "siglip" or not ours)


@pytest.mark.slow
@pytest.mark.parametrize("sites", ["enc-self", ["enc-self", "dec-self", "dec-enc"]])
def test_uniform_changes_attention_as_a_whole(sites):
    made = plan(FAMILIES["t5"].build(), batches_of(FAMILIES["t5"]), refine_steps=0, shape="uniform", sites=sites)
    assert (made.least < 1) == (sites != "enc-self")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["marian", "distilbert", "t5", "gpt2"])
def test_ctranslate2_sites_have_one_width_and_one_number_of_heads(name):
    model = FAMILIES[name].build()
    made = plan(model, batches_of(FAMILIES[name]), refine_steps=0, shape="ctranslate2")
    for budget in (0.6, 0.4):
        choices, counts, widths = made.choose(budget), set(), set()
        for path, use in made.measured.uses.items():
            geometry = resized(use.shape, choices[path])
            if isinstance(geometry, Geometry) and geometry.num_heads:
                counts.add(geometry.num_heads)
                widths.add(geometry.dim_value)
                assert geometry.query_key_width == geometry.num_heads * geometry.dim_value
        assert len(counts) == 1 and (len(widths) > 1 or name != "marian")  # every site has its own


def test_ctranslate2_leaves_rotary_heads_alone():
    made = plan(FAMILIES["llama"].build(), batches_of(FAMILIES["llama"]), refine_steps=0, shape="ctranslate2")
    choices = made.choose(0.8)
    assert {part for choice in choices.values() for part, _ in choice.sizes} == {"neurons"}


@pytest.mark.parametrize("of", ["parameters", "time"])
def test_ctranslate2_needs_heads_that_may_change_where_their_numbers_differ(of):
    """Widths alone do not make 2 heads of one site 4, and budgets of time are not looked at before the plan."""
    model = FAMILIES["marian"].build()
    prune_heads(model, heads={layers_of(model).attention[0].path: [0, 1]})
    with pytest.raises(ArgumentError, match=r"have 2, 4 heads, .* \(parts=values, neurons\): let heads change"):
        compress(model, batches_of(FAMILIES["marian"]), 0.7, of=of, parts=["values", "neurons"], shape="ctranslate2")
    assert layers_of(model).attention[0].num_heads == 2


def test_gguf_keeps_the_width_of_heads_and_removes_heads_and_neurons():
    made = plan(FAMILIES["llama"].build(), batches_of(FAMILIES["llama"]), refine_steps=0, shape="gguf")
    assert {part for choice in made.choose(0.5).values() for part, _ in choice.sizes} == {"heads", "neurons"}


def test_what_no_plan_brings_into_llama_cpp_is_refused_before_it_is_measured(monkeypatch):
    monkeypatch.setattr("collab_heads.compression.plan.measure_model", lambda *_, **__: pytest.fail("it was measured"))
    with pytest.raises(UnsupportedModelError, match=r"is of type 'distilbert', GGUF is for .*llama, "):
        plan(FAMILIES["distilbert"].build(), batches_of(FAMILIES["distilbert"]), shape="gguf")
    for name in ("bert", "gpt2", "qwen3"):
        with pytest.raises(UnsupportedModelError, match=f"architecture '{name}' .* use shape='uniform'"):
            plan(FAMILIES[name].build(), batches_of(FAMILIES[name]), shape="gguf")
    model = FAMILIES["llama"].build()
    swap_to_collaborative(model, dim_shared_query_key=HEADS * 4, kind="per_head")
    with pytest.raises(
        ModelStateError, match=r"queries and keys of width 4, .* one width, here \d+: compress the original"
    ):
        plan(model, batches_of(FAMILIES["llama"]), shape="gguf")


def test_a_budget_below_what_a_shape_can_reach_names_the_shape():
    made = plan(FAMILIES["bert"].build(), batches_of(FAMILIES["bert"]), refine_steps=0, shape="uniform")
    with pytest.raises(ArgumentError, match="in the shape 'uniform'"):
        made.choose(0.1)
