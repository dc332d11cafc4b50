"""The benchmark of decoders without examples: batches score what a loop over single texts does."""

import importlib

import pytest
import torch
from model_sizes import FP32_NOISE
from pages import ROOT
from transformers import LlamaConfig, LlamaForCausalLM

LINES = {
    "data/glue/SST-2/dev.tsv": ["sentence\tlabel", "a good film \t1", "bad\t0", "never read\t1"],
    "data/glue/RTE/dev.tsv": [
        "index\tsentence1\tsentence2\tlabel",
        "0\tIt rains.\tIt is wet.\tentailment",
        "1\tIt is dry.\tIt rains.\tnot_entailment",
    ],
    "data/glue/CoLA/dev.tsv": ["a\t1\t\tHe.", "a\t0\t*\tReads he it.", "a\t1\t\tShe saw a very long film today."],
}


class Letters:
    """A tokenizer whose tokens are letters."""

    bos_token_id, eos_token_id = 1, 2

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [3 + ord(letter) % 90 for letter in text]}


@pytest.fixture
def program(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    found = importlib.import_module("zero_shot")
    monkeypatch.setattr(found, "lines_of", LINES.__getitem__)
    return found


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=95, initializer_range=0.3, **sizes)).eval()


@torch.no_grad()
def alone(model, context, continuation) -> float:
    """Return the log-likelihood of one continuation, token by token."""
    read, total = list(context), 0.0
    for token in continuation:
        total += float(model(torch.tensor([read])).logits[0, -1].log_softmax(-1)[token])
        read.append(token)
    return total


def test_batches_score_what_single_texts_do(program, model, monkeypatch):
    """Continuations of one and of several tokens, after contexts of other lengths, two of which are one row."""
    chance = torch.Generator().manual_seed(1)
    sizes = ((9, 1), (3, 4), (6, 2), (1, 8), (12, 3), (2, 1), (5, 5))
    requests = [tuple(torch.randint(3, 95, (n,), generator=chance).tolist() for n in pair) for pair in sizes]
    requests.insert(4, (requests[0][0], [7]))
    monkeypatch.setattr(program, "AT_ONCE", 3)
    expected, rows = [alone(model, *each) for each in requests], []
    model.register_forward_pre_hook(lambda *call: rows.append(len(call[2]["input_ids"])), with_kwargs=True)
    found = program.log_likelihoods(model, requests)
    assert rows == [3, 3, 1]
    assert found == pytest.approx(expected, rel=100 * FP32_NOISE)


def test_prompts_are_those_of_the_harness(program):
    assert program.prompts("SST-2", 2) == (
        [
            "a good film \nQuestion: Is this sentence positive or negative?\nAnswer:",
            "bad\nQuestion: Is this sentence positive or negative?\nAnswer:",
        ],
        [1, 0],
    )
    asked, labels = program.prompts("RTE", 400)
    assert asked[0] == "It rains.\nQuestion: It is wet. True or False?\nAnswer:" and labels == [0, 1]


def test_answers_are_the_likelier_words(program, model):
    found, expected = program.scores(model, Letters(), 2), {}
    for task, words in (("SST-2", (" negative", " positive")), ("RTE", (" True", " False"))):
        likely = [
            [alone(model, *program.request(Letters(), text, word)) for word in words]
            for text in program.prompts(task, 2)[0]
        ]
        expected[task] = "".join(str(int(second > first)) for first, second in likely)
    assert found["answers"] == expected
    right = {"SST-2": "10", "RTE": "01"}
    for task, answers in expected.items():
        assert found[task] == 50 * sum(a == b for a, b in zip(answers, right[task], strict=True))
    texts = [line.split("\t")[-1] for line in LINES["data/glue/CoLA/dev.tsv"]]
    sums = [alone(model, [Letters.bos_token_id], Letters()(text, False)["input_ids"]) for text in texts]
    assert sums[0] > sums[1] > sums[2]  # the middle one is not acceptable
    assert found["CoLA"] == 100 and program.scores(model, Letters(), 3)["CoLA"] == 50


def test_flips_are_answers_that_differ(program):
    found, original = ({"answers": {"SST-2": answers, "RTE": "01"}} for answers in ("0110", "0011"))
    assert program.flips(found, original) == {"flips, SST-2": 50, "flips, RTE": 0}
