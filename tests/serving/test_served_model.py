"""A served model is called as the original is."""

import pytest
import torch
from model_sizes import VOCABULARY

from collab_heads import export, load_exported
from collab_heads.errors import ArgumentError
from collab_heads.layers.attention import CACHE
from families import FAMILIES

pytest.importorskip("transformers.exporters.runners", reason="exports of graphs need transformers 5.23")

ENGINE_NOISE = 1e-5  # float32 in another engine; differences seen: 1e-6 and below


def ids(rows, length):
    return torch.randint(4, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(rows))


def test_inputs_with_defaults_may_be_left_out(folder):
    model, served = FAMILIES["bert"].build().eval(), load_exported(folder, threads=1)
    assert served.names == {"input_ids", "attention_mask", "token_type_ids"}
    with torch.no_grad():
        for inputs in ({}, {"attention_mask": torch.ones(3, 5, dtype=torch.long)}):
            expected, found = (each(input_ids=ids(3, 5), **inputs).logits for each in (model, served))
            torch.testing.assert_close(found, expected, rtol=0, atol=ENGINE_NOISE)


def test_threads(folder):
    with pytest.raises(ArgumentError, match="threads"):
        load_exported(folder, threads=0)


def test_other_inputs_are_asked_for(folder):
    with pytest.raises(ArgumentError, match="the graph takes input_ids, token_type_ids, too"):
        load_exported(folder)(attention_mask=torch.ones(2, 3, dtype=torch.long))


@pytest.mark.slow
def test_a_decoder_generates_without_a_mask(tmp_path):
    model = FAMILIES["gpt2"].build().eval()
    export(model, tmp_path / "gpt2")
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    served = load_exported(tmp_path / "gpt2")
    assert torch.equal(served.generate(ids(2, 4), **options), model.generate(ids(2, 4), **options))
    for name in ("past_key_values", "cache"):  # before transformers 5.24, and since then
        begun = served(ids(2, 4)[:, :3])
        found = served(ids(2, 4)[:, 3:], **{name: begun[CACHE]}).logits[:, -1]
        torch.testing.assert_close(found, served(ids(2, 4)).logits[:, -1], rtol=0, atol=ENGINE_NOISE)
