"""Words that training leaves out: how many, on which side, and what stands for them."""

import math

import pytest
import torch

from collab_heads.data.translation import WordDropout

SPECIAL = (0, 3, 7)
ROWS = 300
IDS = torch.arange(100).repeat(ROWS, 1)
PLAIN = [i for i in range(99) if i not in SPECIAL]
RATE = 5 * math.sqrt(0.2 * 0.8 / (ROWS * len(PLAIN)))  # five standard deviations


def test_a_share_is_replaced_and_no_special_token():
    torch.manual_seed(0)
    found = WordDropout(0.2, 0.2, (99,), SPECIAL).drop(IDS, 0.2)
    changed = (found != IDS) & (IDS != 99)
    assert set(found[changed].tolist()) == {99}
    assert not changed[:, list(SPECIAL)].any()
    assert abs(changed[:, PLAIN].float().mean() - 0.2) < RATE
    assert changed.float().mean(1).std() > 0  # every token of every sentence for itself


def test_random_tokens_stand_for_dropped_ones():
    torch.manual_seed(0)
    others = (10, 11, 12, 13)
    found = WordDropout(0.2, 0.2, others, SPECIAL).drop(IDS, 0.2)
    changed = found != IDS
    counts = [int((found[changed] == other).sum()) for other in others]
    assert sum(counts) == int(changed.sum()) and not changed[:, list(SPECIAL)].any()
    assert max(counts) - min(counts) < 10 * math.sqrt(sum(counts) / 4)  # of like frequency


@pytest.mark.parametrize("source, target", ((0.5, 0.0), (0.0, 0.5), (0.5, 0.2)))
def test_each_side_has_its_share(source, target):
    torch.manual_seed(0)
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    found = WordDropout(source, target, (99,), SPECIAL)(dict(inputs))
    for name, share in (("input_ids", source), ("decoder_input_ids", target)):
        changed = found[name][:, PLAIN] != IDS[:, PLAIN]
        assert abs(changed.float().mean() - share) < 2 * RATE
        assert share or found[name] is IDS
    assert found["attention_mask"] is inputs["attention_mask"]
