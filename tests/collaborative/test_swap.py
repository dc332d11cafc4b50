"""What users pass to the swap, and every refusal: a clear message, and an untouched model."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from model_configs import bert_config
from model_runs import is_swapped, sites, swap, swapped
from model_sizes import EXACT, HEAD_WIDTH, HEADS, KINDS
from torch import nn
from transformers import BertModel, GPTNeoConfig, GPTNeoModel, LlamaConfig, LlamaModel
from unchanged import assert_unchanged, refused, snapshot

from collab_heads import swap_to_collaborative
from collab_heads.adapters.bert import BertAdapter
from collab_heads.adapters.marian import MarianAdapter
from collab_heads.errors import ArgumentError, ModelStateError, NonFiniteError, UnsupportedModelError
from collab_heads.fitting.fit import SiteFit
from families import FAMILIES, make

LAYER_0, LAYER_1 = "encoder.layer.0.attention.self", "encoder.layer.1.attention.self"


def bert():
    return FAMILIES["bert"].build()


def widths(model):
    """path -> width, of the swapped sites."""
    return {path: module.query_key.state.dim for path, module in sites(model).items() if is_swapped(module)}


@pytest.mark.parametrize(
    "asked, width",
    (
        (1, 1),
        (12, 12),
        (EXACT, EXACT),
        (np.int64(12), 12),
        (0.5, 16),
        (np.float32(0.25), 8),
        (1.0, EXACT),
        (0.001, 1),
        (None, EXACT),
        ({"enc-self": 12}, 12),
        ({"enc-self": 0.5}, 16),
        ({"enc-self": None}, EXACT),
    ),
    ids=str,
)
def test_widths(asked, width):
    model = bert()
    report = swap_to_collaborative(model, BertAdapter, asked)
    assert widths(model) == {LAYER_0: width, LAYER_1: width}
    assert [(site.dim, site.dim_asked, site.dim_exact) for site in report.sites] == [(width, width, EXACT)] * 2
    for module in sites(model).values():
        assert module.query_key.shared_query.weight.shape == module.query_key.shared_key.weight.shape == (width, EXACT)
        assert module.query_key.mixing.shape == (HEADS, width)


def test_a_dict_swaps_only_what_it_names():
    model = bert()
    before = model.state_dict()
    report = swap(model, "shared", {LAYER_1: 12})
    assert widths(model) == {LAYER_1: 12}
    assert [site.path for site in report.sites] == [LAYER_1]
    assert list(model.config.collab_heads["sites"]) == [LAYER_1]
    for name, tensor in model.state_dict().items():
        assert ".query_key." in name or torch.equal(tensor, before[name])


def test_a_path_outranks_its_role():
    for asked in ({LAYER_0: 8, "enc-self": 12}, {"enc-self": 12, LAYER_0: 8}):
        model = bert()
        swap(model, "shared", asked)
        assert widths(model) == {LAYER_0: 8, LAYER_1: 12}


def test_roles_have_their_own_widths():
    model = FAMILIES["marian"].build()
    swap(model, "shared", {"enc-self": 8, "dec-enc": 0.5})
    assert set(widths(model).values()) == {8, 16}
    assert {path.split(".")[-1] for path, width in widths(model).items() if width == 16} == {"encoder_attn"}
    assert not any(path.startswith("decoder") and path.endswith("self_attn") for path in widths(model))


@pytest.mark.parametrize("chosen", ("enc-self", ["enc-self"], [LAYER_0, LAYER_1], {LAYER_1: 0, LAYER_0: 0}, (LAYER_0,)))
def test_sites(chosen):
    model = bert()
    swap(model, "shared", 12, sites=chosen)
    assert list(widths(model)) == ([LAYER_0] if chosen == (LAYER_0,) else [LAYER_0, LAYER_1])


def test_sites_and_a_dict():
    model = bert()
    swap(model, "shared", {"enc-self": 12}, sites=LAYER_1)
    assert widths(model) == {LAYER_1: 12}


@pytest.mark.parametrize(
    "asked, width, note", ((1, 16, "1 to 16"), (0.25, 16, "8 to 16"), (17, 32, "17 to 32"), (16, 16, None))
)
def test_per_head_widths_are_multiples_of_four(asked, width, note):
    model = bert()
    report = swap(model, "per_head", asked)
    assert widths(model) == {LAYER_0: width, LAYER_1: width}
    text = str(report)
    assert ("multiples of 4" in text) == (note is not None)
    assert note is None or note in text


def test_rounding_stops_at_the_head_width():
    model = make(BertModel, bert_config())
    for layer in model.encoder.layer:  # heads of width 6, which is not a multiple of 4
        attention = layer.attention.self
        for name in ("query", "key"):
            setattr(attention, name, nn.Linear(EXACT, HEADS * 6))
    report = swap(model, "per_head", 20)
    assert {site.dim for site in report.sites} == {HEADS * 6}


def test_report_says_when_the_cache_grows():
    assert "cache more" in str(swap(FAMILIES["marian"].build(), "shared"))
    assert "cache more" not in str(swap(FAMILIES["marian"].build(), "shared", 8))
    assert "cache more" not in str(swap(FAMILIES["t5"].build(), "shared"))


@pytest.mark.parametrize("calibrated", (False, True))
def test_report_is_ready_for_json(kind, calibrated):
    family = FAMILIES["marian"]
    more = {"batches": [family.inputs()], "refine_steps": 2} if calibrated else {}
    report = swap(family.build(), kind, np.int64(16), **more)
    found = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert [site["path"] for site in found["sites"]] == [site.path for site in report.sites]
    assert found["model_parameters_after"] < found["model_parameters_before"]
    assert found["calibrated"] == calibrated
    assert (found["sites"][0]["output_error"] is None) != calibrated
    assert ("no calibration" in str(report)) != calibrated
    lines = str(report).splitlines()
    assert all(site.path in line for site, line in zip(report.sites, lines[2:], strict=False))


def test_config_is_ready_for_json(kind):
    model = bert()
    swap(model, kind, np.int64(16))
    assert json.loads(model.config.to_json_string())["collab_heads"] == model.config.collab_heads


@pytest.mark.parametrize("query, key", ((True, True), (True, False), (False, True), (False, False)))
def test_new_parameters_take_requires_grad(kind, query, key):
    model = bert()
    frozen = model.bert.encoder.layer[0].attention.self
    frozen.query.requires_grad_(query)
    frozen.key.requires_grad_(key)
    swap(model, kind, 16)
    first, second = sites(model).values()
    assert {parameter.requires_grad for parameter in first.query_key.parameters()} == {query or key}
    assert {parameter.requires_grad for parameter in second.query_key.parameters()} == {True}


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32, torch.float64))
@pytest.mark.parametrize("dim", (None, 16))
def test_dtype_is_kept(kind, dtype, dim):
    model = bert().to(dtype)
    swap(model, kind, dim)
    assert {tensor.dtype for tensor in model.parameters()} == {dtype}
    assert all(torch.isfinite(tensor).all() for tensor in model.parameters())
    if dim is None:
        stock = bert().to(dtype).bert.encoder.layer[0].attention.self
        assert torch.equal(model.bert.encoder.layer[0].attention.self.query_key.shared_key.weight, stock.key.weight)


def test_training_modes_are_kept(kind):
    model = bert().train()
    model.bert.encoder.layer[0].eval()
    swap(model, kind, 16)
    modes = [
        [module.training, *(part.training for part in module.query_key.modules())] for module in sites(model).values()
    ]
    assert [set(each) for each in modes] == [{False}, {True}]


@pytest.mark.parametrize("adapter", (BertAdapter, BertAdapter()), ids=("class", "instance"))
def test_adapter_may_be_a_class_or_an_instance(adapter):
    expected, model = bert(), bert()
    swap_to_collaborative(expected, dim_shared_query_key=12)
    swap_to_collaborative(model, adapter, 12)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected.state_dict()[name])


def test_seeded_parafac():
    pytest.importorskip("tensorly")
    errors = [swap(bert(), "shared", 12, method="parafac", seed=seed).sites[0].relative_error for seed in (0, 0, 1)]
    assert errors[0] == errors[1] != errors[2]


def test_global_random_state_is_left_alone(kind):
    model = bert()
    calibration = [FAMILIES["bert"].inputs()]
    before = torch.get_rng_state()
    swap(model, kind, 16, batches=calibration, refine_steps=2)
    assert torch.equal(torch.get_rng_state(), before)


REFUSED_ARGUMENTS = {
    "width 0": ({"dim_shared_query_key": 0}, "0", "1 to 32"),
    "negative width": ({"dim_shared_query_key": -4}, "-4", "1 to 32"),
    "width above exact": ({"dim_shared_query_key": 33}, "33", "1 to 32", LAYER_0),
    "numpy width above exact": ({"dim_shared_query_key": np.int32(33)}, "33", "1 to 32"),
    "bool": ({"dim_shared_query_key": True}, "True", "an int"),
    "numpy bool": ({"dim_shared_query_key": np.bool_(True)}, "True", "an int"),
    "share 0": ({"dim_shared_query_key": 0.0}, "0.0", "share", "(0, 1]"),
    "negative share": ({"dim_shared_query_key": -0.5}, "-0.5", "(0, 1]"),
    "share above 1": ({"dim_shared_query_key": 1.5}, "1.5", "for a width pass an int"),
    "width as float": ({"dim_shared_query_key": 16.0}, "16.0", "for a width pass an int"),
    "share nan": ({"dim_shared_query_key": float("nan")}, "nan", "(0, 1]"),
    "share inf": ({"dim_shared_query_key": float("inf")}, "inf", "(0, 1]"),
    "str": ({"dim_shared_query_key": "16"}, "'16'", "an int"),
    "list": ({"dim_shared_query_key": [16, 16]}, "[16, 16]", "a dict"),
    "complex": ({"dim_shared_query_key": 3j}, "3j", "an int"),
    "empty dict": ({"dim_shared_query_key": {}}, "empty dict", "roles or paths"),
    "dict with a bad width": ({"dim_shared_query_key": {"enc-self": 16, LAYER_1: 40}}, "40", LAYER_1, "1 to 32"),
    "nested dict": ({"dim_shared_query_key": {"enc-self": {LAYER_0: 4}}}, LAYER_0, "an int"),
    "unknown role": ({"dim_shared_query_key": {"encself": 16}}, "'encself'", "did you mean 'enc-self'"),
    "misspelt path": ({"dim_shared_query_key": {LAYER_1[:-1]: 16}}, LAYER_1[:-1], f"did you mean '{LAYER_1}'"),
    "key that is not a name": ({"dim_shared_query_key": {0: 16}}, "0 is neither", "enc-self", LAYER_0),
    "role that the model lacks": ({"dim_shared_query_key": {"dec-enc": 16}}, "no dec-enc", "enc-self"),
    "dict against sites": ({"dim_shared_query_key": {LAYER_0: 16}, "sites": LAYER_1}, LAYER_0, "sites="),
    "large seed": ({"seed": 2**70}, "seed must be a whole number from 0 to 4294967295", "1180591620717411303424"),
    "method": ({"method": "alss"}, "'alss'", "did you mean 'als'", "parafac"),
    "method None": ({"method": None}, "None", "als, parafac"),
    "method for per_head": ({"method": "parafac", "kind": "per_head"}, "'parafac'", "per_head"),
    "mixing": ({"kind": "per-head"}, "'per-head'", "did you mean 'per_head'", "shared"),
    "mixing of another type": ({"kind": ["shared"]}, "['shared']", "shared, per_head"),
    "sites empty": ({"sites": []}, "empty", "None for all"),
    "sites misspelt": ({"sites": "enc_self"}, "'enc_self'", "did you mean 'enc-self'"),
    "sites lacking": ({"sites": ["enc-self", "dec-self"]}, "no dec-self", "enc-self"),
    "sites number": ({"sites": 3}, "3"),
    "sites of numbers": ({"sites": [0]}, "0 is neither", LAYER_0),
    "tol negative": ({"tol": -1e-6}, "-1e-06", "0 to 1"),
    "tol 1": ({"tol": 1.0}, "1.0", "0 to 1"),
    "tol nan": ({"tol": float("nan")}, "nan", "0 to 1"),
    "tol bool": ({"tol": False}, "False", "0 to 1"),
    "tol str": ({"tol": "1e-6"}, "'1e-6'", "0 to 1"),
    "tol None": ({"tol": None}, "None", "0 to 1"),
    "refine_steps negative": ({"refine_steps": -1}, "-1", "0 or more"),
    "refine_steps bool": ({"refine_steps": True}, "True", "0 or more"),
    "refine_steps float": ({"refine_steps": 1.5}, "1.5", "0 or more"),
    "refine_steps None": ({"refine_steps": None}, "None", "0 or more"),
    "adapter name": ({"adapter": "bert"}, "'bert'", "AttentionAdapter class or instance"),
    "adapter of another kind": ({"adapter": nn.Linear}, "Linear", "AttentionAdapter class or instance"),
    "seed": (
        {"seed": "x", "dim_shared_query_key": 16, "batches": [FAMILIES["bert"].inputs()], "refine_steps": 1},
        "'x'",
    ),
}


@pytest.mark.parametrize("case", REFUSED_ARGUMENTS)
def test_refused_arguments(case):
    arguments, *fragments = REFUSED_ARGUMENTS[case]
    model = bert().train()
    with refused(model, ArgumentError, *fragments):
        swap_to_collaborative(model, **arguments)


def test_adapter_of_another_family():
    model = bert()
    with refused(model, UnsupportedModelError, "MarianAdapter", "BertForSequenceClassification", "'bert'", "marian"):
        swap_to_collaborative(model, MarianAdapter)


def spoilt(value, name, layer=1):
    def spoil(model):
        getattr(model.bert.encoder.layer[layer].attention.self, name).weight.data[0, 0] = value

    return spoil


def bias_nan(model):
    model.bert.encoder.layer[0].attention.self.query.bias.data[3] = float("nan")


@pytest.mark.parametrize(
    "spoil, fragments",
    (
        (spoilt(float("nan"), "query"), (LAYER_1, "query")),
        (spoilt(float("inf"), "key"), (LAYER_1, "key")),
        (spoilt(float("-inf"), "value", 0), (LAYER_0, "value")),
        (bias_nan, (LAYER_0, "query.bias")),
    ),
)
def test_weights_that_are_not_finite(kind, spoil, fragments):
    model = bert()
    spoil(model)
    with refused(model, NonFiniteError, *fragments, "NaN or inf"):
        swap(model, kind, 16)


def instance_forward(model):
    module = model.bert.encoder.layer[1].attention.self
    module.forward = module.forward


class QuantisedLinear(nn.Linear):
    pass


def other_linear(name):
    def spoil(model):
        setattr(model.bert.encoder.layer[1].attention.self, name, QuantisedLinear(EXACT, EXACT))

    return spoil


def integer_weights(model):
    key = model.bert.encoder.layer[1].attention.self.key
    key.weight = nn.Parameter(key.weight.data.to(torch.int8), requires_grad=False)


def meta(model):
    model.to("meta")


def custom_class(model):
    module = model.bert.encoder.layer[1].attention.self
    module.__class__ = type("FlashBertSelfAttention", (type(module),), {})


@pytest.mark.parametrize(
    "spoil, fragments",
    (
        (lambda model: swap(model, "shared", 12), (LAYER_0, "collaborative already", "load the original", "sites=")),
        (lambda model: swap(model, "per_head", sites=LAYER_1), (LAYER_1, "collaborative already", "sites=")),
        (instance_forward, (LAYER_1, "forward of its own", "del module.forward", "remove_hook_from_module")),
        (other_linear("query"), (LAYER_1, "QuantisedLinear", "plain nn.Linear", "before quantising")),
        (other_linear("value"), (LAYER_1, "QuantisedLinear", "plain nn.Linear", "before quantising")),
        (integer_weights, (LAYER_1, "torch.int8", "floating point")),
        (meta, (LAYER_0, "meta device", "load the checkpoint")),
        (custom_class, (LAYER_1, "FlashBertSelfAttention", "BertSelfAttention", "BertAdapter")),
    ),
)
def test_models_in_a_state_that_does_not_allow_it(kind, spoil, fragments):
    model = bert()
    spoil(model)
    with refused(model, ModelStateError, *fragments):
        swap(model, kind, 16)


def test_a_spoilt_site_can_be_left_out():
    model = bert()
    instance_forward(model)
    swap(model, "shared", 12, sites=LAYER_0)
    assert widths(model) == {LAYER_0: 12}


def wrapper(name):
    """A wrapper as other packages make them: known by its class name only."""

    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    return type(name, (Wrapper,), {})


def subclass(name):
    """Wrap a model as FSDP2 does: its class gets another base."""

    def wrap(model):
        model.__class__ = type("FSDP" + type(model).__name__, (type(name, (), {}), type(model)), {})
        return model

    return wrap


def compiled_in_place(model):
    model.compile()
    return model


def with_adapters(model):
    model.peft_config = {"default": SimpleNamespace()}
    model.base_model.encoder.layer[0].lora = type("LoraLayer", (nn.Module,), {"__module__": "peft.tuners.lora.layer"})()
    return model


@pytest.mark.parametrize(
    "wrap, fragments",
    (
        (nn.DataParallel, ("DataParallel", "model.module")),
        (torch.compile, ("OptimizedModule", "model._orig_mod")),
        (compiled_in_place, ("compiled", "before model.compile()")),
        (wrapper("PeftModel"), ("PeftModel", "merge_and_unload()")),
        (type("PeftModelForCausalLM", (wrapper("PeftModel"),), {}), ("PeftModel", "merge_and_unload()")),
        (with_adapters, ("PEFT", "merge_and_unload()")),
        (wrapper("DistributedDataParallel"), ("DistributedDataParallel", "model.module", "every rank")),
        (wrapper("FullyShardedDataParallel"), ("FullyShardedDataParallel", "before sharding")),
        (subclass("FSDPModule"), ("FSDPModule", "before sharding")),
        (wrapper("DeepSpeedEngine"), ("DeepSpeedEngine", "before deepspeed.initialize")),
        (wrapper("SentenceTransformer"), ("SentenceTransformer", "model[0].auto_model")),
    ),
)
def test_wrapped_models(wrap, fragments):
    model = bert()
    wrapped = wrap(model)
    with refused(model, UnsupportedModelError, *fragments):
        swap_to_collaborative(wrapped, dim_shared_query_key=16)


def test_adapters_that_were_unloaded_are_none():
    """PEFT 0.18 leaves its config behind."""
    model = bert()
    model.peft_config = {"default": SimpleNamespace()}
    swap_to_collaborative(model, dim_shared_query_key=16)
    assert all(swapped(model))


def neo_config() -> GPTNeoConfig:
    return GPTNeoConfig(vocab_size=7, hidden_size=8, num_layers=1, num_heads=2, attention_types=[[["global"], 1]])


TINY = {"vocab_size": 7, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    "build, fragments",
    (
        (lambda: GPTNeoModel(neo_config()), ("'gpt_neo'", "Supported: albert, ")),
        (
            lambda: LlamaModel(LlamaConfig(**TINY, intermediate_size=8)),
            ("LlamaAdapter", "rotary positions", "dim_value="),
        ),
        (lambda: nn.Linear(2, 2), ("PreTrainedModel", "Linear")),
    ),
)
def test_unsupported_models(build, fragments):
    model = build()
    with refused(model, UnsupportedModelError, *fragments):
        swap_to_collaborative(model)


@pytest.mark.parametrize("model", (None, "bert-base-uncased", {"model": 1}, BertModel, bert_config()), ids=repr)
def test_not_a_model_at_all(model):
    with pytest.raises(UnsupportedModelError, match=f"PreTrainedModel, got {type(model).__name__}"):
        swap_to_collaborative(model)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_in_the_last_site_leaves_the_first_as_it_was(kind, monkeypatch):
    """Plan first, then mutate."""
    model, stock, calls = bert(), SiteFit.projection, []

    def fail_at_last(*args):
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError
        return stock(*args)

    monkeypatch.setattr(SiteFit, "projection", fail_at_last)
    before = snapshot(model)
    with pytest.raises(MemoryError):
        swap(model, kind, HEAD_WIDTH * 2)
    assert_unchanged(model, before)
