"""Source and target contributions: what they are, by another computation; whose tokens; what is refused."""

import json

import pytest
import torch
from heads_by_hand import CHANGES, EOS, LENGTHS, STEPS, ended, model_in, single
from model_configs import marian_config
from model_inputs import cast
from model_sizes import EXACT64
from relevance_by_hand import FP32_NORMS, labelled
from torch import nn
from transformers import BartModel
from transformers.modeling_outputs import BaseModelOutput
from unchanged import assert_unchanged, refused, snapshot

from collab_heads import prune_heads
from collab_heads.analysis import token_contributions
from collab_heads.analysis.relevance.backward import conservative, explaining
from collab_heads.errors import CalibrationError, NonFiniteError, UnsupportedModelError
from families import FAMILIES, make

TRANSLATORS = tuple(name for name, family in FAMILIES.items() if family.generates and "dec-enc" in family.roles)
FAR = 1e-3


def contributions(model, batches, **options):
    return token_contributions(model, [cast(each, model.dtype) for each in batches], **{"exclude": [EOS], **options})


def by_hand(model, inputs) -> list[list[float]]:
    """T5, whose tokens enter as embeddings: sentence by sentence, position by position, from embeddings of its own."""
    shares = []
    for row, (length, steps) in enumerate(zip(LENGTHS, STEPS, strict=True)):
        ids, targets = inputs["input_ids"][row, :length], inputs["decoder_input_ids"][row, :steps]
        shares.append([])
        for step in range(steps):
            with explaining(model):
                source, target = (
                    model.shared(each)[None].detach().requires_grad_() for each in (ids, targets[: step + 1])
                )
                with conservative(model):
                    logits = model(inputs_embeds=source, decoder_inputs_embeds=target).logits
                gradients = torch.autograd.grad(logits[0, -1].max(), [source, target])
            sizes = [
                sum(abs(float(token @ slope)) for token, slope in zip(state[0].detach(), gradient[0], strict=True))
                for state, gradient in zip((source, target), gradients, strict=True)
            ]
            shares[-1].append(sizes[0] / sum(sizes))
    return shares


def test_it_is_the_share_of_the_source_at_every_position():
    model, (inputs, _) = model_in("t5"), ended("t5")
    expected, found = by_hand(model, inputs), contributions(model, [inputs])
    assert found.counts.tolist() == [sum(steps > position for steps in STEPS) for position in range(max(STEPS))]
    for row, shares in zip(found.rows("source"), expected, strict=True):
        assert row.tolist() == pytest.approx(shares, abs=FP32_NORMS)
    for position, share in enumerate(found.source.tolist()):
        shares = [row[position] for row in expected if len(row) > position]
        assert share == pytest.approx(sum(shares) / len(shares), abs=FP32_NORMS)
    every = [share for row in expected for share in row]
    assert found.mean == pytest.approx(sum(every) / len(every), abs=FP32_NORMS)
    assert max(every) - min(every) > 0.1


@pytest.mark.parametrize("name", ("marian", "t5"))
def test_sentences_count_alike_in_whatever_batch(name):
    """One padded batch, two of unequal size and length, one by one without padding; labels or what they shift to."""
    model, inputs = model_in(name), labelled(name)
    whole = contributions(model, [inputs])
    singles = [single(inputs, row, LENGTHS[row], STEPS[row]) for row in range(3)]
    parts = [{key: value[part] for key, value in inputs.items()} for part in (slice(1, 3), slice(0, 1))]
    tolerance = FP32_NORMS if name == "t5" else EXACT64
    for batches in (parts, singles, singles[::-1], [ended(name)[0]]):
        found = contributions(model, batches)
        torch.testing.assert_close(found.source, whole.source, rtol=0, atol=tolerance)
        assert found.counts.tolist() == whole.counts.tolist()
        assert sorted(map(len, found.rows("source"))) == sorted(STEPS)
    assert whole.counts.tolist() == [3, 3, 3, 2, 2, 1]


@pytest.mark.parametrize("name", TRANSLATORS)
def test_every_translator(name):
    model, inputs = FAMILIES[name].build(), FAMILIES[name].inputs()
    found = token_contributions(model, [inputs], exclude=[])
    assert ((found.source > 0) & (found.source < 1)).all() and found.counts.tolist() == [3] * 6


@pytest.mark.parametrize("change", [change for change in CHANGES if change != "stock"])
def test_changed_models(change):
    model, inputs = model_in("marian", change), labelled("marian")
    found = contributions(model, [inputs])
    assert ((found.source >= 0) & (found.source < 1)).all() and found.counts.tolist() == [3, 3, 3, 2, 2, 1]


def test_a_decoder_that_does_not_look_at_the_source_gets_nothing_from_it():
    model, inputs = model_in("marian"), labelled("marian")
    prune_heads(model, heads={"dec-enc": [[0, 1, 2, 3], [1, 2, 3]]})
    assert contributions(model, [inputs]).mean > FAR
    prune_heads(model, heads={"dec-enc": [[], [0]]})
    assert contributions(model, [inputs]).mean == 0


def test_a_models_own_translation():
    model, inputs = FAMILIES["marian"].build(), labelled("marian")
    del inputs["labels"]
    ids = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    found = token_contributions(model, [{**inputs, "decoder_input_ids": ids[:, :-1]}])
    assert list(map(len, found.rows("source"))) == [
        1 + int(((row[1:] != 1) & (row[1:] != EOS)).sum()) for row in ids[:, :-1]
    ]


def test_the_model_is_left_as_it_was():
    model, inputs = model_in("marian", dtype=torch.float32).train(), labelled("marian")
    expected = token_contributions(model_in("marian", dtype=torch.float32), [inputs])
    model.model.encoder.eval().requires_grad_(False)
    before = snapshot(model)
    with torch.no_grad():
        assert token_contributions(model, [inputs]) == expected
        with pytest.raises(CalibrationError, match="batch 1"):
            token_contributions(model, [inputs, {"input_ids": inputs["input_ids"], "nonsense": 1}])
    assert_unchanged(model, before)


def test_what_it_refuses():
    model, inputs = FAMILIES["marian"].build(), labelled("marian")
    for name in ("bert", "marian-decoder", "bert-decoder", "t5-encoder"):
        other = FAMILIES[name].build()
        with refused(other, UnsupportedModelError, f"{type(other).__name__} is not an encoder-decoder"):
            token_contributions(other, [inputs])
    with pytest.raises(UnsupportedModelError, match="DataParallel"):
        token_contributions(nn.DataParallel(model), [inputs])
    with refused(model, CalibrationError, "empty"):
        token_contributions(model, [])
    states = BaseModelOutput(last_hidden_state=torch.zeros(3, 9, 32))
    with refused(model, CalibrationError, "the stack of the source was not run"):
        token_contributions(model, [{"encoder_outputs": states, "labels": inputs["labels"]}])
    with refused(model, CalibrationError, "no position counted"):
        token_contributions(model, [{**inputs, "labels": torch.full((3, 6), -100)}], exclude=[1, EOS])
    model.model.encoder.layers[0].fc1.weight.data[0, 0] = float("nan")
    with refused(model, NonFiniteError, "MarianMTModel says is NaN or inf"):
        token_contributions(model, [inputs])


def test_models_without_logits_explain_their_last_states():
    found = token_contributions(make(BartModel, marian_config()), [FAMILIES["marian"].inputs()])
    assert found.counts.tolist() == [3] and 0 < found.mean < 1


def test_the_table_and_the_numbers():
    model, inputs = model_in("marian"), labelled("marian")
    found = contributions(model, [inputs])
    lines, share = str(found).split("\n"), float(found.source[3])
    entropies = [f"{float(found.curve(measure).mean[3]):.3f}" for measure in ("source_entropy", "target_entropy")]
    assert lines[5].split() == ["3", "2", f"{share:.3f}", f"{1 - share:.3f}", *entropies]
    assert f"{found.mean:.3f} of all 14 tokens" in lines[-1] and "(reference prefixes)" in lines[-1]
    numbers = json.loads(json.dumps(found.to_dict()))
    assert numbers["source"] == found.source.tolist() and numbers["counts"] == [3, 3, 3, 2, 2, 1]
    assert numbers["sentences"][1] == found.sentences[1].to_dict() and numbers["mean"] == found.mean
    assert contributions(model, [inputs]) == found != contributions(model, [inputs], keep_relevance=True)


@pytest.mark.parametrize("pad", (0, None))
def test_given_decoder_inputs_need_no_start_token_in_the_config(pad):
    """T5's configs made by hand have none, and may lack padding."""
    model = FAMILIES["t5"].build().eval()
    inputs = FAMILIES["t5"].inputs()
    expected = token_contributions(model, [inputs]).average("source")
    if hasattr(model.config, "decoder_start_token_id"):
        del model.config.decoder_start_token_id
    model.config.pad_token_id = pad
    assert token_contributions(model, [inputs]).average("source") == expected
