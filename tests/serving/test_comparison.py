"""What a comparison of two models counts."""

import copy

import torch
from model_sizes import VOCABULARY

from collab_heads.serving.comparison import compare
from families import FAMILIES


def batch():
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    return {"input_ids": torch.arange(4, 20).view(2, 8) % VOCABULARY, "attention_mask": mask}


def test_the_same_model_differs_by_nothing():
    model = FAMILIES["bert"].build().eval()
    found = compare(model, copy.deepcopy(model), [batch()], generates=False)
    assert found.difference == 0 and found.agreeing is None and min(found.seconds_before, found.seconds_after) > 0


def test_a_difference_is_a_share_of_the_largest_output():
    model = FAMILIES["bert"].build().eval()
    other = copy.deepcopy(model)
    other.classifier.bias.data[0] += 0.5
    with torch.no_grad():
        largest = float(model(**batch()).logits.abs().max())
    found = compare(model, other, [batch()], generates=False)
    torch.testing.assert_close(found.difference, 0.5 / largest, rtol=1e-4, atol=0)


def test_padding_does_not_count():
    model = FAMILIES["bert"].build().base_model.eval()

    def other(**inputs):
        outputs = model(**inputs)
        outputs.last_hidden_state[inputs["attention_mask"] == 0] += 1
        return outputs

    assert compare(model, other, [batch()], generates=False).difference == 0


def test_logits_count_while_the_tokens_are_the_same():
    model = FAMILIES["gpt2"].build().eval()
    other = copy.deepcopy(model)
    other.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight.detach())
    inputs = {"input_ids": batch()["input_ids"], "attention_mask": torch.ones(2, 8, dtype=torch.long)}
    found = compare(model, other, [inputs], generates=True)
    assert found.agreeing < 0.5 and 1.5 < found.difference <= 2.0  # of the first step: each logit is the negative


def test_a_graph_for_one_number_of_rows_is_found_out():
    model = FAMILIES["bert"].build().eval()

    def other(**inputs):
        outputs = model(**inputs)
        outputs.logits = outputs.logits + (len(inputs["input_ids"]) == 1)
        return outputs

    assert compare(model, other, [batch()], generates=False).difference > 0.1


def test_a_graph_without_a_mask_is_found_out():
    """Also where the batches have no padding."""
    model = FAMILIES["bert"].build().base_model.eval()
    whole = {"input_ids": batch()["input_ids"], "attention_mask": torch.ones(2, 8, dtype=torch.long)}

    def other(input_ids, attention_mask):
        return model(input_ids=input_ids)

    assert compare(model, other, [whole], generates=False).difference > 1e-3
