"""Several numbers per head in one pass: as each alone, what is excluded, what is refused."""

import pytest
import torch
from model_sizes import EXACT64
from unchanged import assert_unchanged, refused, snapshot

from collab_heads.analysis import head_statistics
from collab_heads.analysis.measures.head_scores import OF_MAPS, head_scores
from collab_heads.base.option_values import METRIC_WORDS
from collab_heads.errors import ArgumentError, CalibrationError
from families import FAMILIES


@pytest.mark.parametrize("family", ("bert", "marian"))
def test_scores_together_are_scores_alone(family):
    """Excluded ids count for tokens, and not for whole maps."""
    model, inputs = FAMILIES[family].build().double(), FAMILIES[family].inputs()
    exclude = [int(inputs["input_ids"][0, 1])]
    together = head_scores(model, [inputs], METRIC_WORDS, exclude=exclude)
    for measure in OF_MAPS:
        for path, scores in head_scores(model, [inputs], [measure])[measure].items():
            torch.testing.assert_close(together[measure][path], scores, rtol=0, atol=EXACT64)
    excluded = head_statistics(model, [inputs], measures=("confidence",), exclude=exclude).confidence
    for path, scores in excluded.items():
        torch.testing.assert_close(together["confidence"][path], scores, rtol=0, atol=EXACT64)
    counted = head_statistics(model, [inputs], measures=("confidence",), exclude=[]).confidence
    assert any(not torch.allclose(counted[path], excluded[path], rtol=0, atol=1e-6) for path in excluded)


def test_what_is_refused():
    model, inputs = FAMILIES["marian"].build(), FAMILIES["marian"].inputs()
    before = snapshot(model)
    with refused(model, ArgumentError, "unknown metric 'confident'", "did you mean 'confidence'"):
        head_scores(model, [inputs], ["base", "confident"])
    with refused(model, CalibrationError):
        head_scores(model, [], METRIC_WORDS)
    assert head_scores(model, [inputs], []) == {}
    assert_unchanged(model, before)
