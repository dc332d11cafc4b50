"""Losses of models in half precision keep the digits by which heads differ."""

import pytest
import torch
from model_runs import aligned
from torch.nn.functional import cross_entropy

from collab_heads.analysis import mean_loss
from collab_heads.errors import CalibrationError
from collab_heads.running.losses import loss_of
from families import FAMILIES

IDS = torch.arange(4, 34).view(3, 10)
LABELS = {"bert": torch.tensor([0, 1, 1]), "t5": IDS}


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("name", LABELS)
def test_the_loss_is_that_of_the_logits_in_float32(name, dtype):
    model, inputs = aligned(FAMILIES[name].build().to(dtype).eval()), {"input_ids": IDS, "labels": LABELS[name]}
    with torch.no_grad():
        logits = model(**inputs).logits
        loss = loss_of(model, inputs, 0)
    assert logits.dtype == dtype and loss.dtype == torch.float32
    expected = cross_entropy(logits.float().flatten(0, -2), LABELS[name].flatten())
    assert torch.equal(loss, expected)
    assert mean_loss(model, [inputs]) == float(loss) != float(loss.to(dtype))


def test_gradients_pass():
    model = FAMILIES["bert"].build().bfloat16()
    loss_of(model, {"input_ids": IDS, "labels": LABELS["bert"]}, 0).backward()
    assert all(parameter.grad.dtype == torch.bfloat16 for parameter in model.classifier.parameters())
    assert bool(model.classifier.weight.grad.abs().sum() > 0)


def test_a_batch_without_a_loss_is_named():
    with pytest.raises(CalibrationError, match="gives no loss for batch 7: it needs labels"):
        loss_of(FAMILIES["bert"].build(), {"input_ids": IDS}, 7)
