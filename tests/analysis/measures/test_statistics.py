"""Head statistics: what is measured, by hand; what is left as it was; what is refused."""

import gc
import weakref

import pytest
import torch
from changed_heads import adapter_sites, emptied
from heads_by_hand import (
    EOS,
    FAR,
    LENGTHS,
    MEASURED,
    STEPS,
    assert_alike,
    backends,
    by_hand,
    ended,
    far,
    layers_of,
    measure,
    model_in,
    sites_with_heads,
)
from model_runs import set_backend
from model_sizes import EXACT64, FP32_NOISE, HEADS, WIDTH
from unchanged import assert_unchanged, refused, snapshot

import collab_heads
from collab_heads.analysis import head_statistics
from collab_heads.analysis.measures.results import MEASURES
from collab_heads.errors import ArgumentError, CalibrationError, NonFiniteError, UnsupportedModelError
from families import FAMILIES

DECODERS = ("qwen3", "gemma3", "gpt2")  # with keys that heads share, with windows, with fused projections
CHANGED = ("bert", "albert", "marian", "t5")
STATES = ("shared", "per_head", "gated", "mixed", "pruned", "pruned shared")
BF16_NOISE = 5e-2  # of bfloat16 models against float32 ones; seen: 1.6e-2


@pytest.mark.parametrize(
    "name, change",
    [(n, "stock") for n in MEASURED + DECODERS]
    + [("qwen3", "pruned")]
    + [(n, change) for n in CHANGED for change in STATES],
)
def test_it_is_the_mean_over_query_tokens(name, change):
    """Two batches of unequal size, padded, with ends of sentences; one token at a time by hand."""
    model, (inputs, counts) = model_in(name, change), ended(name)
    parts = slice(0, 2), slice(2, 3)
    batches, masks = (
        [{key: value[part] for key, value in each.items()} for part in parts] for each in (inputs, counts)
    )
    set_backend(model, "eager")  # outputs too are compared on one backend
    expected = by_hand(model, batches, masks)
    found = measure(model, batches)
    assert_alike(found, expected)
    sites = sites_with_heads(model)
    assert found.sites == tuple(sites) and found.measures == MEASURES and found.excluded == (EOS,)
    for site in sites:
        side = "encoder" if site.role == "enc-self" else "decoder"
        assert found.tokens[site.path] == int(counts[side].sum()) * len(layers_of(model, site))
        heads = site.num_heads
        measures = [name for name in MEASURES if name != "first_token" or site.role != "dec-enc"]
        shapes = [tuple(getattr(found, measure)[site.path].shape) for measure in measures]
        assert shapes == [(heads,)] * (len(measures) - 2) + [(heads, heads)] * 2
        for measure_name in measures:
            tensor = getattr(found, measure_name)[site.path]
            assert tensor.dtype == torch.float64 and tensor.device.type == "cpu" and not tensor.requires_grad
    if change.startswith("pruned"):
        gone = emptied(model_in(name))
        assert len(found.sites) == FAMILIES[name].num_sites - len(gone) and not gone & found.tokens.keys()
    assert found.alphas.keys() == ({site.path for site in sites} if change == "mixed" else set())


def test_alphas_are_those_of_the_model():
    model, (inputs, _) = model_in("marian", "mixed"), ended("marian")
    found = measure(model, [inputs])
    for site in sites_with_heads(model):
        alpha = collab_heads.get_adapter(model).output_projection(model, site).mixing.alpha
        assert torch.equal(found.alphas[site.path], alpha.detach()) and not torch.equal(
            alpha, torch.eye(HEADS).double()
        )


@pytest.mark.parametrize("name", ("bert", "marian", "albert"))
def test_tokens_weigh_alike_whatever_batch_they_are_in(name):
    """Batches of any size give what one batch gives, and not the mean of the batches' means."""
    model, (inputs, _) = model_in(name), ended(name)
    parts = [{key: value[i:j] for key, value in inputs.items()} for i, j in ((0, 1), (1, 3))]
    whole, split, apart = measure(model, [inputs]), measure(model, parts), [measure(model, [part]) for part in parts]
    assert_alike(split, whole)
    path = whole.sites[0].path
    for measured in MEASURES:
        mean = sum(getattr(each, measured)[path] for each in apart) / 2
        assert float((mean - getattr(whole, measured)[path]).abs().max()) > FAR
        assert far(apart[0], whole, path, measured)  # nor that of the first batch, or the last
        assert far(apart[1], whole, path, measured)


@pytest.mark.parametrize(
    "measures", (("l2",), ("cosine",), ("l2", "cosine"), "l2", ("confidence",), ("l2", "entropy"), "attention_distance")
)
def test_only_what_is_asked_for_is_computed(measures):
    """Without measures of attention weights the model keeps its backend."""
    model, (inputs, _) = model_in("t5"), ended("t5")
    whole, used = measure(model, [inputs]), []
    decoder = model.get_decoder()
    handle = decoder.register_forward_hook(lambda *_: used.append({*backends(model).values()}))
    found = measure(model, [inputs], measures=measures)
    handle.remove()
    asked = {measures} if isinstance(measures, str) else set(measures)
    assert used == [{"eager" if asked - {"l2", "cosine"} else "sdpa"}]
    assert set(found.measures) == asked and found.tokens == whole.tokens
    for name in MEASURES:
        assert getattr(found, name).keys() == (getattr(whole, name).keys() if name in asked else set())
        for path, value in getattr(found, name).items():
            torch.testing.assert_close(value, getattr(whole, name)[path], rtol=0, atol=FP32_NOISE)
    assert ("confidence" in str(found)) == ("confidence" in asked)


@pytest.mark.parametrize("name", ("bert", "albert", "marian", "t5"))
def test_the_model_is_left_as_it_was(name):
    model, (inputs, _) = model_in(name, dtype=torch.float32).train(), ended(name)
    model.base_model.eval()
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 2 == 0)
    before, own, state = snapshot(model), backends(model), torch.get_rng_state()
    first, second = (measure(model, [inputs]) for _ in range(2))
    assert first == second  # dropout is off
    assert torch.is_grad_enabled()
    assert_unchanged(model, before)
    assert backends(model) == own and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ("bert", "t5"))
@pytest.mark.parametrize("bad", ({"input_ids": torch.full((2, 3), 10**6)}, "a sentence", None))
def test_an_error_leaves_the_model_as_it_was(name, bad):
    model, (inputs, _) = model_in(name, dtype=torch.float32).train(), ended(name)
    own, state = backends(model), torch.get_rng_state()

    def stream():
        yield inputs
        if bad is None:
            raise KeyError("of the caller's")
        yield bad

    if bad is None:
        before = snapshot(model)
        with pytest.raises(KeyError, match="of the caller's"):
            head_statistics(model, stream(), exclude=[])
        assert_unchanged(model, before)
    else:
        with refused(model, CalibrationError, "batch 1"):
            head_statistics(model, stream(), exclude=[])
    assert backends(model) == own and torch.equal(torch.get_rng_state(), state)


def test_one_forward_pass_per_batch_and_nothing_kept():
    """A generator is read as it goes: no batch and no tensor of an earlier one is alive when the next is asked for."""
    model, (inputs, _) = model_in("bert"), ended("bert")
    passes, seen, alive, batches = [], [], [], []

    def keep(module, args, output):
        seen.extend(weakref.ref(each) for each in (*args, *output))

    handles = [model.register_forward_hook(lambda *_: passes.append(len(seen)))]
    handles += [model.base_model.get_submodule(s.path).register_forward_hook(keep) for s in adapter_sites(model)]

    def stream():
        for _ in range(4):
            gc.collect()
            alive.append((len(passes), *(sum(each() is not None for each in refs) for refs in (seen, batches))))
            batch = {key: value.clone() for key, value in inputs.items()}
            batches.append(weakref.ref(batch["input_ids"]))
            yield batch
            del batch

    found = head_statistics(model, stream(), exclude=[EOS])
    for handle in handles:
        handle.remove()
    assert len(passes) == 4 and len(seen) == 4 * 2 * 3
    assert alive == [(0, 0, 0), (1, 0, 1), (2, 0, 1), (3, 0, 1)]  # passes, tensors, batches: the last one
    assert_alike(found, measure(model, [inputs] * 4))


@pytest.mark.parametrize("change", ("stock", "shared", "pruned"))
def test_backends_agree(change):
    model, (inputs, _) = model_in("marian", change), ended("marian")
    found = measure(model, [inputs], measures=("cosine", "l2"))
    set_backend(model, "eager")
    eager = measure(model, [inputs])
    for name in ("cosine", "l2"):
        for path, value in getattr(eager, name).items():
            torch.testing.assert_close(getattr(found, name)[path], value, rtol=0, atol=EXACT64)


def test_half_precision_is_summed_in_double():
    model, (inputs, _) = model_in("bert", dtype=torch.bfloat16), ended("bert")
    expected = measure(model_in("bert", dtype=torch.float32), [inputs])
    found = measure(model, [inputs] * 3)
    assert_alike(found, measure(model, [inputs]))
    for path, value in expected.confidence.items():
        torch.testing.assert_close(found.confidence[path], value, rtol=0, atol=BF16_NOISE)


def test_heads_that_are_alike_and_apart():
    """Heads made equal have cosine 1 and distance 0; an opposite one -1; a zero one 0."""
    model, (inputs, _) = model_in("bert"), ended("bert")
    path = adapter_sites(model)[0].path
    module = model.base_model.get_submodule(path)
    with torch.no_grad():
        for linear in (module.query, module.key, module.value):
            for part in (linear.weight, linear.bias):
                rows = part.unflatten(0, (HEADS, -1))
                rows[1:] = rows[0]
        for part in (module.value.weight, module.value.bias):
            part.unflatten(0, (HEADS, -1))[2] *= -1.0
            part.unflatten(0, (HEADS, -1))[3] = 0.0
    found = measure(model, [inputs])
    signs = torch.tensor([1.0, 1.0, -1.0, 0.0]).double()
    torch.testing.assert_close(found.cosine[path], signs.outer(signs), rtol=0, atol=EXACT64)
    norm = float(found.l2[path][0, 3])
    expected = norm * (signs[:, None] - signs).abs()
    torch.testing.assert_close(found.l2[path], expected, rtol=EXACT64, atol=EXACT64)
    assert norm > FAR and found.l2[path][0, 1] == pytest.approx(0.0, abs=EXACT64)
    torch.testing.assert_close(found.distance(path), expected.sum(1) / 3, rtol=EXACT64, atol=EXACT64)
    confidence = found.confidence[path]
    torch.testing.assert_close(confidence, confidence[:1].expand(HEADS), rtol=0, atol=EXACT64)


def test_confidence_of_weights_that_are_known():
    """Uniform attention: one over the number of keys that the query sees, of each sentence and of a causal decoder."""
    model, (inputs, _) = model_in("marian"), ended("marian")
    for site in adapter_sites(model):
        query = model.base_model.get_submodule(site.path).q_proj
        query.weight.data.zero_()
        query.bias.data.zero_()
    found = measure(model, [inputs])
    rows = range(3)
    encoder = sum((LENGTHS[r] - 1) / LENGTHS[r] for r in rows) / (sum(LENGTHS) - 3)
    causal = sum(1 / (step + 1) for r in rows for step in range(STEPS[r])) / sum(STEPS)
    cross = sum(STEPS[r] / LENGTHS[r] for r in rows) / sum(STEPS)
    expected = {"enc-self": encoder, "dec-self": causal, "dec-enc": cross}
    for site in found.sites:
        value = torch.full((HEADS,), expected[site.role], dtype=torch.float64)
        torch.testing.assert_close(found.confidence[site.path], value, rtol=0, atol=EXACT64)


def test_a_model_without_heads_has_nothing_to_measure():
    model, (inputs, _) = model_in("bert"), ended("bert")
    collab_heads.prune_heads(model, heads={"enc-self": [list(range(HEADS))] * 2})
    found = measure(model, [inputs])
    assert found.sites == () and found.confidence == {} and str(found)


def test_bad_batches_are_refused():
    model, (inputs, _) = model_in("bert"), ended("bert")
    first = adapter_sites(model)[0].path
    for batches, *fragments in (
        ([], "empty"),
        ((each for each in ()), "empty"),
        (inputs, "expected an iterable"),
        ("text", "expected an iterable"),
        ([inputs, ["text"]], "batch 1", "list"),
        ([inputs, {"pixels": torch.zeros(1)}], "BertForSequenceClassification", "batch 1", "pixels"),
        ([{**inputs, "attention_mask": torch.zeros(3, 9).long()}], first, "no query token that counts", "[2]"),
        ([{"input_ids": torch.full((2, 3), EOS)}], first, "no query token that counts"),
        (
            [{"inputs_embeds": torch.zeros(2, 3, WIDTH).double(), "attention_mask": torch.ones(2, 3, 3)}],
            first,
            "(6, 3)",
        ),
    ):
        with refused(model, CalibrationError, *fragments):
            head_statistics(model, batches, exclude=[EOS])
    empty = {"input_ids": torch.full((2, 3), EOS)}
    assert_alike(measure(model, [inputs, empty]), measure(model, [inputs]))  # one such batch among others adds nothing


def test_bad_arguments_are_refused():
    model, (inputs, _) = model_in("bert"), ended("bert")
    for options, *fragments in (
        ({"measures": ("confidense",)}, "'confidense'", "did you mean 'confidence'"),
        ({"measures": ()}, "measures is empty", "confidence, entropy, attention_distance, first_token, cosine, l2"),
        ({"exclude": [None]}, "[None]", "sep_token_id"),
        ({"exclude": "[SEP]"}, "[SEP]", "token ids"),
        ({"exclude": [True]}, "[True]"),
    ):
        with refused(model, ArgumentError, *fragments):
            head_statistics(model, [inputs], **options)
    with pytest.raises(UnsupportedModelError, match="DataParallel"):
        head_statistics(torch.nn.DataParallel(model), [inputs])


@pytest.mark.parametrize("measures", (MEASURES, ("l2",)))
def test_weights_that_are_nan_are_named(measures):
    model, (inputs, _) = model_in("bert"), ended("bert")
    path = adapter_sites(model)[1].path
    module = model.base_model.get_submodule(path)
    module.value.weight.data[0, 0] = module.query.weight.data[0, 0] = float("nan")
    with refused(model, NonFiniteError, path, measures[0], "NaN or inf"):
        head_statistics(model, [inputs], measures=measures, exclude=[])


def test_the_table_and_the_numbers():
    model, (inputs, _) = model_in("bert"), ended("bert")
    found = measure(model, [inputs])
    lines = str(found).split("\n")
    assert lines[0].split() == [
        "site",
        "role",
        "heads",
        "tokens",
        *"confidence entropy attention distance first token cosine l2".split(),
    ]
    path = found.sites[0].path
    apart = ~torch.eye(HEADS, dtype=torch.bool)
    values = found.confidence[path]
    cells = []
    for each in (values, found.entropy[path], found.attention_distance[path], found.first_token[path]):
        mean, least, most = (f"{float(number):.3f}" for number in (each.mean(), each.min(), each.max()))
        cells += [mean, f"({least}", "to", f"{most})"]
    cells += [f"{float(each[path][apart].mean()):.3f}" for each in (found.cosine, found.l2)]
    assert lines[2].split() == [path, "enc-self", "4", "18", *cells]
    assert "without the token ids 2" in lines[-1]
    numbers = found.to_dict()
    assert numbers["confidence"][path] == values.tolist() and numbers["l2"][path] == found.l2[path].tolist()
    assert numbers["tokens"] == {site.path: 18 for site in found.sites}
    assert numbers["sites"][1] == found.sites[1].to_dict()
