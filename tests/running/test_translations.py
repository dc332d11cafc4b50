"""What the decoder of a model of audio reads where batches do not say: what the model itself writes."""

import copy

import torch
from model_inputs import batch, spectrum_batch

from collab_heads import compress, distill, swap_to_collaborative
from collab_heads.running.translations import most_tokens, with_translations
from families import FAMILIES

HEARD = {"input_features": spectrum_batch()["input_features"]}


def test_whisper_reads_what_it_writes():
    """Its start token first, then what greedy search finds: every token is the likeliest after those before it."""
    model = FAMILIES["whisper"].build()
    ((_, found),) = with_translations(model, [(0, HEARD)])
    ids = found["decoder_input_ids"]
    assert ids.shape == (3, most_tokens(model, HEARD)) == (3, 64)  # nothing random ends before there is no room
    assert (ids[:, 0] == model.config.decoder_start_token_id).all() and len(ids.unique()) > 3
    with torch.no_grad():
        likeliest = model(**HEARD, decoder_input_ids=ids).logits.argmax(-1)
    assert torch.equal(likeliest[:, :-1], ids[:, 1:])


def test_a_text_leaves_room_for_as_much_again():
    assert most_tokens(FAMILIES["marian"].build(), batch()) == 1 + 2 * 9 + 8


def test_whisper_is_compressed_and_distilled_from_audio_alone():
    model = FAMILIES["whisper"].build()
    report = compress(model, [HEARD], 0.6, refine_steps=2)
    assert report.costs["parameters"].after <= 0.6 * report.costs["parameters"].before
    original = FAMILIES["whisper"].build()
    changed = copy.deepcopy(original)
    swap_to_collaborative(changed, dim_shared_query_key=16, kind="per_head")
    learned = distill(changed, original, [HEARD], steps=10)
    assert learned.after.total(1.0) < learned.before.total(1.0)
