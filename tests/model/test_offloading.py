"""Models that accelerate spread or offloaded: what changes or measures attention does there what it does elsewhere."""

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import LayerwiseCastingHook, add_hook_to_module
from compressing import batches_of
from distilling import changed_pair
from model_runs import aligned
from model_sizes import FP32_NOISE
from torch.testing import assert_close
from unchanged import refused

from collab_heads import (
    HeadPenalty,
    alpha_report,
    analyze_heads,
    compress,
    distill,
    fold_heads,
    gate_report,
    head_importance,
    head_statistics,
    leave_one_out,
    mean_loss,
    plan,
    prune_heads,
    rotate_heads,
    swap_to_alpha,
    swap_to_collaborative,
    swap_to_gated,
    token_contributions,
)
from collab_heads.collaborative.score_terms import restrict_scores
from collab_heads.errors import ArgumentError, NonFiniteError, SwapError, UnsupportedModelError
from collab_heads.model.device_hooks import HOOK, OWN_FILE
from collab_heads.model.offloading import is_offloaded
from families import FAMILIES

CPU = torch.device("cpu")
LAYER_1 = "encoder.layer.1.attention.self"
HALF = {"embeddings": "cpu", "encoder.layer.0": "cpu", "encoder.layer.1": "disk", "pooler": "cpu"}
HALF = {f"bert.{name}": place for name, place in HALF.items()} | {"dropout": "cpu", "classifier": "cpu"}
TWO_PLACES = {"a layer": "cpu", "another": "disk"}  # by which save_pretrained knows that weights are away
SOME_HEADS = {"enc-self": [[0], [1, 2]]}


def by_device_map(model, folder):
    """A layer in the checkpoint on disk, the rest in memory, as from_pretrained leaves them."""
    model.save_pretrained(folder / "stock")
    return type(model).from_pretrained(folder / "stock", device_map=HALF, offload_folder=folder / "offload")


def by_device_map_without_folder(model, folder):
    """The same without a place for what is written."""
    model.save_pretrained(folder / "stock")
    return type(model).from_pretrained(folder / "stock", device_map=HALF)


def to_memory(model, folder):
    """All of it away in memory."""
    cpu_offload(model, CPU).hf_device_map = TWO_PLACES
    return model


def to_memory_by_module(model, folder):
    """The same, attention modules as a whole."""
    cpu_offload(model, CPU, preload_module_classes=["BertSelfAttention"]).hf_device_map = TWO_PLACES
    return model


def to_disk(model, folder):
    """All of it away in raw files of accelerate."""
    disk_offload(model, str(folder / "offload"), CPU).hf_device_map = TWO_PLACES
    return model


def placed(model, folder):
    """Hooks that only place it."""
    return dispatch_model(model, {"": "cpu"}, force_hooks=True)


SPREADS = {
    spread.__name__: spread
    for spread in (by_device_map, by_device_map_without_folder, to_memory, to_memory_by_module, to_disk, placed)
}


def batches(labels: bool = False) -> list[dict]:
    made = batches_of(FAMILIES["bert"], 12)
    for number, batch in enumerate(made):
        if labels:
            batch["labels"] = (torch.arange(len(batch["input_ids"])) + number) % 2
    return made


def gated_then_pruned(model):
    swap_to_gated(model, alive_heads={"enc-self": [[1, 0, 1, 1], [1, 1, 0, 0]]})
    assert sum(len(site.open) for site in gate_report(model).sites) == 5
    prune_heads(model)


def mixed_then_narrowed(model):
    swap_to_alpha(model)
    alpha_report(model)
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


def by_default(spread: str, change: str):
    return pytest.param(
        spread, change, marks=() if spread == "by_device_map" or change == "shared" else pytest.mark.slow
    )


@pytest.mark.parametrize("spread, change", [by_default(spread, change) for spread in SPREADS for change in CHANGES])
def test_a_change_does_what_it_does_to_a_whole_model(change, spread, tmp_path):
    whole = FAMILIES["bert"].build()
    before = logits(whole)
    model = SPREADS[spread](FAMILIES["bert"].build(), tmp_path)
    away = names_away(model)
    CHANGES[change](whole)
    CHANGES[change](model)
    wanted = logits(whole)
    assert change == "gates" or (wanted - before).abs().max() > 0.01
    assert_close(logits(model), wanted, atol=FP32_NOISE, rtol=0)
    names = {name for name, _ in model.named_parameters()}
    assert away & names <= names_away(model)
    new = {name for name in names - away if "layer.1.attention" in name and not name.endswith("alpha")}
    assert new <= names_away(model) or spread == "placed"
    model.save_pretrained(tmp_path / "saved")
    loaded = type(model).from_pretrained(tmp_path / "saved")
    assert_close(logits(loaded), wanted, atol=FP32_NOISE, rtol=0)
    again = type(model).from_pretrained(tmp_path / "saved", device_map=HALF, offload_folder=tmp_path / "other")
    assert is_offloaded(again)
    assert_close(logits(again), wanted, atol=FP32_NOISE, rtol=0)


def names_away(model) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.is_meta}


MEASURES = {
    "importance": lambda model: head_importance(model, batches(labels=True)),
    "reconstruction": lambda model: head_importance(model, batches(), criterion="reconstruction"),
    "statistics": lambda model: head_statistics(model, batches()).confidence,
    "relevance": lambda model: analyze_heads(model, batches(labels=True), parts=["relevance"]).relevance.relevance,
}


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("spread", ("by_device_map", "to_memory"))
def test_measures_are_those_of_a_whole_model(measure, spread, tmp_path):
    model = SPREADS[spread](FAMILIES["bert"].build(), tmp_path)
    away = names_away(model)
    found, wanted = MEASURES[measure](model.eval()), MEASURES[measure](FAMILIES["bert"].build().eval())
    assert wanted.keys() == found.keys()
    for path, scores in wanted.items():
        assert_close(found[path], scores, atol=FP32_NOISE, rtol=0)
    assert away and names_away(model) == away


def test_without_heads_and_contributions(tmp_path):
    marian = FAMILIES["marian"]
    model, whole = marian.build().eval(), marian.build().eval()
    cpu_offload(model, CPU)
    inputs = marian.inputs() | {"decoder_attention_mask": torch.ones_like(marian.inputs()["decoder_input_ids"])}
    found, wanted = token_contributions(model, [inputs]), token_contributions(whole, [inputs])
    assert_close(found.source, wanted.source, atol=FP32_NOISE, rtol=0)
    labelled = inputs | {"labels": inputs["decoder_input_ids"]}
    found, wanted = (leave_one_out(each, lambda one: mean_loss(one, [labelled])).harm() for each in (model, whole))
    assert_close(list(found.values()), list(wanted.values()), atol=FP32_NOISE, rtol=0)


def test_an_offloaded_decoder_generates(tmp_path):
    model, whole = FAMILIES["marian"].build().eval(), FAMILIES["marian"].build().eval()
    cpu_offload(model, CPU)
    for each in (model, whole):
        swap_to_gated(each)
        swap_to_alpha(each)
        swap_to_collaborative(each, dim_shared_query_key=12)
    inputs = {name: FAMILIES["marian"].inputs()[name] for name in ("input_ids", "attention_mask")}
    written = [each.generate(**inputs, max_length=12, num_beams=2) for each in (model, whole)]
    assert torch.equal(*written)


@pytest.mark.parametrize("spread", (to_memory, to_disk))
def test_heads_come_back_where_nothing_of_a_site_was_left(spread, tmp_path):
    """Qwen3 has no bias behind its heads, and norms of its own, which go with the last head."""
    model, whole = spread(FAMILIES["qwen3"].build(), tmp_path), FAMILIES["qwen3"].build()
    for each in (model, whole):
        prune_heads(each, heads={"dec-self": [[], [0, 1, 2, 3]]})
        fold_heads(each)
    inputs = FAMILIES["qwen3"].inputs()
    with torch.no_grad():
        assert_close(model(**inputs).logits, whole(**inputs).logits, atol=FP32_NOISE, rtol=0)


def test_what_was_on_disk_goes_to_disk_and_what_was_in_memory_is_let_go(tmp_path):
    model = by_device_map(FAMILIES["bert"].build(), tmp_path)
    swap_to_collaborative(model, dim_shared_query_key=12, sites=LAYER_1)
    assert list((tmp_path / "offload").glob(f"{OWN_FILE}*.safetensors"))
    model = to_memory(FAMILIES["bert"].build(), tmp_path)
    held = vars(model.bert.encoder.layer[1].attention.self.query)[HOOK].weights_map.dataset
    name = "bert.encoder.layer.1.attention.self.query.weight"
    assert name in held
    swap_to_collaborative(model, dim_shared_query_key=12, sites=LAYER_1)
    assert name not in held


@pytest.mark.parametrize(
    "put", (lambda place: place.write_text("a file in its place"), lambda place: place.symlink_to("/proc"))
)
def test_an_offload_folder_that_cannot_be_written(put, tmp_path, warnings_logged):
    model = by_device_map(FAMILIES["bert"].build(), tmp_path)
    wanted = FAMILIES["bert"].build()
    (tmp_path / "offload").rmdir()
    put(tmp_path / "offload")
    for each in (model, wanted):
        swap_to_collaborative(each, dim_shared_query_key=12)
    assert "kept in memory" in warnings_logged.text
    assert_close(logits(model), logits(wanted), atol=FP32_NOISE, rtol=0)


def test_half_precision_stays(tmp_path):
    model = to_memory(FAMILIES["bert"].build().to(torch.bfloat16), tmp_path)
    compress(model, batches(), 0.5, refine_steps=2)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    model.save_pretrained(tmp_path / "saved")
    loaded = type(model).from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    assert torch.equal(logits(aligned(loaded)), logits(model))


@pytest.mark.parametrize("spread", SPREADS)
def test_an_error_leaves_it_as_it_was(spread, tmp_path):
    model = SPREADS[spread](FAMILIES["bert"].build(), tmp_path)
    hooks, wanted = hooks_of(model), logits(model)
    before = dict(model.named_parameters())  # a forward pass puts others in the places of those that were away
    with pytest.raises(ArgumentError):
        swap_to_collaborative(model, dim_shared_query_key=10**6)
    now = dict(model.named_parameters())
    assert all(now[name] is parameter for name, parameter in before.items()) and now.keys() == before.keys()
    assert hooks_of(model) == hooks
    assert_close(logits(model), wanted, atol=0, rtol=0)


def hooks_of(model) -> dict[str, int]:
    return {name: id(vars(module)[HOOK]) for name, module in model.named_modules() if HOOK in vars(module)}


def test_a_plan_of_a_model_that_was_changed_since(tmp_path):
    model = by_device_map(FAMILIES["bert"].build(), tmp_path)
    made = plan(model, batches(), refine_steps=0)
    prune_heads(model, heads=SOME_HEADS)
    with pytest.raises(ArgumentError, match="changed since the plan"):
        compress(model, made, 0.5)


def test_hooks_of_another_kind_are_refused():
    model = FAMILIES["bert"].build()
    add_hook_to_module(
        model.bert.encoder.layer[0].attention.self.key, LayerwiseCastingHook(torch.float16, torch.float32, False)
    )
    with pytest.raises(SwapError, match="LayerwiseCastingHook"):
        swap_to_gated(model)


def test_weights_that_come_in_with_a_whole_layer_are_refused():
    model = FAMILIES["bert"].build()
    cpu_offload(model, CPU, preload_module_classes=["BertLayer"])
    wanted = logits(model)
    with pytest.raises(SwapError, match="preload_module_classes"):
        swap_to_gated(model)
    assert_close(logits(model), wanted, atol=0, rtol=0)


def test_only_whole_models_are_trained():
    model, original = changed_pair()
    cpu_offload(original, CPU)
    report = distill(model, original, batches(), steps=2)
    assert report.before.total(1.0) > 0.01
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


def test_weights_on_disk_are_looked_at_too(tmp_path):
    model = FAMILIES["bert"].build()
    with torch.no_grad():
        model.bert.encoder.layer[1].attention.self.key.weight[0, 0] = torch.nan
    model = by_device_map(model, tmp_path)
    with pytest.raises(NonFiniteError, match=r"self\.key\.weight contains NaN"):
        swap_to_gated(model)
    assert model.bert.encoder.layer[1].attention.self.key.weight.is_meta
