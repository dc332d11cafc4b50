"""What is explained where nothing is said, what else can be, and what cannot."""

import pytest
import torch
from heads_by_hand import LENGTHS, ended
from model_configs import albert_config, bert_config, t5_config
from model_inputs import batch
from relevance_by_hand import FP32_NORMS, assert_alike, relevance
from transformers import (
    AlbertForTokenClassification,
    BertForMultipleChoice,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertModel,
    T5ForTokenClassification,
)
from unchanged import refused

from collab_heads.analysis import head_relevance
from collab_heads.errors import ArgumentError
from families import make


def of(outputs):
    """The largest logit of every sentence."""
    return outputs.logits.max(-1).values


TARGETS = {
    "classifier": (BertForSequenceClassification, {}, lambda outputs, inputs: of(outputs)),
    "regression": (BertForSequenceClassification, {"num_labels": 1}, lambda outputs, inputs: outputs.logits[:, 0]),
    "questions": (
        BertForQuestionAnswering,
        {},
        lambda outputs, inputs: sum(
            torch.stack([row[keep.bool()].max() for row, keep in zip(logits, inputs["attention_mask"], strict=True)])
            for logits in (outputs.start_logits, outputs.end_logits)
        ),
    ),
    "embeddings": (
        BertModel,
        {},
        lambda outputs, inputs: torch.stack(
            [
                row[keep.bool()].mean(0) @ row[keep.bool()].mean(0).detach()
                for row, keep in zip(outputs.last_hidden_state, inputs["attention_mask"], strict=True)
            ]
        ),
    ),
}


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_explained_by_default(name):
    cls, more, target = TARGETS[name]
    model, inputs = make(cls, bert_config(**more)).double(), batch()
    found = head_relevance(model, [inputs], exclude=[])
    assert_alike(head_relevance(model, [inputs], target=target), found)
    assert found.positions == (6 if name == "questions" else 3)


@pytest.mark.parametrize(
    "model",
    (lambda: make(AlbertForTokenClassification, albert_config()), lambda: make(T5ForTokenClassification, t5_config())),
)
def test_taggers_are_explained_at_every_token_that_counts(model):
    model, (inputs, counts) = model().double(), ended("bert")
    inputs["labels"] = torch.zeros_like(inputs["input_ids"])  # no tokens, whatever an encoder-decoder thinks
    found = relevance(model, [inputs])
    target = lambda outputs, inputs: of(outputs) * counts["encoder"]  # noqa: E731
    assert_alike(relevance(model, [inputs], target=target), found, FP32_NORMS)
    assert found.positions == int(counts["encoder"].sum())
    everything = relevance(model, [inputs], exclude=[])
    assert everything.positions == sum(LENGTHS) and everything.explained != found.explained


def test_choices_belong_to_their_question():
    model = make(BertForMultipleChoice, bert_config()).double()
    inputs = {key: value.view(1, 3, 9) for key, value in batch().items()}
    two = {key: torch.cat([value, value.flip(1)]) for key, value in inputs.items()}
    one, found = head_relevance(model, [inputs]), head_relevance(model, [two])
    assert one.sentences == 1 and found.sentences == 2
    assert_alike(found, type(found)(**{**vars(one), "sentences": 2}))


def test_outputs_and_targets_that_cannot_be_explained():
    model, inputs = make(BertForPreTraining, bert_config()), batch()
    with refused(model, ArgumentError, "prediction_logits, seq_relationship_logits", "target="):
        head_relevance(model, [inputs])
    assert head_relevance(model, [inputs], target=lambda outputs, _: outputs.seq_relationship_logits).sentences == 3
    for target, found in (
        (lambda outputs, inputs: outputs, "BertForPreTrainingOutput"),
        (lambda outputs, inputs: outputs[0], "(3, 9, 61)"),
        (lambda outputs, inputs: outputs[1].sum(), "()"),
        (lambda outputs, inputs: of_detached(outputs), "(3,)"),
    ):
        with refused(model, ArgumentError, f"target gave {found}", "(batch, positions)"):
            head_relevance(model, [inputs], target=target)


def of_detached(outputs):
    return outputs[1].detach()[:, 0]
