"""The loss that keeps heads apart: against cosines taken one token and one pair at a time, and in training loops."""

import json

import pytest
import torch
from changed_heads import loss, output_projections
from heads_by_hand import model_in, outputs_by_hand, sites_with_heads
from model_inputs import cast
from model_sizes import HEADS

from collab_heads import get_adapter, prune_heads, swap_to_alpha, swap_to_gated
from collab_heads.errors import ArgumentError
from collab_heads.training import HeadPenalty
from families import FAMILIES

FP32_NOISE = 1e-6  # float32 sums in another order; seen: 6e-8
NARROW_NOISE = 2e-2  # heads computed in bfloat16, which holds three digits; seen: 2e-3
MEASURED = ("bert", "bert-decoder", "distilbert", "albert", "albert-groups", "marian", "bart", "t5", "t5-encoder")
MEASURED += ("opt", "biogpt", "esm")


def masks_of(model, inputs) -> dict[str, torch.Tensor]:
    """Which tokens are not padding on either side, as `FAMILIES` pads: [B, T] bool."""
    own = inputs["attention_mask"].bool() if "attention_mask" in inputs else None
    if "decoder_input_ids" not in inputs:
        return {"enc-self": own, "dec-self": own, "dec-enc": own}
    decoder = inputs["decoder_input_ids"] != model.config.pad_token_id
    decoder[:, 0] = True
    return {"enc-self": own, "dec-self": decoder, "dec-enc": decoder}


def by_hand(model, inputs, weights, masks=None) -> float:
    """The weight of the role times the mean cosine of all pairs of heads, summed over the calls of all sites."""
    total = 0.0
    outputs = outputs_by_hand(model, inputs)
    for site in sites_with_heads(model):
        for heads in outputs[site.path]:
            found = []
            for row in range(heads.shape[0]):
                for token in range(heads.shape[1]):
                    if masks is None or masks[site.role] is None or masks[site.role][row, token]:
                        each = heads[row, token].double()
                        # nothing that a token could look at makes heads of zero: they are not alike
                        found += [float(a @ b / ((a.norm() * b.norm()) or 1.0)) for a in each for b in each]
            total += weights.get(site.role, 0.0) * sum(found) / len(found)
    return total


def seen(model, penalty, inputs, batch=None) -> torch.Tensor:
    """What the penalty adds for a batch."""
    model(**cast(inputs, model.dtype))
    return penalty.total(batch)


def padded(name) -> dict[str, torch.Tensor]:
    """Inputs of a family; the decoder's have padding where the model pads."""
    inputs = {key: value.clone() for key, value in FAMILIES[name].inputs().items()}
    if "decoder_input_ids" in inputs:
        pad = FAMILIES[name].build().config.pad_token_id
        inputs["decoder_input_ids"][inputs["decoder_input_ids"] == pad] = 5
        inputs["decoder_input_ids"][:, 0] = pad  # a start token that is the padding token counts
        inputs["decoder_input_ids"][1, -2:] = pad
    return inputs


@pytest.mark.parametrize("name", MEASURED)
def test_value_by_hand(name):
    """Padding counts unless the batch is given; every role has its weight; shared modules count in every layer."""
    model, inputs = model_in(name), padded(name)
    weights = {role: 0.5 + index for index, role in enumerate(FAMILIES[name].roles)}
    penalty = HeadPenalty(model, disagreement=weights)
    everything, counted = by_hand(model, inputs, weights), by_hand(model, inputs, weights, masks_of(model, inputs))
    assert abs(everything - counted) > 20 * FP32_NOISE  # or the masks would not be looked at
    assert seen(model, penalty, inputs).item() == pytest.approx(everything, abs=FP32_NOISE)
    assert seen(model, penalty, inputs, inputs).item() == pytest.approx(counted, abs=FP32_NOISE)


def test_images_have_no_padding():
    model, inputs = model_in("vit"), FAMILIES["vit"].inputs()
    penalty = HeadPenalty(model, disagreement=2.0)
    assert seen(model, penalty, inputs, inputs).item() == pytest.approx(
        by_hand(model, inputs, {"enc-self": 2.0}), abs=FP32_NOISE
    )


def test_a_module_that_serves_all_layers_is_heard_in_each():
    model = model_in("albert")
    (outputs,) = outputs_by_hand(model, FAMILIES["albert"].inputs()).values()
    penalty = HeadPenalty(model, disagreement=1.0)
    model(**cast(FAMILIES["albert"].inputs(), model.dtype))
    assert len(penalty.parts["disagreement"].seen) == len(outputs) == model.config.num_hidden_layers > 1


def test_decoders_that_are_given_labels():
    """Their inputs are the labels shifted right: what is -100 there is padding here, one position on."""
    model, inputs = model_in("marian"), padded("marian")
    ids = inputs.pop("decoder_input_ids")
    labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], 2)], dim=1)
    labels[labels == model.config.pad_token_id] = -100
    penalty, weights = HeadPenalty(model, disagreement={"dec-enc": 1.0}), {"dec-enc": 1.0}
    given = {**inputs, "labels": labels}
    counted = by_hand(model, given, weights, masks_of(model, {**inputs, "decoder_input_ids": ids}))
    assert seen(model, penalty, given, given).item() == pytest.approx(counted, abs=FP32_NOISE)
    assert abs(counted - by_hand(model, given, weights)) > 100 * FP32_NOISE


def test_roles_without_a_weight_are_not_listened_to():
    model, inputs = model_in("marian"), FAMILIES["marian"].inputs()
    penalty = HeadPenalty(model, disagreement={"dec-self": 3.0})
    model(**inputs)
    assert {site.role for site, _ in penalty.parts["disagreement"].seen} == {"dec-self"}
    value = penalty.total(inputs).item()
    assert value == pytest.approx(by_hand(model, inputs, {"dec-self": 3.0}, masks_of(model, inputs)), abs=FP32_NOISE)


def test_heads_before_gates_and_alphas_and_those_that_are_left():
    """What changes heads afterwards changes nothing here; a site with a single head, or none, has nothing to say."""
    for change in ("gated", "mixed"):
        model, inputs = model_in("marian", change).eval(), FAMILIES["marian"].inputs()
        options = {"gate_weight": 0.0} if change == "gated" else {}
        penalty = HeadPenalty(model, disagreement={"enc-self": 1.0}, **options)
        hand = by_hand(model, inputs, {"enc-self": 1.0}, masks_of(model, inputs))
        assert seen(model, penalty, inputs, inputs).item() == pytest.approx(hand, abs=FP32_NOISE)
    model, inputs = model_in("bert"), FAMILIES["bert"].inputs()
    prune_heads(model, heads={"enc-self": [[1], [0, 2, 3]]})
    penalty = HeadPenalty(model, disagreement=1.0)
    model(**inputs)
    ((_, heads),) = penalty.parts["disagreement"].seen
    assert heads.shape[-2] == HEADS - 1
    penalty.close()
    prune_heads(model, heads={"enc-self": [[0, 2], []]})
    alone = HeadPenalty(model, disagreement=1.0)
    assert seen(model, alone, inputs, inputs).item() == 0.0  # nothing is left to keep apart


@pytest.mark.parametrize("name", ("bert", "albert", "marian", "t5"))
def test_gradients_reach_queries_keys_and_values(name):
    """Of the last layer, whose heads nothing but the penalty depends on here; W_O of that layer gets none."""
    model, inputs = model_in(name, dtype=torch.float32).train(), FAMILIES[name].inputs()
    role = list(FAMILIES[name].roles)[-1]
    penalty = HeadPenalty(model, disagreement={role: 1.0})
    seen(model, penalty, inputs, inputs).backward()
    site = [site for site in sites_with_heads(model) if site.role == role][-1]
    module, adapter = model.base_model.get_submodule(site.path), get_adapter(model)
    for projection in (*adapter.projections(module), adapter.value_projection(module)):
        assert projection.weight.grad.abs().max() > 1e-6
    if name != "albert":  # its next layer takes what W_O gives
        assert output_projections(model)[site.path].weight.grad is None
    value = seen(model, penalty, inputs, inputs).item()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    assert seen(model, penalty, inputs, inputs).item() < value


def test_a_head_that_is_zero_has_no_direction_and_no_gradient_out_of_bounds():
    """Dropout of attention can take all that a token looks at, such as all of a decoder's first token."""
    model, inputs = model_in("bert", dtype=torch.float32), FAMILIES["bert"].inputs()
    with torch.no_grad():
        value = model.base_model.encoder.layer[0].attention.self.value
        value.weight[:8], value.bias[:8] = 0.0, 0.0
    penalty = HeadPenalty(model, disagreement=1.0)
    model(**inputs)
    (_, heads), _ = penalty.parts["disagreement"].seen
    assert (heads[..., 0, :] == 0).all()
    heads.retain_grad()
    penalty.total(inputs).backward()
    assert heads.grad.isfinite().all()
    assert heads.grad.abs().max() < 100  # float16 ends at 65,504


def test_micro_batches_add_up():
    """Every total is of the forward pass before it: two of them give the gradient of their mean."""
    model, inputs = model_in("bert"), FAMILIES["bert"].inputs()
    penalty = HeadPenalty(model, disagreement=1.0)
    parts = [{name: value[rows] for name, value in inputs.items()} for rows in (slice(0, 1), slice(1, 3))]
    weight = model.base_model.encoder.layer[1].attention.self.query.weight
    alone = []
    for part in parts:
        seen(model, penalty, part, part).backward()
        alone.append(weight.grad.clone())
        weight.grad = None
    for part in parts:
        (seen(model, penalty, part, part) / 2).backward()
    torch.testing.assert_close(weight.grad, (alone[0] + alone[1]) / 2, rtol=0, atol=FP32_NOISE)
    assert (alone[0] - alone[1]).abs().max() > 100 * FP32_NOISE


def test_an_evaluation_in_between_leaves_nothing_behind():
    """Neither heads that are held in memory nor heads that are counted."""
    model, inputs = model_in("bert"), FAMILIES["bert"].inputs()
    penalty = HeadPenalty(model, disagreement=1.0)
    first = seen(model, penalty, inputs, inputs).item()
    with torch.no_grad():
        for _ in range(2):
            model(**inputs)
            assert penalty.parts["disagreement"].seen == []
        assert penalty.total(inputs).item() == 0.0
    assert seen(model, penalty, inputs, inputs).item() == first
    model(**inputs)  # of which nobody asks for the total
    assert seen(model, penalty, inputs, inputs).item() == first
    assert penalty.parts["disagreement"].seen == []


def test_closing_takes_the_hooks_away():
    model, inputs = model_in("marian"), FAMILIES["marian"].inputs()
    modules = [model, *output_projections(model).values()]
    before = [list(module._forward_pre_hooks) for module in modules]
    penalty = HeadPenalty(model, disagreement=1.0)
    assert [list(module._forward_pre_hooks) for module in modules] != before
    model(**inputs)
    penalty.close()
    assert [list(module._forward_pre_hooks) for module in modules] == before
    assert penalty.parts["disagreement"].seen == []
    model(**inputs)
    assert penalty.parts["disagreement"].seen == []


def checkpointed(name, reentrant: bool):
    """A model that throws its activations away, but for what a reentrant checkpoint wants to have a gradient."""
    model = model_in(name, dtype=torch.float32).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    return model


def test_gradient_checkpointing():
    """The kind that is not reentrant gives the same gradients, and holds nothing once it has gone back."""
    inputs, found = FAMILIES["bert"].inputs(), []
    for model in (model_in("bert", dtype=torch.float32).train(), checkpointed("bert", False)):
        penalty = HeadPenalty(model, disagreement=1.0)
        torch.manual_seed(0)  # of dropout
        (loss(model, inputs) + penalty.total(inputs)).backward()
        assert penalty.parts["disagreement"].seen == []
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=0, atol=FP32_NOISE, msg=name)


def test_reentrant_checkpointing_is_refused():
    """It runs without gradients first: there is nothing to listen to, and silence would be a weight of 0."""
    model, inputs = checkpointed("bert", True), FAMILIES["bert"].inputs()
    penalty = HeadPenalty(model, disagreement=1.0)
    model(**inputs)
    with pytest.raises(ArgumentError, match="reentrant gradient checkpointing off"):
        penalty.total(inputs)


def test_a_total_without_a_forward_pass_is_refused():
    model = model_in("bert")
    with pytest.raises(ArgumentError, match="saw no heads with a gradient"):
        HeadPenalty(model, disagreement=1.0).total()
    assert HeadPenalty(model, disagreement=0.0).total().item() == 0.0


def test_frozen_parts():
    """Heads below all that trains count, though nothing moves them; where no head can be moved it is an error."""
    model, inputs = model_in("bert"), FAMILIES["bert"].inputs()
    penalty = HeadPenalty(model, disagreement=1.0)
    expected = seen(model, penalty, inputs).item()
    model.requires_grad_(False)
    model.base_model.encoder.layer[1].requires_grad_(True)
    total = seen(model, penalty, inputs)
    assert total.item() == expected
    total.backward()
    assert model.base_model.encoder.layer[1].attention.self.key.weight.grad.abs().max() > 0
    model.base_model.requires_grad_(False)
    model(**inputs)
    with pytest.raises(ArgumentError, match="saw no heads with a gradient"):
        penalty.total()


@pytest.mark.parametrize("where", ("model", "loop"))
def test_bf16_is_computed_in_float32(where):
    """Heads come in bfloat16; their cosines are float32, inside of autocast too."""
    model, inputs = model_in("bert", dtype=torch.float32), FAMILIES["bert"].inputs()
    penalty = HeadPenalty(model, disagreement=1.0)
    with torch.autocast("cpu", torch.bfloat16):
        model(**inputs)
        own = [heads.clone() for _, heads in penalty.parts["disagreement"].seen]
        total = penalty.total() if where == "loop" else None
    total = penalty.total() if total is None else total
    assert {heads.dtype for heads in own} == {torch.bfloat16}
    assert total.dtype == torch.float32
    cosines = [
        torch.nn.functional.cosine_similarity(h.double()[..., None, :], h.double()[..., None, :, :], -1) for h in own
    ]
    assert total.item() == pytest.approx(sum(each.mean().item() for each in cosines), abs=FP32_NOISE)
    assert total.item() == pytest.approx(by_hand(model, inputs, {"enc-self": 1.0}), abs=NARROW_NOISE)


def test_with_gates_and_alphas():
    """One penalty of three parts: the totals add up, and only gates and alphas have parameters and rates."""
    model, inputs = FAMILIES["marian"].build().train(), FAMILIES["marian"].inputs()
    swap_to_alpha(model)
    swap_to_gated(model)
    options = {"gate_weight": 0.5, "growth": 40.0, "growth_radius": 1e-3}
    without, penalty = HeadPenalty(model, **options), HeadPenalty(model, **options, disagreement=2.0)
    assert list(penalty.parts) == ["alphas", "gates", "disagreement"]
    assert [len(group["params"]) for group in penalty.groups()] == [6, 6]
    assert len(penalty.parameters()) == 12
    assert len(penalty.others(model)) == len(without.others(model))
    weights = dict.fromkeys(FAMILIES["marian"].roles, 2.0)
    model.eval()
    total = seen(model, penalty, inputs, inputs)
    own = by_hand(model, inputs, weights, masks_of(model, inputs))
    assert total.item() == pytest.approx(own + without.total().item(), rel=FP32_NOISE)
    assert penalty.metrics().keys() == without.metrics().keys()
    state = json.loads(json.dumps(penalty.state_dict()))
    assert state["disagreement"] == {"weight": weights}
    penalty.load_state_dict(state)
    with pytest.raises(ArgumentError, match=r"not the state of this penalty: weight"):
        HeadPenalty(model, **options, disagreement=1.0).load_state_dict(state)
    with pytest.raises(ArgumentError, match="it is for alphas, gates, disagreement, not alphas, gates"):
        without.load_state_dict(state)


def test_alphas_in_float64_beside_it():
    """Parts of different dtypes have one total."""
    model, inputs = model_in("bert", "mixed"), FAMILIES["bert"].inputs()
    penalty = HeadPenalty(model, growth=1.0, growth_radius=0.5, disagreement=1.0)
    assert seen(model, penalty, inputs).item() == pytest.approx(
        by_hand(model, inputs, {"enc-self": 1.0}) + 2 * 0.5, abs=1e-5
    )


def test_training_with_it_drives_heads_apart():
    found = {}
    for weight in (0.0, 1.0):
        model, inputs = model_in("bert", dtype=torch.float32), FAMILIES["bert"].inputs()
        penalty = HeadPenalty(model, disagreement=weight)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(10):
            (loss(model, inputs) + penalty.total(inputs)).backward()
            penalty.before_step()
            optimizer.step()
            optimizer.zero_grad()
            penalty.step()
        penalty.close()
        found[weight] = by_hand(model, inputs, {"enc-self": 1.0})
    assert found[1.0] < found[0.0] - 0.1


@pytest.mark.parametrize(
    "weight, message",
    (
        (-1.0, "disagreement -1.0 must be a number, 0 or more"),
        (float("nan"), "disagreement nan must be a number"),
        ({"dec-enc": 1.0}, "unknown role in disagreement 'dec-enc'"),
        ({"enc-self": True}, "disagreement True of enc-self must be a number"),
    ),
)
def test_refused(weight, message):
    model = model_in("bert")
    before = list(model._forward_pre_hooks)
    with pytest.raises(ArgumentError, match=message):
        HeadPenalty(model, disagreement=weight)
    assert list(model._forward_pre_hooks) == before
