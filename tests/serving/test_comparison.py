"""What a comparison of two models counts."""

import copy

import pytest
import torch
from model_sizes import VOCABULARY

from collab_heads.errors import ModelStateError
from collab_heads.serving.comparison import compare, greedy
from collab_heads.serving.example_inputs import first_row, padded
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


BROKEN = {
    "NaN": (lambda states: torch.full_like(states, torch.nan), "puts out NaN or inf in last_hidden_state, and PyTorch"),
    "one NaN": (lambda states: states.index_fill(1, torch.tensor([0]), torch.nan), "puts out NaN or inf in last_hid"),
    "one inf": (lambda states: states.index_fill(1, torch.tensor([0]), torch.inf), "puts out NaN or inf in last_hidde"),
    "nothing": (lambda states: None, "has no output last_hidden_state, which PyTorch has"),
    "fewer rows": (lambda states: states[:1], r"puts out last_hidden_state of shape \(1, 8, 32\) where PyTorch's is"),
    "fewer tokens": (lambda states: states[:, :1], r"puts out last_hidden_state of shape \(2, 1, 32\) where"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_outputs_that_cannot_be_compared_fail(what):
    model = FAMILIES["bert"].build().base_model.eval()
    change, message = BROKEN[what]

    def other(**inputs):
        states = change(model(**inputs).last_hidden_state)
        return {} if states is None else {"last_hidden_state": states}

    with pytest.raises(ModelStateError, match=f"^the exported model {message}.*nothing was written"):
        compare(model, other, [batch()], generates=False)


def test_where_nothing_counts_nothing_is_compared():
    model = FAMILIES["distilbert"].build().base_model.eval()
    hidden = batch() | {"attention_mask": torch.zeros(2, 8, dtype=torch.long)}
    with pytest.raises(ModelStateError, match="no output could be compared with PyTorch's: nothing was written"):
        compare(model, model, [hidden], generates=False)


class Decodes:
    """A model whose greedy decoding is changed by a function of its outputs."""

    def __init__(self, model, change):
        self.model, self.change = model, change

    def generate(self, **options):
        found = self.model.generate(**options)
        self.change(found)
        return found


def prompts():
    return {"input_ids": batch()["input_ids"], "attention_mask": torch.ones(2, 8, dtype=torch.long)}


def second_best(found):
    """The third token of the first row is its second choice; what follows is of another text."""
    found.sequences[0, -6] = found.scores[2][0].topk(2).indices[1]
    for logits in found.logits[3:]:
        logits[0] += 1000
    found.logits[7][-1] += 0.01


def test_logits_count_until_a_row_has_another_token():
    model = FAMILIES["gpt2"].build().eval()
    found = compare(model, Decodes(model, second_best), [prompts()], generates=True)
    expected = [greedy(model, each) for each in (prompts(), first_row(prompts()), padded(model, prompts()))]
    largest = max(float(torch.stack(each.logits).abs().max()) for each in expected)
    best = [each.scores[2][0].topk(2).values for each in expected]
    torch.testing.assert_close(found.difference, 0.01 / largest, rtol=1e-3, atol=0)  # of the other row, at the end
    torch.testing.assert_close(found.margin, max(float(one - two) for one, two in best) / largest, rtol=1e-5, atol=0)
    assert 0.9 < found.agreeing < 1


def nan_logits(found):
    found.logits[5][-1, 3] = torch.nan


def forbidden(found):
    found.sequences[0, -2] = 2  # the end, before the least number of tokens


def fewer_tokens(found):
    found.sequences, found.logits = found.sequences[:, :-1], found.logits[:-1]


@pytest.mark.parametrize(
    "change, message",
    [
        (nan_logits, "puts out NaN or inf in logits, and PyTorch does not"),
        (forbidden, r"chooses token 2 where PyTorch may not, and chooses \d+"),
        (fewer_tokens, r"decodes tokens of shape \(2, 7\) where PyTorch's are of shape \(2, 8\)"),
    ],
)
def test_decoding_that_cannot_be_compared_fails(change, message):
    model = FAMILIES["gpt2"].build().eval()
    with pytest.raises(ModelStateError, match=f"^the exported model {message}.*: nothing was written"):
        compare(model, Decodes(model, change), [prompts()], generates=True)
