"""What gates, alphas, removal and folding refuse to touch: wrapped, quantised, offloaded models, left alone."""

import pytest
import torch
from changed_heads import adapter_sites, changed, gate, output_projections
from model_runs import sites
from torch import nn
from unchanged import assert_unchanged, refused, snapshot

from collab_heads import AttentionAdapter, fold_heads, prune_heads, swap_to_alpha, swap_to_gated
from collab_heads.errors import ModelStateError, UnsupportedModelError
from families import FAMILIES

LAYER_1 = "encoder.layer.1.attention.self"


def remove_one(model):
    prune_heads(model, heads={"enc-self": [[0], [1]]})


def gated():
    model = FAMILIES["bert"].build()
    gate(model, empty=False)
    return model


# Function -> a model that it would change.
CALLS = {
    swap_to_gated: FAMILIES["bert"].build,
    swap_to_alpha: FAMILIES["bert"].build,
    remove_one: FAMILIES["bert"].build,
    prune_heads: gated,
    fold_heads: lambda: changed(FAMILIES["bert"], state="both", empty=False, dtype=torch.float32),
}
each_call = pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)


@each_call
def test_it_would_change_the_model(call):
    model = CALLS[call]()
    before = snapshot(model)
    call(model)
    with pytest.raises(AssertionError):
        assert_unchanged(model, before)


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


def with_lora(model):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"]))


def with_lora_inside(model):
    return with_lora(model).base_model.model


WRAPPERS = {
    nn.DataParallel: ("DataParallel", "model.module"),
    torch.compile: ("OptimizedModule", "before torch.compile"),
    compiled_in_place: ("compiled",),
    with_lora: ("PeftModel", "merge_and_unload"),
    with_lora_inside: ("PEFT adapters", "merge_and_unload"),
    nn.Sequential: ("PreTrainedModel, got Sequential",),
}


@each_call
@pytest.mark.parametrize("wrap", WRAPPERS, ids=lambda wrap: wrap.__name__)
def test_wrapped_models(call, wrap):
    model = wrap(CALLS[call]())
    with refused(model, UnsupportedModelError, *WRAPPERS[wrap]):
        call(model)


class QuantisedLinear(nn.Linear):
    """What bitsandbytes, torchao or an adapter makes of a Linear."""


def quantised_output(model):
    projection = output_projections(model)[LAYER_1]
    projection.__class__ = QuantisedLinear


def quantised(name):
    def spoil(model):
        getattr(sites(model)[LAYER_1], name).__class__ = QuantisedLinear

    spoil.__name__ = f"quantised_{name}"
    return spoil


def on_meta(model):
    output_projections(model)[LAYER_1].to("meta")


def integers(model):
    projection = output_projections(model)[LAYER_1]
    projection.weight = nn.Parameter(projection.weight.to(torch.int8), requires_grad=False)


def own_output_forward(model):
    projection = output_projections(model)[LAYER_1]
    projection.forward = projection.forward


def own_forward(model):
    module = sites(model)[LAYER_1]
    module.forward = module.forward


def unknown_class(model):
    module = sites(model)[LAYER_1]
    module.__class__ = type("OwnAttention", (type(module),), {})


SPOILED = [
    *((swap_to_gated, spoil) for spoil in (quantised_output, on_meta, integers, own_output_forward)),
    *((swap_to_alpha, spoil) for spoil in (quantised_output, on_meta, integers, own_output_forward)),
    *((remove_one, spoil) for spoil in (quantised_output, on_meta, integers, own_output_forward, own_forward)),
    *((remove_one, spoil) for spoil in (*map(quantised, ("query", "key", "value")), unknown_class)),
    *((prune_heads, spoil) for spoil in (own_output_forward, own_forward, quantised("value"), unknown_class)),
    *((fold_heads, spoil) for spoil in (own_output_forward, own_forward, quantised("value"))),
]
MESSAGES = {
    "quantised_output": "QuantisedLinear, not a plain nn.Linear",
    "on_meta": "on the meta device",
    "integers": "torch.int8, not floating point",
    "own_output_forward": "a forward of its own",
    "own_forward": "a forward of its own",
    "unknown_class": "is a OwnAttention, not a class that BertAdapter knows",
}


@pytest.mark.parametrize("call, spoil", SPOILED, ids=[f"{call.__name__}-{spoil.__name__}" for call, spoil in SPOILED])
def test_modules_that_cannot_be_changed(call, spoil):
    model = CALLS[call]()
    spoil(model)
    with refused(
        model, ModelStateError, LAYER_1, MESSAGES.get(spoil.__name__, "QuantisedLinear, not a plain nn.Linear")
    ):
        call(model)


def test_only_the_sites_that_change_are_checked():
    model = FAMILIES["bert"].build()
    own_output_forward(model)
    swap_to_gated(model, sites="encoder.layer.0.attention.self")
    swap_to_alpha(model, sites="encoder.layer.0.attention.self")
    prune_heads(model, heads={"encoder.layer.0.attention.self": [1]})
    assert [site.num_heads for site in adapter_sites(model)] == [3, 4]


@pytest.mark.parametrize("call", (swap_to_gated, swap_to_alpha, remove_one), ids=lambda call: call.__name__)
def test_models_of_other_families(call):
    from transformers import GPTNeoConfig, GPTNeoModel

    model = GPTNeoModel(
        GPTNeoConfig(vocab_size=5, hidden_size=8, num_layers=1, num_heads=2, attention_types=[[["global"], 1]])
    )
    with refused(model, UnsupportedModelError, "'gpt_neo' is not supported", "Supported: "):
        call(model)


def test_an_adapter_that_does_not_know_its_output_projection():
    class Forgetful(AttentionAdapter):
        paths = {r"encoder\.layer\.(\d+)\.attention\.self": "enc-self"}  # noqa: RUF012
        replacements = {type(next(iter(sites(FAMILIES["bert"].build()).values()))): nn.Module}  # noqa: RUF012

    model = FAMILIES["bert"].build()
    for call in (swap_to_gated, swap_to_alpha):
        with pytest.raises(ValueError, match="Forgetful does not say where the output projection"):
            call(model, Forgetful)
