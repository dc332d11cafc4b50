"""The risk of a model's own translations: against the formula, candidate by candidate."""

import pytest
import sacrebleu
import torch
import translation_models as tiny
from accelerate import Accelerator
from slow_cases import slow
from training_fixtures import fresh_accelerate  # noqa: F401

from collab_heads.data.batches import IGNORED, Collate
from collab_heads.data.translation import Objective
from collab_heads.errors import ArgumentError
from collab_heads.training.loop.minimum_risk import MinimumRisk, shares

FP32_SUM = 1e-4  # float32 sums over the vocabulary and over candidates in another order; seen: 4e-6
SAMPLES = 6
FAMILIES = ("marian", "bart", "mbart", "t5")


def batch_of(family: str, folder):
    """A model, its tokenizer, and a batch of three pairs."""
    tokenizer = tiny.tokenizer("t5" if family == "t5" else "marian", folder)
    net = tiny.model(family).eval()
    pairs = tiny.pairs(3, 1)
    end, pad, _ = tiny.IDS[family]
    ids = {side: [[*words[:-1], end] for words in tokenizer(pairs[side])["input_ids"]] for side in pairs}
    rows = [{"input_ids": one, "labels": two} for one, two in zip(ids["source"], ids["target"], strict=True)]
    if family == "mbart":  # the labels end with the language
        rows = [row | {"labels": [*row["labels"], 80]} for row in rows]
        net.generation_config.decoder_start_token_id = 80
    tokenizer.pad_token_id, tokenizer.eos_token_id = pad, end
    return net, tokenizer, Collate(net, pad)(rows)


def risk(tokenizer, **more) -> MinimumRisk:
    settings = {"samples": SAMPLES, "sharpness": 0.05, "metric": "bleu", "cross_entropy": 0.0, "longest": 30}
    return MinimumRisk(Accelerator(cpu=True), tokenizer, **{**settings, **more})


@pytest.fixture
def marian(tmp_path):
    return batch_of("marian", tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("metric, weight", (("chrf", 0.7), *slow(("bleu", 0.0))))
def test_loss_and_gradient_are_those_of_the_formula(family, metric, weight, tmp_path):
    """Every candidate scored by itself, in a loop."""
    net, tokenizer, batch = batch_of(family, tmp_path)
    objective = risk(tokenizer, metric=metric, cross_entropy=weight)
    torch.manual_seed(3)
    found = objective(net, batch)
    found.backward()
    gradient = net.get_encoder().get_input_embeddings().weight.grad.clone()
    net.zero_grad()

    torch.manual_seed(3)
    candidates = objective.candidates(net, batch)
    scorer = sacrebleu.BLEU(effective_order=True) if metric == "bleu" else sacrebleu.CHRF()
    total = torch.zeros(())
    for sentence in range(3):
        logs, risks, reference = [], [], None
        for i in (candidates.owner == sentence).nonzero().flatten().tolist():
            said = candidates.targets[i][candidates.targets[i] != IGNORED]
            logits = net(
                input_ids=batch["input_ids"][sentence : sentence + 1],
                attention_mask=batch["attention_mask"][sentence : sentence + 1],
                decoder_input_ids=candidates.inputs[i : i + 1, : len(said)],
            ).logits[0]
            logs.append(logits.log_softmax(-1)[range(len(said)), said].sum())
            text = tokenizer.decode(said, skip_special_tokens=True)
            reference = text if candidates.references[i] else reference
            risks.append(1 - scorer.sentence_score(text, [reference]).score / 100)
            if candidates.references[i]:
                total = total - weight * logs[-1] / len(said)
        q = (0.05 * torch.stack(logs)).softmax(0)
        assert len(logs) > 2 and risks[0] == pytest.approx(0)
        total = total + (q * torch.tensor(risks)).sum()
    (total / 3).backward()
    torch.testing.assert_close(found, total / 3, rtol=FP32_SUM, atol=0)
    expected = net.get_encoder().get_input_embeddings().weight.grad
    torch.testing.assert_close(gradient, expected, rtol=FP32_SUM, atol=FP32_SUM * expected.abs().max().item())


def test_candidates_are_there_once_and_end_where_they_end(marian, monkeypatch):
    net, tokenizer, batch = marian
    end, pad = 0, 89
    drawn = torch.tensor(
        [
            [[89, 5, 6, 0, 89], [89, 5, 6, 0, 89], [89, 5, 6, 7, 8]],  # twice the same; one that was cut off
            [[89, 0, 89, 89, 89], [89, 9, 0, 89, 89], [89, 9, 0, 89, 89]],  # an empty one
            [[89, 4, 0, 89, 89], [89, 4, 89, 0, 89], [89, 4, 0, 89, 89]],  # the reference, padding inside
        ]
    )
    monkeypatch.setattr(type(net), "generate", lambda *args, **settings: drawn.flatten(0, 1))
    batch["labels"] = torch.tensor([[7, 0, IGNORED], [9, 9, 0], [4, 0, IGNORED]])
    found = risk(tokenizer, samples=3).candidates(net, batch)
    said = [[token for token in row if token != IGNORED] for row in found.targets.tolist()]
    assert said == [[7, end], [5, 6, end], [5, 6, 7, 8], [9, 9, end], [end], [9, end], [4, end], [4, pad, end]]
    assert found.owner.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert found.references.nonzero().flatten().tolist() == [0, 3, 6]
    for inputs, targets in zip(found.inputs.tolist(), said, strict=True):
        assert inputs[: len(targets)] == [pad, *targets[:-1]]


def test_shares():
    scores, owner = torch.tensor([1.0, 2.0, 1000.0, 3.0, 999.0]), torch.tensor([0, 0, 1, 0, 1])
    found = shares(scores, owner, 2)
    torch.testing.assert_close(found[[0, 1, 3]], scores[[0, 1, 3]].softmax(0), rtol=FP32_SUM, atol=0)
    torch.testing.assert_close(found[[2, 4]], scores[[2, 4]].softmax(0), rtol=FP32_SUM, atol=0)


@pytest.mark.slow
def test_samples_become_better(marian):
    """After some steps on the risk of a few pairs, beginning where samples are right by a third."""
    net, tokenizer, batch = marian
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    ids = {name: batch[name] for name in ("input_ids", "attention_mask")}
    right = tokenizer.batch_decode(
        batch["labels"].masked_fill(batch["labels"] == IGNORED, 89), skip_special_tokens=True
    )

    def steps(loss_of, count):
        for _ in range(count):
            loss_of(net, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    def mean_score() -> float:
        torch.manual_seed(7)
        drawn = net.generate(**ids, do_sample=True, num_return_sequences=40, top_k=0, num_beams=1, max_length=30)
        texts = tokenizer.batch_decode(drawn, skip_special_tokens=True)
        scorer = sacrebleu.BLEU(effective_order=True)
        return sum(scorer.sentence_score(text, [right[i // 40]]).score for i, text in enumerate(texts)) / len(texts)

    torch.manual_seed(0)
    steps(Objective(), 45)
    before = mean_score()
    optimizer.param_groups[0]["lr"] = 6e-3
    steps(risk(tokenizer, samples=20), 40)
    assert before < 60
    assert mean_score() > before + 15  # seen: from 36 to 70


def test_modes_and_random_numbers_of_a_check_are_left_alone(marian):
    net, tokenizer, batch = marian
    net.train()
    net.model.encoder.eval()
    before = torch.random.get_rng_state()
    risk(tokenizer).check(net, batch)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert net.training and not net.model.encoder.training
    assert all(parameter.grad is None for parameter in net.parameters())


@pytest.mark.slow
def test_samples_are_drawn_without_dropout(marian):
    net, tokenizer, batch = marian
    for module in net.modules():
        if hasattr(module, "dropout"):
            module.dropout = 0.5
    drawn = []
    for training in (False, True):
        torch.manual_seed(3)
        drawn.append(risk(tokenizer).candidates(net.train(training), batch))
    assert torch.equal(drawn[0].inputs, drawn[1].inputs) and torch.equal(drawn[0].owner, drawn[1].owner)
    assert len(drawn[0].inputs) > 3  # not the references alone


@pytest.mark.parametrize(
    "kind, message", (("empty", "all samples of 3 .* are empty"), ("same", "the reference itself"))
)
def test_nothing_to_learn_from(kind, message, marian, monkeypatch):
    net, tokenizer, batch = marian
    whole = torch.cat([batch["decoder_input_ids"][:, :1], batch["labels"]], dim=1).masked_fill(
        torch.cat([batch["labels"][:, :1] * 0, batch["labels"]], dim=1) == IGNORED, 89
    )
    samples = {"empty": torch.tensor([[89, 0]] * 3), "same": whole}[kind]
    monkeypatch.setattr(type(net), "generate", lambda *a, **s: samples.repeat_interleave(SAMPLES, 0))
    with pytest.raises(ArgumentError, match=message):
        risk(tokenizer).check(net, batch)


def test_weight_is_the_number_of_sentences(marian):
    assert MinimumRisk.weight(marian[2]) == 3
