"""Measure how far the output of a model has moved, whatever it puts out."""

import copy

import pytest
import torch
from model_configs import bert_config
from model_sizes import VOCABULARY
from transformers import BertConfig, BertForQuestionAnswering

from collab_heads import compress, distill
from collab_heads.compression.probe import Probe
from families import make

FP32_NOISE = 1e-4  # of differences of logarithms; seen on one machine: 8e-8 to 5e-6


def answering(most=1):
    """A model that finds where an answer begins and ends, and batches of texts of other lengths."""
    model = make(BertForQuestionAnswering, bert_config(BertConfig)).eval()
    torch.nn.init.normal_(model.qa_outputs.weight)
    generator, batches = torch.Generator().manual_seed(0), []
    for length in (7, 9, 12, 8) * most:
        ids = torch.randint(3, VOCABULARY, (8, length), generator=generator)
        mask = torch.ones_like(ids)
        mask[::2, -2:] = 0
        batches.append({"input_ids": ids, "attention_mask": mask})
    return model, batches


@torch.no_grad()
def test_of_answers_in_texts_both_ends_count():
    """The root of the mean of 2 KL, over the tokens of each text that are no padding."""
    model, batches = answering()
    probe, gaps = Probe(model, batches, []), []
    assert probe.error() == 0
    before = [model(**batch) for batch in batches]
    model.qa_outputs.weight += 0.1 * torch.randn(2, 32, generator=torch.Generator().manual_seed(1))
    for batch, old in zip(batches, before, strict=True):
        new = model(**batch)
        for end in ("start_logits", "end_logits"):
            for row, was, mask in zip(new[end], old[end], batch["attention_mask"].bool(), strict=True):
                p, q = was[mask].log_softmax(-1), row[mask].log_softmax(-1)
                gaps.append(2 * float((p.exp() * (p - q)).sum()))
    assert len(gaps) == 64
    assert probe.error() == pytest.approx((sum(gaps) / len(gaps)) ** 0.5, rel=FP32_NOISE) and probe.error() > 0.01


@pytest.mark.slow
def test_a_model_that_answers_is_compressed_and_distilled():
    model, batches = answering(6)
    original = copy.deepcopy(model)
    report = compress(model, batches, 0.5, refine_steps=0)
    assert report.measured_error > 0
    trained = distill(model, original, batches, steps=40, learning_rate=0.003)
    assert trained.after.output < trained.before.output
