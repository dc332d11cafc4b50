"""The door: what accelerate placed on devices changes as any other model; offloaded weights and NaN are refused."""

import sys
from collections import Counter

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import LayerwiseCastingHook, add_hook_to_module
from compressing import batches_of
from distilling import changed_pair
from model_sizes import FP32_NOISE
from slow_cases import slow
from torch.testing import assert_close
from unchanged import assert_unchanged, refused, snapshot

from collab_heads import (
    analyze_heads,
    compress,
    distill,
    fold_heads,
    inspect,
    plan,
    prune_heads,
    prune_neurons,
    rotate_heads,
    swap_to_alpha,
    swap_to_collaborative,
    swap_to_gated,
)
from collab_heads.analysis import head_importance, head_statistics, leave_one_out, mean_loss, token_contributions
from collab_heads.collaborative.score_terms import restrict_scores
from collab_heads.errors import ArgumentError, ModelStateError, NonFiniteError, UnsupportedModelError
from collab_heads.model.open_layers import OpenLayers
from collab_heads.model.refusals import HOOK
from collab_heads.sites.record import CollabConfig
from collab_heads.training import HeadPenalty
from families import FAMILIES

CPU = torch.device("cpu")
LAYER_1 = "encoder.layer.1.attention.self"
HALF = {"embeddings": "cpu", "encoder.layer.0": "cpu", "encoder.layer.1": "disk", "pooler": "cpu"}
HALF = {f"bert.{name}": place for name, place in HALF.items()} | {"dropout": "cpu", "classifier": "cpu"}
SOME_HEADS = {"enc-self": [[0], [1, 2]]}


def by_device_map(model, folder):
    """A layer in the checkpoint on disk, the rest in memory, as from_pretrained leaves them."""
    model.save_pretrained(folder / "stock")
    return type(model).from_pretrained(folder / "stock", device_map=HALF, offload_folder=folder / "offload")


def to_memory(model, folder):
    return cpu_offload(model, CPU)


def to_memory_by_layer(model, folder):
    """The same, layers as a whole: their modules have no hooks of their own."""
    return cpu_offload(model, CPU, preload_module_classes=["BertLayer"])


def to_disk(model, folder):
    return disk_offload(model, str(folder / "offload"), CPU)


OFFLOADED = {each.__name__: each for each in (by_device_map, to_memory, to_memory_by_layer, to_disk)}


def placed(model):
    """Return the model with hooks on every module that place it."""
    names = [name for name, _ in (*model.named_modules(), *model.named_buffers()) if name]
    return dispatch_model(model, dict.fromkeys(names, "cpu"), force_hooks=True)


def batches(labels: bool = False) -> list[dict]:
    made = batches_of(FAMILIES["bert"], 12)
    for number, batch in enumerate(made):
        if labels:
            batch["labels"] = (torch.arange(len(batch["input_ids"])) + number) % 2
    return made


def gated_then_pruned(model):
    swap_to_gated(model, alive_heads={"enc-self": [[1, 0, 1, 1], [1, 1, 0, 0]]})
    assert sum(len(site.open) for site in inspect(model).gates.sites) == 5
    prune_heads(model)


def mixed_then_narrowed(model):
    swap_to_alpha(model)
    inspect(model)
    swap_to_collaborative(model, dim_value=16, batches=batches())


def pruned_then_folded(model):
    prune_heads(model, heads=SOME_HEADS)
    fold_heads(model)


def planned_then_compressed(model):
    made = plan(model, batches(), refine_steps=2)
    made.measure([0.6])
    compress(model, made, 0.5)


CHANGES = {
    "shared": lambda model: swap_to_collaborative(model, dim_shared_query_key=12),
    "per_head": lambda model: swap_to_collaborative(
        model,
        dim_shared_query_key=16,
        dim_value=16,
        kind="per_head",
        allocation="balanced",
        batches=batches(),
        refine_steps=2,
    ),
    "gates": swap_to_gated,
    "gated_then_pruned": gated_then_pruned,
    "mixed_then_narrowed": mixed_then_narrowed,
    "repaired": lambda model: prune_heads(model, heads=SOME_HEADS, batches=batches()),
    "a layer without heads": lambda model: prune_heads(model, heads={"enc-self": [[], [0, 1, 2, 3]]}),
    "pruned_then_folded": pruned_then_folded,
    "planned_then_compressed": planned_then_compressed,
    "one term": lambda model: restrict_scores(model, "context"),
    "moved heads": lambda model: rotate_heads(model, [((LAYER_1, 0), (LAYER_1, 3))]),
}


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**FAMILIES["bert"].inputs()).logits


LONG = ("planned_then_compressed",)


@pytest.mark.parametrize("change", [*(name for name in CHANGES if name not in LONG), *slow(*LONG)])
def test_a_placed_model_changes_as_any_other(change, tmp_path):
    whole, model = FAMILIES["bert"].build(), placed(FAMILIES["bert"].build())
    before, hooked = logits(whole), hooks_of(model)
    assert f"bert.{LAYER_1}" in hooked and f"bert.{LAYER_1}.value" in hooked
    CHANGES[change](whole)
    CHANGES[change](model)
    wanted = logits(whole)
    assert change == "gates" or (wanted - before).abs().max() > 0.01
    assert_close(logits(model), wanted, atol=FP32_NOISE, rtol=0)
    assert hooks_of(model) == {name: hook for name, hook in hooked.items() if name in hooks_of(model)}
    assert f"bert.{LAYER_1}" in hooks_of(model)
    model.save_pretrained(tmp_path)
    assert_close(logits(type(model).from_pretrained(tmp_path)), wanted, atol=FP32_NOISE, rtol=0)


CALLS = {
    "compress": lambda model: compress(model, batches(), 0.5, refine_steps=2),
    "plan": lambda model: plan(model, batches(), refine_steps=2),
    "swap": lambda model: swap_to_collaborative(model, dim_shared_query_key=12, batches=batches(), refine_steps=2),
    "heads": lambda model: prune_heads(model, batches(), keep=5),
    "neurons": lambda model: prune_neurons(model, batches(), keep=16),
    "fold": pruned_then_folded,
}


@pytest.mark.parametrize("call", CALLS)
def test_a_model_is_opened_once(call):
    """Whatever is tried out on it; a second function opens it again."""
    codes = {OpenLayers.of.__func__.__code__: "sites", OpenLayers.feed_forwards.func.__code__: "blocks"}
    codes[CollabConfig.on.__func__.__code__] = "record"
    counts, model = Counter(), FAMILIES["bert"].build().eval()

    def watch(frame, event, _):
        if event == "call" and frame.f_code in codes:
            counts[codes[frame.f_code]] += 1

    sys.setprofile(watch)
    try:
        CALLS[call](model)
    finally:
        sys.setprofile(None)
    once = 2 if call == "fold" else 1
    assert counts["sites"] == counts["record"] == once and counts["blocks"] <= 1


def hooks_of(model) -> dict[str, int]:
    return {name: id(vars(module)[HOOK]) for name, module in model.named_modules() if HOOK in vars(module)}


def names_away(model) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.is_meta}


MEASURES = {
    "importance": lambda model: head_importance(model, batches(labels=True)),
    "reconstruction": lambda model: head_importance(model, batches(), criterion="reconstruction"),
    "relevance": lambda model: analyze_heads(model, batches(labels=True), parts=["relevance"]).relevance.relevance,
    "statistics": lambda model: head_statistics(model, batches()).confidence,
}
READING = {
    "inspect": inspect,
    "neurons": lambda model: prune_neurons(model, batches(), keep=8),
}


@pytest.mark.parametrize("measure", MEASURES)
def test_measures_of_a_placed_model(measure):
    model = placed(FAMILIES["bert"].build().eval())
    found, wanted = MEASURES[measure](model), MEASURES[measure](FAMILIES["bert"].build().eval())
    assert wanted.keys() == found.keys()
    for path, scores in wanted.items():
        assert_close(found[path], scores, atol=FP32_NOISE, rtol=0)


@pytest.mark.parametrize("spread", OFFLOADED)
def test_an_offloaded_model_is_refused_and_left_as_it_was(spread, tmp_path):
    model = OFFLOADED[spread](FAMILIES["bert"].build().eval(), tmp_path)
    wanted, hooks, away = logits(model), hooks_of(model), names_away(model)
    measures = {name: call for name, call in MEASURES.items() if name != "statistics"}
    for name, call in {**CHANGES, **measures, **READING}.items():
        with pytest.raises(ModelStateError, match="load the model whole"):
            call(model)
        assert (hooks_of(model), names_away(model)) == (hooks, away), name
    assert_close(logits(model), wanted, atol=0, rtol=0)


def test_what_needs_no_weights_runs_offloaded(tmp_path):
    """Statistics and generation of a changed checkpoint; accelerate brings each module in as it runs."""
    whole = FAMILIES["marian"].build().eval()
    prune_heads(whole, heads={"enc-self": [[0], [1]]})
    whole.save_pretrained(tmp_path)
    model = cpu_offload(type(whole).from_pretrained(tmp_path).eval(), CPU)
    inputs = {name: FAMILIES["marian"].inputs()[name] for name in ("input_ids", "attention_mask")}
    assert torch.equal(*(each.generate(**inputs, max_length=12, num_beams=2) for each in (model, whole)))
    labelled = [FAMILIES["marian"].inputs() | {"labels": FAMILIES["marian"].inputs()["decoder_input_ids"]}]
    found, wanted = (head_statistics(each, labelled).confidence for each in (model, whole))
    for path, values in wanted.items():
        assert_close(found[path], values, atol=FP32_NOISE, rtol=0)


def test_without_heads_and_contributions():
    marian = FAMILIES["marian"]
    model, whole = placed(marian.build().eval()), marian.build().eval()
    inputs = marian.inputs() | {"decoder_attention_mask": torch.ones_like(marian.inputs()["decoder_input_ids"])}
    found, wanted = token_contributions(model, [inputs]), token_contributions(whole, [inputs])
    assert_close(found.source, wanted.source, atol=FP32_NOISE, rtol=0)
    labelled = inputs | {"labels": inputs["decoder_input_ids"]}
    found, wanted = (leave_one_out(each, lambda one: mean_loss(one, [labelled])).harm() for each in (model, whole))
    assert_close(list(found.values()), list(wanted.values()), atol=FP32_NOISE, rtol=0)


def test_an_error_leaves_a_placed_model_as_it_was():
    model = placed(FAMILIES["bert"].build())
    hooks, before = hooks_of(model), dict(model.named_parameters())
    with pytest.raises(ArgumentError):
        swap_to_collaborative(model, dim_shared_query_key=10**6)
    now = dict(model.named_parameters())
    assert now.keys() == before.keys() and all(now[name] is parameter for name, parameter in before.items())
    assert hooks_of(model) == hooks


def test_a_plan_of_a_model_that_was_changed_since():
    model = placed(FAMILIES["bert"].build())
    made = plan(model, batches(), refine_steps=0)
    prune_heads(model, heads=SOME_HEADS)
    with pytest.raises(ArgumentError, match="changed since the plan"):
        compress(model, made, 0.5)


def test_hooks_of_another_kind_are_refused():
    model = FAMILIES["bert"].build()
    add_hook_to_module(
        model.bert.encoder.layer[0].attention.self.key, LayerwiseCastingHook(torch.float16, torch.float32, False)
    )
    before = snapshot(model)
    with pytest.raises(ModelStateError, match="LayerwiseCastingHook"):
        swap_to_gated(model)
    assert_unchanged(model, before)


def test_only_whole_models_are_trained():
    model, original = changed_pair()
    swap_to_gated(model)
    cpu_offload(model, CPU)
    for refusing in (lambda: distill(model, original, batches(), steps=2), lambda: HeadPenalty(model, target_heads=4)):
        with pytest.raises(UnsupportedModelError, match=r"offloaded .* load it whole"):
            refusing()


FITTED = {
    "collaborative": lambda model: swap_to_collaborative(model, dim_shared_query_key=16),
    "values": lambda model: swap_to_collaborative(model, dim_value=16),
    "gates": swap_to_gated,
    "alphas": swap_to_alpha,
    "removal": lambda model: prune_heads(model, heads=SOME_HEADS),
    "plan": lambda model: plan(model, batches_of(FAMILIES["bert"]), refine_steps=0),
    "compression": lambda model: compress(model, batches_of(FAMILIES["bert"]), refine_steps=0),
    "reconstruction": lambda model: head_importance(model, batches_of(FAMILIES["bert"]), criterion="reconstruction"),
}


@pytest.mark.parametrize("value", (torch.nan, -torch.inf))
@pytest.mark.parametrize("call", FITTED)
def test_weights_that_are_not_finite_are_named_before_anything_is_done(call, value):
    """Also where the forward pass hides them, as a query's may be under sdpa, or they are of another layer."""
    model = FAMILIES["bert"].build()
    with torch.no_grad():
        model.bert.encoder.layer[1].attention.self.query.weight[3, 2] = value
    with refused(model, NonFiniteError, LAYER_1, "layer.1.attention.self.query.weight contains NaN or inf"):
        FITTED[call](model)


def test_a_gate_that_is_not_finite_removes_no_heads():
    model = FAMILIES["bert"].build()
    swap_to_gated(model)
    with torch.no_grad():
        model.bert.encoder.layer[1].attention.output.dense.gates.log_alpha.fill_(torch.nan)
    for call in (prune_heads, fold_heads):
        with refused(model, NonFiniteError, LAYER_1, "log_alpha contains NaN"):
            call(model)


def test_neither_of_a_pair_may_have_weights_that_are_not_finite():
    for which in (0, 1):
        pair = changed_pair("bert")
        with torch.no_grad():
            pair[which].bert.encoder.layer[1].attention.output.dense.weight[0, 0] = torch.nan
        with refused(pair[0], NonFiniteError, LAYER_1, "attention.output.dense.weight contains NaN"):
            distill(*pair, batches_of(FAMILIES["bert"]), 1)
