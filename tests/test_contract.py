"""What every family must pass with every kind of query/key projection (design, section 8).

Parametrised over `families.FAMILIES` and `model_sizes.KINDS`: a new family or kind joins by being listed there. Tests
that are marked `core` run by default for every family but siblings (`Family.like`), which run in `make test-slow`.
"""

import copy
import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from model_inputs import batch, cast, cross_batch, repadded
from model_runs import (
    aligned,
    attention_maps,
    is_swapped,
    main_output,
    output,
    pickled,
    set_backend,
    sites,
    swap,
    swapped,
)
from model_sizes import EXACT, EXACT64, FP32_NOISE, HEAD_WIDTH, HEADS, KINDS, NARROW
from opening import layers_of
from slow_cases import slow
from transformers import AutoConfig

import collab_heads
from collab_heads.layers.shared_query_key import ALIGNMENT
from families import FAMILIES, each, is_sibling, make

TESTS = Path(__file__).parent
# The core: siblings join; where a case is dear, each with one of the kinds.
of_every_family = pytest.mark.parametrize("family", FAMILIES, indirect=True)
of_every_pair = pytest.mark.parametrize(
    "family, kind",
    [
        pytest.param(name, kind, marks=[pytest.mark.slow] * (is_sibling(name) and (number + order) % len(KINDS) > 0))
        for number, name in enumerate(FAMILIES)
        for order, kind in enumerate(KINDS)
    ],
    indirect=["family"],
)


def every_site(model):
    return layers_of(model).with_heads


def site_outputs(model, inputs):
    """What every attention site returns in one forward pass: path -> first output of every call."""
    seen, handles = {}, []
    for path, module in sites(model).items():
        seen[path] = []
        handles.append(module.register_forward_hook(lambda m, i, o, path=path: seen[path].append(o[0])))
    output(model, inputs)
    for handle in handles:
        handle.remove()
    return seen


def assert_lossless(family, kind, backend):
    """The swap at full width changes nothing, site by site (errors that compensate would show) and at the end."""
    model = family.build().double()
    set_backend(model, backend)
    inputs = family.inputs()
    before, sites_before = output(model, inputs), site_outputs(model, inputs)
    swap(model, kind)
    assert all(swapped(model))
    sites_after = site_outputs(model, inputs)
    assert sites_before.keys() == sites_after.keys()
    assert sum(map(len, sites_before.values())) == family.num_maps
    tolerance = family.eager64 if backend == "eager" else family.exact64
    for path in sites_before:
        for ours, theirs in zip(sites_after[path], sites_before[path], strict=True):
            torch.testing.assert_close(real(ours, inputs), real(theirs, inputs), rtol=0, atol=tolerance, msg=path)
    torch.testing.assert_close(real(output(model, inputs), inputs), real(before, inputs), rtol=0, atol=tolerance)


@pytest.mark.core
@of_every_family
@pytest.mark.parametrize("backend", ("eager", "sdpa"))
def test_lossless(family, kind, backend):
    assert_lossless(family, kind, backend)


FLEX_NOISE = 4e-5  # flex sums a softmax in blocks; on logits of 3 and more errors of 2.1e-5 were seen


@pytest.mark.slow
def test_flex_equals_eager(family, kind):
    model = family.build()
    if not model._supports_flex_attn:
        pytest.skip("the stock model does not support it")
    swap(model, kind, NARROW[kind])
    set_backend(model, "eager")
    inputs = family.inputs()
    expected = real(output(model, inputs), inputs)
    set_backend(model, "flex_attention")
    torch.testing.assert_close(real(output(model, inputs), inputs), expected, rtol=0, atol=FLEX_NOISE)


def test_backends_agree_when_narrow(family, kind):
    model = family.build().double()
    swap(model, kind, NARROW[kind])
    outputs = []
    for backend in ("eager", "sdpa"):
        set_backend(model, backend)
        outputs.append(real(output(model, family.inputs()), family.inputs()))
    torch.testing.assert_close(*outputs, rtol=0, atol=family.eager64)


def real(result, inputs):
    """Only the rows of real tokens, where there is a row per input token: what padding attends to is undefined."""
    mask = inputs.get("attention_mask")
    return result[mask.bool()] if mask is not None and result.ndim == 3 and result.shape[:2] == mask.shape else result


def test_padding_is_ignored(padded_family, kind):
    model = padded_family.build().double()
    swap(model, kind, NARROW[kind])
    inputs = padded_family.inputs()
    changed = repadded(inputs)
    for name in inputs:
        beside = "input_ids" in inputs and name in ("decoder_input_ids", "pixel_values")  # which the mask is not of
        assert torch.equal(inputs[name], changed[name]) == ("mask" in name or beside)
    before, after = output(model, inputs), output(model, changed)
    torch.testing.assert_close(real(after, inputs), real(before, inputs), rtol=0, atol=padded_family.exact64)


def without_source(inputs):
    """The batch with a first sentence that is nothing but padding: no token of it may attend to anything."""
    names = [name for name in ("attention_mask", "encoder_attention_mask") if name in inputs]
    return inputs | {name: inputs[name].index_fill(0, torch.tensor([0]), 0) for name in names}


def assert_padding_is_stock(family, kind, backend, dtype, tolerance):
    """What padding attends to means nothing, but pooling over all tokens hands it on: it is what stock makes of it."""
    model, inputs = family.build().to(dtype), without_source(family.inputs())
    set_backend(model, backend)
    before, sites_before = output(model, inputs), site_outputs(model, inputs)
    swap(model, kind)
    sites_after = site_outputs(model, inputs)
    close = functools.partial(torch.testing.assert_close, rtol=0, atol=tolerance, equal_nan=family.eager64 > EXACT64)
    for path, stock in sites_before.items():
        for ours, theirs in zip(sites_after[path], stock, strict=True):
            close(ours, theirs, msg=path)
    close(output(model, inputs), before)  # an eager softmax in float32 makes NaN of float64's lowest number


@pytest.mark.parametrize("backend", ("eager", "sdpa"))
def test_padding_is_stock(padded_family, kind, backend):
    assert_padding_is_stock(padded_family, kind, backend, torch.float64, padded_family.eager64)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("bert", "marian"))  # stock T5 cannot run it: its position bias has no batch dimension
def test_padding_is_stock_under_flex(name, kind):
    assert_padding_is_stock(FAMILIES[name], kind, "flex_attention", torch.float32, FP32_NOISE)


def test_report_and_parameters(family, kind):
    model = family.build()
    stock = sum(p.numel() for p in model.parameters())
    report = swap(model, kind, NARROW[kind])
    assert {site.role for site in report.sites} == set(family.roles)
    assert len(report.sites) == family.num_sites
    after = sum(p.numel() for p in model.parameters())
    assert (report.model_parameters_before, report.model_parameters_after) == (stock, after)
    assert after < stock
    for site in report.sites:
        assert 0 < site.relative_error < 1
    assert all(site.path in str(report) for site in report.sites)


def test_attention_maps(family, kind):
    """The right number of maps, whether the recording hooks were installed before the swap or after."""
    inputs = family.inputs()
    models = [family.build(), family.build()]
    for model in models:
        set_backend(model, "eager")
    with torch.no_grad():
        stock = models[0](**inputs, output_attentions=True)
        for model in models:
            swap(model, kind)
            result, maps = model(**inputs, output_attentions=True), 0
            assert result.keys() == stock.keys()
            expected = attention_maps(stock, family.roles)
            for role, found in attention_maps(result, family.roles).items():
                maps += len(found)
                for ours, theirs in zip(found, expected[role], strict=True):
                    torch.testing.assert_close(ours, theirs, rtol=0, atol=FP32_NOISE)
            assert maps == family.num_maps


def prompt(family):
    """What a model is to go on from; that of a lone decoder is padded on the left."""
    inputs = {name: value for name, value in family.inputs().items() if name != "decoder_input_ids"}
    return inputs if "dec-enc" in family.roles else {name: value.flip(1) for name, value in batch().items()}


def to_decode(family):
    """A batch whose decoder is taken step by step."""
    return family.inputs() if "dec-enc" in family.roles else prompt(family)


def encoded(model, inputs):
    """What a decoder gets of the inputs: the states of the encoder, and their mask, if there is one."""
    mask = {"attention_mask": inputs["attention_mask"]} if "attention_mask" in inputs else {}
    return mask | {"encoder_outputs": model.get_encoder()(cast(inputs, model.dtype)[model.main_input_name], **mask)}


def steps_of(model, inputs):
    """What a model is called with at every step of decoding, beside its cache."""
    if "decoder_input_ids" not in inputs:
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        return [{"input_ids": ids[:, i : i + 1], "attention_mask": mask[:, : i + 1]} for i in range(ids.shape[1])]
    encoder = encoded(model, inputs)
    return [encoder | {"decoder_input_ids": step} for step in inputs["decoder_input_ids"].split(1, dim=1)]


def static_cache(model, inputs):
    from transformers.cache_utils import EncoderDecoderCache, StaticCache

    decoder = StaticCache(config=model.config, max_cache_len=12)
    if "decoder_input_ids" not in inputs:
        return decoder
    source = encoded(model, inputs)["encoder_outputs"].last_hidden_state.shape[1]
    return EncoderDecoderCache(decoder, StaticCache(config=model.config, max_cache_len=source))


def stepwise(model, inputs, cache=None):
    """Logits of the decoder, token by token through a cache."""
    logits = []
    for step in steps_of(model, inputs):
        result = model(**step, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        logits.append(result.logits)
    return torch.cat(logits, dim=1), cache


@torch.no_grad()
def test_stepwise_logits(generator_family, kind):
    """Through dynamic and static caches, equal to one uncached pass, and to the original when lossless."""
    model, inputs = generator_family.build().double(), to_decode(generator_family)
    original = output(model, inputs)
    swap(model, kind)
    assert_stepwise(model, inputs, original)


@torch.no_grad()
def test_stepwise_logits_when_narrow(generator_family, kind):
    model, inputs = generator_family.build().double(), to_decode(generator_family)
    swap(model, kind, NARROW[kind])
    assert_stepwise(model, inputs, output(model, inputs))


def caches_of(cache):
    """role -> what is cached for it."""
    if not hasattr(cache, "cross_attention_cache"):
        return {"dec-self": cache}
    return {"dec-self": cache.self_attention_cache, "dec-enc": cache.cross_attention_cache}


def assert_stepwise(model, inputs, expected):
    for cache in (None, static_cache(model, inputs)):
        logits, _ = stepwise(model, inputs, cache)
        torch.testing.assert_close(real(logits, inputs), real(expected, inputs), rtol=0, atol=EXACT64)


@torch.no_grad()
@pytest.mark.parametrize("cross", (False, True))
@pytest.mark.parametrize("name", each(name for name in FAMILIES if name.endswith("-decoder")))
def test_decoder_cache(name, kind, cross):
    """A lone decoder, with cross-attention or without, steps through its cache as it runs in one pass."""
    model = decoder(name, cross)
    swap(model, kind, NARROW[kind])
    assert_decoder_steps(model, cross)


def decoder(name, cross):
    config = FAMILIES[name].build().config
    config.add_cross_attention = cross
    return make(type(FAMILIES[name].build()), config).double()


@torch.no_grad()
def assert_decoder_steps(model, cross):
    inputs = cast(cross_batch(), torch.float64)
    if not cross:
        inputs = {"input_ids": inputs["input_ids"]}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    whole = model(**inputs).logits
    ids, cache, logits = inputs.pop("input_ids"), None, []
    inputs.pop("attention_mask")
    for step in ids.split(1, dim=1):
        result = model(input_ids=step, past_key_values=cache, use_cache=True, **inputs)
        cache = result.past_key_values
        logits.append(result.logits)
    torch.testing.assert_close(torch.cat(logits, dim=1), whole, rtol=0, atol=EXACT64)


GENERATION = {
    "greedy": {"num_beams": 1, "do_sample": False},
    "beams": {"num_beams": 4, "do_sample": False, "length_penalty": 0.8},
    "sampling": {"num_beams": 1, "do_sample": True, "top_k": 0, "temperature": 1.5},
}


@pytest.mark.parametrize("mode", ("beams", *slow("greedy", "sampling")))
def test_generation(generator_family, kind, mode):
    """Token-identical: lossless to the original; cached to uncached; static to dynamic, also when narrow."""
    original, swapped, narrow = (generator_family.build().double() for _ in range(3))
    swap(swapped, kind)
    swap(narrow, kind, NARROW[kind])
    inputs = cast(prompt(generator_family), torch.float64)

    def generate(model, **more):
        torch.manual_seed(0)
        return model.generate(**inputs, **GENERATION[mode], max_new_tokens=10, min_new_tokens=8, **more).tolist()

    expected = generate(original)
    assert len({tuple(row) for row in expected}) > 1
    assert generate(swapped) == expected
    expected = generate(narrow)
    assert generate(narrow, use_cache=False) == expected
    assert generate(narrow, cache_implementation="static") == expected


@torch.no_grad()
@pytest.mark.parametrize("dim", (EXACT, 20, 8))
def test_cache_elements(generator_family, kind, dim):
    """What a cache holds is what the design's formula and the report promise."""
    model, inputs = generator_family.build(), to_decode(generator_family)
    report = swap(model, kind, dim)
    _, cache = stepwise(model, inputs)
    extra, cached = (HEADS if generator_family.biased else 0), every_site(model)[0].site.num_key_heads
    # shared: R + H columns, rounded up; per_head: R / H rounded up to a multiple of 4, per head
    key = -(-(dim + extra) // ALIGNMENT) * ALIGNMENT if kind == "shared" else cached * (-(-dim // HEADS // 4) * 4)
    promised = {site.path: site.cache_after for site in report.sites}
    assert not any(site.cache_before or site.cache_after for site in report.sites if site.role == "enc-self")
    for role, part in caches_of(cache).items():
        paths = [site.path for site in report.sites if site.role == role]
        for path, layer in zip(paths, part.layers, strict=True):
            batch, length = layer.keys.shape[0], layer.keys.shape[-2]
            elements = (layer.keys.numel() + layer.values.numel()) / (batch * length)
            assert elements == promised[path] == key + cached * HEAD_WIDTH


@pytest.mark.core
@of_every_pair
def test_save_and_load(family, kind, tmp_path):
    """Bit-equal, base and task model, from the same files."""
    model = family.build()
    swap(model, kind, NARROW[kind])
    model.save_pretrained(tmp_path)
    loaded = aligned(type(model).from_pretrained(tmp_path).eval())
    assert_same_state(loaded, model)
    assert torch.equal(output(loaded, family.inputs()), output(model, family.inputs()))
    base = family.base.from_pretrained(tmp_path)
    assert_same_state(base.base_model, model.base_model, subset=True)
    base.save_pretrained(tmp_path / "base")
    again = type(model).from_pretrained(tmp_path / "base")
    assert_same_state(again.base_model, model.base_model, subset=True)


def assert_same_state(ours, theirs, subset=False):
    ours, theirs = ours.state_dict(), theirs.state_dict()
    if not subset:
        assert ours.keys() == theirs.keys()
    shared = ours.keys() & theirs.keys()
    assert any("query_key" in name for name in shared)
    assert [name for name in shared if not torch.equal(ours[name], theirs[name])] == []


RELATIVES = {
    "bert": ("BertForMaskedLM",),
    "roberta": ("RobertaForMaskedLM", "RobertaForTokenClassification"),
    "xlm-roberta-decoder": ("XLMRobertaForSequenceClassification",),
    "camembert": ("CamembertForQuestionAnswering",),
    "electra": ("ElectraForPreTraining", "ElectraForMaskedLM"),
    "distilbert": ("DistilBertForMaskedLM",),
    "albert-groups": ("AlbertForPreTraining", "AlbertForMaskedLM"),
    "marian": ("MarianForCausalLM",),
    "bart": ("BartForSequenceClassification", "BartForQuestionAnswering", "BartForCausalLM"),
    "bart-decoder": ("BartForConditionalGeneration",),
    "mbart": ("MBartForSequenceClassification", "MBartForCausalLM"),
    "pegasus": ("PegasusForCausalLM",),
    "gpt2": ("GPT2ForSequenceClassification", "GPT2DoubleHeadsModel", "GPT2ForTokenClassification"),
    "opt": ("OPTForSequenceClassification", "OPTForQuestionAnswering"),
    "biogpt": ("BioGptForSequenceClassification", "BioGptForTokenClassification"),
    "mpnet": ("MPNetForMaskedLM", "MPNetForTokenClassification"),
    "eurobert": ("EuroBertForMaskedLM", "EuroBertForTokenClassification"),
    "granite": ("GraniteModel",),
    "gemma": ("GemmaForSequenceClassification",),
    "esm": ("EsmForMaskedLM", "EsmForTokenClassification"),
    "t5": ("T5EncoderModel", "T5ForSequenceClassification"),
    "mt5": ("MT5EncoderModel", "MT5ForSequenceClassification", "MT5ForTokenClassification"),
    "mt5-encoder": ("MT5ForConditionalGeneration",),
    "vit": ("ViTForMaskedImageModeling",),
    "dinov2": ("Dinov2Backbone",),
    "clip": ("CLIPForImageClassification",),
    "clip-text": ("CLIPTextModelWithProjection",),
    "clip-vision": ("CLIPVisionModelWithProjection",),
    "siglip": ("SiglipForImageClassification",),
    "whisper": ("WhisperForAudioClassification", "WhisperForCausalLM"),
    "wav2vec2": ("Wav2Vec2ForSequenceClassification", "Wav2Vec2ForPreTraining"),
    "hubert": ("HubertForSequenceClassification",),
    "deit": ("DeiTForImageClassificationWithTeacher", "DeiTForMaskedImageModeling"),
}


@pytest.mark.parametrize(
    "name, relative", each((name, cls) for name, many in RELATIVES.items() if name in FAMILIES for cls in many)
)
def test_relatives_load_the_same_files(name, relative, kind, tmp_path):
    """Another class of the family loads what it has of the changed sites, and gives it back, bit by bit."""
    model = FAMILIES[name].build()
    swap(model, kind, NARROW[kind])
    model.save_pretrained(tmp_path)
    other = getattr(transformers, relative).from_pretrained(tmp_path)
    shared = sites(other).keys() & sites(model).keys()
    assert_same_sites(other, model, shared)
    assert type(other)(other.config).config.collab_heads == other.config.collab_heads == model.config.collab_heads
    other.save_pretrained(tmp_path / "other")
    assert_same_sites(type(model).from_pretrained(tmp_path / "other"), model, shared)


def assert_same_sites(ours, theirs, paths):
    assert paths
    for path in paths:
        ours_at, theirs_at = (sites(model)[path].state_dict() for model in (ours, theirs))
        assert is_swapped(sites(ours)[path])
        assert ours_at.keys() == theirs_at.keys()
        assert [name for name in ours_at if not torch.equal(ours_at[name], theirs_at[name])] == []


LOAD_IN_A_FRESH_PROCESS = """
import sys, torch, collab_heads, transformers
torch.set_num_threads(1)
folder, model_class = sys.argv[1:]
model = getattr(transformers, model_class).from_pretrained(folder).eval()
for tensor in (*model.parameters(), *model.buffers()):
    tensor.data = tensor.data.clone()  # model_runs.aligned
inputs = torch.load(folder + "/inputs.pt")
with torch.no_grad():
    result = model(**inputs)
names = ("logits", "logits_per_text", "last_hidden_state")
torch.save(next(result[name] for name in names if name in result), folder + "/output.pt")
"""


@pytest.mark.slow
def test_load_in_a_fresh_process(family, kind, tmp_path):
    model, inputs = family.build(), family.inputs()
    swap(model, kind, NARROW[kind])
    model.save_pretrained(tmp_path)
    torch.save(inputs, tmp_path / "inputs.pt")
    run = [sys.executable, "-c", LOAD_IN_A_FRESH_PROCESS, str(tmp_path), type(model).__name__]
    subprocess.run(run, check=True, capture_output=True)
    assert torch.equal(torch.load(tmp_path / "output.pt"), output(model, inputs))


def test_bfloat16_sharded(family, kind, tmp_path):
    model = family.build().to(torch.bfloat16)
    swap(model, kind, NARROW[kind])
    assert {p.dtype for module in sites(model).values() for p in module.query_key.parameters()} == {torch.bfloat16}
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    assert_same_state(loaded, model)
    assert torch.isfinite(output(loaded, family.inputs())).all()


@pytest.mark.core
@of_every_pair
def test_from_config(family, kind, tmp_path):
    """A fresh model of the same shape: finite, differently initialised, nothing left uninitialised."""
    model = family.build()
    swap(model, kind, NARROW[kind])
    model.save_pretrained(tmp_path)
    torch.manual_seed(5)
    fresh = type(model)(AutoConfig.from_pretrained(tmp_path)).eval()
    assert fresh.state_dict().keys() == model.state_dict().keys()
    for name, tensor in fresh.state_dict().items():
        assert torch.isfinite(tensor).all(), name
        assert tensor.shape == model.state_dict()[name].shape
    assert torch.isfinite(output(fresh, family.inputs())).all()


@pytest.mark.core
@of_every_pair
def test_gradients(family, kind):
    """New parameters receive gradients and nothing else changes."""
    model, before = family.build(), family.build().state_dict()
    swap(model, kind, NARROW[kind])
    model.train()
    result = model(**family.inputs())
    main_output(result).square().mean().backward()
    for module in sites(model).values():
        for name, parameter in module.query_key.named_parameters():
            assert parameter.requires_grad
            assert parameter.grad.abs().sum() > 0, name
    values = [f".{path.rsplit('.')[-1]}.value." for path in sites(model)]  # taken out of a fused projection
    kept = [name for name in model.state_dict() if "query_key" not in name]
    assert all(any(value in name for value in values) for name in set(kept) - set(before))
    assert [name for name in kept if name in before and not torch.equal(model.state_dict()[name], before[name])] == []
    for ours, theirs in zip(every_site(model), every_site(family.build()), strict=True):
        for part, tensor in theirs.value.named_parameters():
            assert torch.equal(getattr(ours.value, part), tensor), (ours.path, part)


def test_frozen_stays_frozen(family, kind):
    model = family.build().train()
    model.requires_grad_(False)
    swap(model, kind)
    assert model.training
    assert not any(p.requires_grad for p in model.parameters())


def test_dropout_in_training_only(family, kind):
    model, inputs = family.build(), family.inputs()
    swap(model, kind)
    without_dropout(model)
    outputs = []
    for dropped in (False, True):
        for module in sites(model).values():
            names = ("attention_dropout", "attn_dropout", "dropout")
            attribute = next(name for name in names if hasattr(module, name))
            if isinstance(getattr(module, attribute), torch.nn.Dropout):
                getattr(module, attribute).p = 0.5 * dropped
            else:
                setattr(module, attribute, 0.5 * dropped)
            module.train()
        torch.manual_seed(0)
        outputs.append(output(model, inputs))
    model.eval()
    torch.testing.assert_close(output(model, inputs), outputs[0], rtol=0, atol=FP32_NOISE)
    assert (outputs[0] - outputs[1]).abs().max() > 1e-3


def without_dropout(model):
    """Set every dropout to zero, whether the stock class holds it as a module or as a number."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for attribute in ("dropout", "attention_dropout"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)


def test_training_is_the_stock_one(family, kind):
    """With one seed the same numbers are dropped: no dropout was lost, added or moved."""
    model, inputs = family.build().double(), family.inputs()
    set_backend(model, "eager")
    model.train()
    outputs = []
    for _ in range(2):
        torch.manual_seed(0)
        outputs.append(output(model, inputs))
        if len(outputs) == 1:
            swap(model, kind)
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=family.eager64)
    assert not torch.allclose(outputs[0], output(model.eval(), inputs))


def test_gradient_checkpointing(family, kind):
    if not family.build().supports_gradient_checkpointing:
        pytest.skip("the stock model does not support it")
    grads = []
    for checkpointed in (False, True):
        model = family.build().double()
        swap(model, kind, NARROW[kind])
        without_dropout(model)  # so that both runs compute the same
        if checkpointed:
            model.gradient_checkpointing_enable()
        model.train()
        result = model(**cast(family.inputs(), torch.float64))
        main_output(result).square().mean().backward()
        grads.append([p.grad for module in sites(model).values() for p in module.query_key.parameters()])
    for plain, checkpointed in zip(*grads, strict=True):
        torch.testing.assert_close(checkpointed, plain, rtol=1e-9, atol=EXACT64)


def test_deepcopy_and_pickle(family, kind):
    model = family.build()
    swap(model, kind, NARROW[kind])
    expected = output(model, family.inputs())
    assert torch.equal(output(copy.deepcopy(model), family.inputs()), expected)
    assert torch.equal(output(pickled(model), family.inputs()), expected)


def test_hooks_survive(family, kind):
    model, calls = family.build(), []
    for module in sites(model).values():
        module.register_forward_hook(lambda *_: calls.append(1))
    swap(model, kind)
    output(model, family.inputs())
    assert len(calls) == family.num_maps


def test_second_swap_is_refused(family, kind):
    model = family.build()
    swap(model, kind, NARROW[kind])
    before, config = output(model, family.inputs()), model.config.to_dict()
    with pytest.raises(collab_heads.CollabHeadsError, match="collaborative already"):
        swap(model, kind, 8)
    assert torch.equal(output(model, family.inputs()), before)
    assert model.config.to_dict() == config


def test_role_by_role_equals_at_once(family, kind):
    """Every order of swapping roles gives one config and one output."""
    at_once = family.build()
    swap(at_once, kind, NARROW[kind])
    expected = output(at_once, family.inputs())
    for roles in (list(family.roles), list(family.roles)[::-1]):
        model = family.build()
        for role in roles:
            swap(model, kind, NARROW[kind], sites=role)
        assert model.config.collab_heads == at_once.config.collab_heads
        assert torch.equal(output(model, family.inputs()), expected)


@pytest.mark.slow
def test_compiles_to_one_graph(family, kind):
    model, inputs = family.build(), family.inputs()
    swap(model, kind, NARROW[kind])
    expected = output(model, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(output(compiled, inputs), expected, rtol=0, atol=FP32_NOISE)


@pytest.mark.slow
@torch.no_grad()
def test_compiled_decoding_with_static_cache(generator_family, kind):
    model, inputs = generator_family.build(), to_decode(generator_family)
    swap(model, kind, NARROW[kind])
    expected, cache = output(model, inputs), static_cache(model, inputs)
    torch._dynamo.reset()
    compiled, logits = torch.compile(model, fullgraph=True, backend="aot_eager"), []
    for index, step in enumerate(steps_of(model, inputs)):
        decode = compiled if index else model  # the first step fills the cross-attention cache
        logits.append(decode(**step, past_key_values=cache, use_cache=True).logits)
    found = torch.cat(logits, dim=1)
    torch.testing.assert_close(real(found, inputs), real(expected, inputs), rtol=0, atol=FP32_NOISE)
