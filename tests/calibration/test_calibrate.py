"""Calibration sees real tokens only, and leaves the model as it was, whatever happens."""

import pytest
import torch
from model_inputs import batch, cast
from model_runs import swap
from model_sizes import VOCABULARY, WIDTH
from opening import layers_of
from transformers import BatchEncoding
from unchanged import assert_unchanged, refused, snapshot

import collab_heads
from collab_heads.calibration.input_moments import InputMoments, listening
from collab_heads.errors import CalibrationError, NonFiniteError
from collab_heads.running.batches import check_batches, run_batches
from families import FAMILIES, LAYOUTS

EXACT64 = 1e-11  # float64 sums in another order; differences seen: 7e-15
FP32_NORMS = 2e-5  # relative: T5's norms compute in float32 whatever the model's dtype, so other sums round otherwise


def measure(model, batches, paths=None):
    """path -> (query-side, key-side) moments of every site, or of those named."""
    masks, sites = {}, layers_of(model).with_heads
    with listening([site for site in sites if paths is None or site.path in paths], masks) as listeners:
        run_batches(model, batches, masks, "calibrating")
    return {listener.site.path: listener.moments() for listener in listeners}


@torch.no_grad()
def naive(model, sentences):
    """The same from unpadded sentences, captured one by one: path -> two lists of [tokens, D]."""
    adapter = collab_heads.get_adapter(model)
    seen, handles = {}, []
    for site in adapter.sites(model):
        seen[site.path] = ([], [])
        for tokens, projection in zip(
            seen[site.path], adapter.projections(model.base_model.get_submodule(site.path)), strict=True
        ):
            handles.append(
                projection.register_forward_pre_hook(lambda _, inputs, tokens=tokens: tokens.append(inputs[0][0]))
            )
    for sentence in sentences:
        model(**sentence)
    for handle in handles:
        handle.remove()
    return seen


def assert_moments(moments: InputMoments, sequences, exact=EXACT64):
    tokens = torch.cat(sequences)
    centred = torch.cat([sequence - sequence.mean(0) for sequence in sequences])
    mean = tokens.mean(0)
    assert moments.count == len(tokens)
    for ours, expected in (
        (moments.second(), torch.einsum("ni,nj->ij", tokens, tokens) / len(tokens)),
        (moments.centred(), torch.einsum("ni,nj->ij", centred, centred) / len(tokens)),
        (moments.augmented()[:-1, :-1], moments.second()),
        (moments.augmented()[:-1, -1], mean),
        (moments.augmented()[-1, :-1], mean),
        (moments.augmented()[-1, -1], torch.tensor(1.0).double()),
    ):
        limit = exact * max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(ours, expected, rtol=0, atol=limit)


def assert_measured(model, batches, sentences):
    expected = naive(model, sentences)
    for path, sides in measure(model, batches).items():
        for moments, sequences in zip(sides, expected.pop(path), strict=True):
            assert_moments(moments, sequences, FP32_NORMS if model.config.model_type in ("t5", "mt5") else EXACT64)
    assert not expected


def sentence(inputs, index, length, **more):
    """One unpadded sentence out of `batch`."""
    return {"input_ids": inputs["input_ids"][index : index + 1, :length], **more}


LENGTHS = (9, 5, 7)  # of the sentences in `batch`


@pytest.mark.parametrize("name", ("bert", "t5-encoder"))
def test_encoder_padding_does_not_count(name):
    model, inputs = FAMILIES[name].build().double(), batch()
    alone = [sentence(inputs, index, length) for index, length in enumerate(LENGTHS)]
    assert_measured(model, [inputs], alone)
    assert_measured(model, [inputs, BatchEncoding(alone[1])], [*alone, alone[1]])
    without_mask = {"input_ids": inputs["input_ids"]}
    assert_measured(model, [without_mask], [sentence(inputs, index, 9) for index in range(3)])


@torch.no_grad()
@pytest.mark.parametrize("name", ("deberta-v2", "deberta-v2-far"))
def test_positions_that_a_projection_reads_are_no_tokens(name):
    """A query and a key projection that take the tokens, then positions."""
    model, inputs = FAMILIES[name].build().double(), batch()
    found, states = measure(model, [inputs]), model(**inputs, output_hidden_states=True).hidden_states
    for sides, rows in zip(found.values(), states[:-1], strict=True):
        for moments in sides:
            assert_moments(moments, [row[:length] for row, length in zip(rows, LENGTHS, strict=True)])


# What a decoder is fed, per sentence, after the start token.
TARGETS = ([4, 5, 6, 7, 2], [8, 9, 2], [10, 2])


def decoder_inputs(model):
    """Every way to give decoder inputs, padded; and those inputs without padding."""
    pad, start = model.config.pad_token_id, model.config.decoder_start_token_id
    assert pad == start
    length = max(map(len, TARGETS))
    rows = [[start, *target] for target in TARGETS]
    ids = torch.tensor([row + [pad] * (length + 1 - len(row)) for row in rows])
    labels = {
        fill: torch.tensor([target + [fill] * (length - len(target)) for target in TARGETS]) for fill in (-100, pad)
    }
    # explicit masks may disagree with the ids: they win
    mask = torch.ones_like(ids)
    mask[0, 4:], mask[1, 2:] = 0, 0
    return {
        "decoder_input_ids": ({"decoder_input_ids": ids}, rows),
        # shifted right, so that the last token of the longest target is not fed
        "labels": ({"labels": labels[-100]}, [row[:length] for row in rows]),
        "labels padded": ({"labels": labels[pad]}, [row[:length] for row in rows]),
        "mask": (
            {"decoder_input_ids": ids, "decoder_attention_mask": mask},
            [
                row + [pad] * (kept - len(row)) if kept > len(row) else row[:kept]
                for row, kept in zip(rows, (4, 2, 6), strict=True)
            ],
        ),
    }


@pytest.mark.parametrize("name", ("marian", "t5"))
@pytest.mark.parametrize("way", ("decoder_input_ids", "labels", "labels padded", "mask"))
def test_decoder_padding_does_not_count(name, way):
    """In the decoder, and in cross-attention: queries by the decoder's mask, keys by the encoder's."""
    model, inputs = FAMILIES[name].build().double(), batch()
    given, rows = decoder_inputs(model)[way]
    alone = [
        sentence(inputs, index, length, decoder_input_ids=torch.tensor(rows[index : index + 1]))
        for index, length in enumerate(LENGTHS)
    ]
    assert_measured(model, [{**inputs, **given}], alone)
    counts = {role: set() for role in FAMILIES[name].roles}
    adapter = collab_heads.get_adapter(model)
    moments = measure(model, [{**inputs, **given}])
    for site in adapter.sites(model):
        counts[site.role].add(tuple(side.count for side in moments[site.path]))
    fed = sum(map(len, rows))
    assert counts == {"enc-self": {(21, 21)}, "dec-self": {(fed, fed)}, "dec-enc": {(fed, 21)}}


@pytest.mark.parametrize("name", ("bert-decoder", "marian-decoder"))
def test_lone_decoder(name):
    """Queries by attention_mask, cross-attention keys by encoder_attention_mask."""
    model, inputs = FAMILIES[name].build().double(), cast(FAMILIES[name].inputs(), torch.float64)
    inputs = {**inputs, **batch()}  # right-padded, so that positions are those of unpadded sentences
    states, lengths = inputs["encoder_hidden_states"], (4, 7, 7)
    alone = [
        sentence(inputs, index, LENGTHS[index], encoder_hidden_states=states[index : index + 1, :length])
        for index, length in enumerate(lengths)
    ]
    assert inputs["encoder_attention_mask"].sum(1).tolist() == list(lengths)
    assert_measured(model, [inputs], alone)
    without_mask = {name: value for name, value in inputs.items() if name != "encoder_attention_mask"}
    for index in range(3):
        alone[index]["encoder_hidden_states"] = states[index : index + 1]
    assert_measured(model, [without_mask], alone)


def test_half_precision_is_summed_in_float64():
    model = FAMILIES["bert"].build().to(torch.bfloat16)
    moments = next(iter(measure(model, [batch()]).values()))[0]
    assert moments.second().dtype == torch.float64
    torch.testing.assert_close(moments.second(), moments.second().mT, rtol=EXACT64, atol=EXACT64)


def mixed_modes(model):
    """A model in training mode with a part that its owner keeps in evaluation mode."""
    model.train()
    next(model.base_model.children()).eval()
    assert len({module.training for module in model.modules()}) == 2
    return model


@pytest.mark.parametrize("name", LAYOUTS)
def test_model_is_left_as_it_was(name):
    model, inputs = mixed_modes(FAMILIES[name].build()), FAMILIES[name].inputs()
    before, during = snapshot(model), []
    handle = model.register_forward_pre_hook(lambda *_: during.append((model.training, torch.is_grad_enabled())))
    measure(model, [inputs])
    handle.remove()
    assert during == [(False, False)]
    assert torch.is_grad_enabled()
    assert_unchanged(model, before)


BAD_IDS = {"input_ids": torch.full((1, 3), VOCABULARY)}


@pytest.mark.parametrize(
    "calibration, fragments",
    (
        (3, ("int", "iterable of input dicts")),
        (True, ("bool", "iterable of input dicts")),
        (batch(), ("dict", "iterable of input dicts")),
        (BatchEncoding(batch()), ("BatchEncoding", "iterable of input dicts")),
        ("sentences", ("str", "iterable of input dicts")),
        ([], ("empty", "32 to 512")),
        ((each for each in ()), ("empty", "32 to 512")),
        (["a sentence"], ("batch 0", "str", "dict")),
        ([batch(), batch()["input_ids"]], ("batch 1", "Tensor", "dict")),
        ([batch(), None], ("batch 1", "NoneType", "dict")),
        ([batch(), {"pixels": torch.zeros(1)}], ("BertForSequenceClassification", "batch 1", "pixels")),
        ([batch(), batch(), BAD_IDS], ("BertForSequenceClassification", "batch 2", "input_ids")),
        ([batch(), {}], ("BertForSequenceClassification", "batch 1")),
        (
            [{"input_ids": torch.ones(2, 3).long(), "attention_mask": torch.ones(2, 3, 3).long()}],
            ("attention.self", "(6, 3)", "(2, 3,", "shape (batch, tokens)"),
        ),
        ([{**batch(), "attention_mask": torch.zeros(3, 9).long()}], ("encoder.layer.0.attention.self", "no tokens")),
    ),
    ids=lambda value: value[0] if isinstance(value, tuple) else type(value).__name__,
)
@pytest.mark.parametrize("refine_steps", (0, 2))
def test_bad_calibration_is_refused(calibration, fragments, refine_steps):
    model = mixed_modes(FAMILIES["bert"].build())
    with refused(model, CalibrationError, *fragments):
        swap(model, "shared", 20, batches=calibration, refine_steps=refine_steps)


def test_a_generator_is_read_once():
    expected, model = (FAMILIES["bert"].build() for _ in range(2))
    swap(expected, "shared", 20, batches=[batch(), batch()], refine_steps=2)
    swap(model, "shared", 20, batches=(batch() for _ in range(2)), refine_steps=2)
    assert_states_equal(model, expected)
    assert len(check_batches(batch() for _ in range(2))) == 2


def assert_states_equal(ours, theirs):
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[name]), name


@pytest.mark.parametrize("name", ("bert", "marian", "t5"))
def test_non_finite_inputs_name_the_site(name):
    model, inputs = mixed_modes(FAMILIES[name].build()), FAMILIES[name].inputs()
    first = collab_heads.get_adapter(model).sites(model)[0].path
    model.get_input_embeddings().weight.data[inputs["input_ids"][0, 0], 3] = float("nan")
    with refused(model, NonFiniteError, first, "NaN or inf"):
        swap(model, "shared", 20, batches=[inputs])


def test_non_finite_padding_does_not_matter():
    """Only tokens that count are looked at, and only they are summed."""
    model, inputs = FAMILIES["bert-decoder"].build(), FAMILIES["bert-decoder"].inputs()
    expected = measure(model, [inputs])
    inputs["encoder_hidden_states"][inputs["encoder_attention_mask"] == 0] = float("inf")
    path = "encoder.layer.0.crossattention.self"
    found = measure(model, [inputs], [path])
    assert torch.equal(found[path][1].second(), expected[path][1].second())
    assert found[path][1].second().shape == (WIDTH, WIDTH)


@pytest.mark.parametrize("name", ("marian", "t5"))
def test_decoder_inputs_that_are_missing(name):
    model = mixed_modes(FAMILIES[name].build())
    with refused(model, CalibrationError, type(model).__name__, "batch 0", "attention_mask", "input_ids"):
        swap(model, "shared", 20, batches=[batch()])


def test_sites_that_saw_nothing():
    model = mixed_modes(FAMILIES["bert-decoder"].build())
    with refused(model, CalibrationError, "crossattention", "saw no tokens", "sites="):
        swap(model, "shared", 20, batches=[batch()])
    swap(model, "shared", 20, batches=[batch()], sites="dec-self", refine_steps=2)
