"""How pairs are encoded, batched, trained on, translated and scored; for every family where families differ."""

import pytest
import sacrebleu
import torch
import translation_models as tiny
from accelerate import Accelerator
from datasets import Dataset

from collab_heads.data import tokenizing
from collab_heads.data.batches import IGNORED, Collate
from collab_heads.data.translation import Objective, WordDropout, corpus_scores, encode, num_targets, translate

FP32_SUM = 1e-5  # float32 sums over the vocabulary in another order, relative to losses around 5; seen: 1e-6
ROWS = [
    {"input_ids": [5, 6, 7, 8, 2], "labels": [9, 10, 2]},
    {"input_ids": [11, 2], "labels": [12, 13, 14, 15, 16, 2]},
    {"input_ids": [17, 18, 2], "labels": [2]},
]


@pytest.fixture(params=tiny.CONFIGS)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def marian_tokenizer(tmp_path_factory):
    return tiny.tokenizer("marian", tmp_path_factory.mktemp("marian"))


def test_encode_prefixes_the_source_and_ends_both_sides(marian_tokenizer):
    corpus = tiny.data(train=5, validation=2)
    encoded = encode(corpus, marian_tokenizer, "the dog ", 64, 64)
    assert {split: len(rows) for split, rows in encoded.items()} == {"train": 5, "validation": 2}
    for split, found in encoded.items():
        assert sorted(found.column_names) == ["input_ids", "labels"]
        pairs = corpus.splits[split]
        for row, source, target in zip(found, pairs["source"], pairs["target"], strict=True):
            assert row["input_ids"] == marian_tokenizer("the dog " + source)["input_ids"]
            assert row["labels"] == marian_tokenizer(text_target=target)["input_ids"]
            assert marian_tokenizer.decode(row["labels"]) == target + "</s>"


@pytest.mark.slow
def test_several_processes_encode_as_one_does(marian_tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizing, "PORTION", 3)
    corpus = tiny.data(train=10, validation=2)
    one = encode(corpus, marian_tokenizer, "the dog ", 64, 64)
    two = encode(corpus, marian_tokenizer, "the dog ", 64, 64, processes=2)
    assert {split: rows.to_dict() for split, rows in two.items()} == {
        split: rows.to_dict() for split, rows in one.items()
    }


def test_encode_truncates_and_keeps_the_end(marian_tokenizer):
    corpus = tiny.data(train=20)
    whole, cut = (encode(corpus, marian_tokenizer, "", *limits)["train"] for limits in ((64, 64), (6, 4)))
    for name, limit in (("input_ids", 6), ("labels", 4)):
        assert max(map(len, whole[name])) > limit
        for before, after in zip(whole[name], cut[name], strict=True):
            assert after == (before if len(before) <= limit else [*before[: limit - 1], marian_tokenizer.eos_token_id])


@pytest.mark.parametrize("multiple, widths", ((1, (5, 6)), (4, (8, 8))))
def test_collate_pads(multiple, widths):
    batch = Collate(tiny.model("bart"), 1, multiple)(ROWS)
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == {
        "input_ids": (3, widths[0]),
        "attention_mask": (3, widths[0]),
        "decoder_input_ids": (3, widths[1]),
        "labels": (3, widths[1]),
    }
    for i, row in enumerate(ROWS):
        for name, filler in (("input_ids", 1), ("labels", IGNORED)):
            wanted = row[name] + [filler] * (batch[name].shape[1] - len(row[name]))
            assert batch[name][i].tolist() == wanted
        assert batch["attention_mask"][i].tolist() == [int(j < len(row["input_ids"])) for j in range(widths[0])]
    assert num_targets(batch) == 3 + 6 + 1
    sources = Collate(tiny.model("bart"), 1)([{"input_ids": row["input_ids"]} for row in ROWS])
    assert sorted(sources) == ["attention_mask", "input_ids"]


def test_padding_in_the_middle_of_a_source_is_no_padding():
    """The mask follows the lengths, not the ids: a prompt may hold the padding piece."""
    batch = Collate(tiny.model("bart"), 1)([{"input_ids": [5, 1, 6]}, {"input_ids": [7]}])
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_decoder_inputs_and_loss_are_the_models_own(family):
    """The families shift labels in four ways; the loss without smoothing is what the model computes from labels."""
    net = tiny.model(family).eval()
    batch = Collate(net, net.config.pad_token_id, 4)(ROWS)
    start = {"marian": 89, "bart": 2, "m2m_100": 2, "t5": 0}.get(family)
    for row, shifted in zip(ROWS, batch["decoder_input_ids"].tolist(), strict=True):
        labels = row["labels"]
        assert shifted[: len(labels)] == [labels[-1] if family == "mbart" else start, *labels[:-1]]
        assert set(shifted[len(labels) + 1 :]) == {net.config.pad_token_id}
        assert IGNORED not in shifted
    own = net(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"]).loss
    found = Objective()(net, batch)
    torch.testing.assert_close(found, own, rtol=FP32_SUM, atol=0)
    assert found > 1


@pytest.mark.parametrize("smoothing", (0.1, 0.5))
def test_label_smoothing(smoothing):
    """(1 - s) times the cross-entropy, plus s times its mean over all pieces, over the pieces that count."""
    net = tiny.model("marian").eval()
    batch = Collate(net, 89)(ROWS)
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    logs = net(**inputs).logits.log_softmax(-1)
    terms = [
        -(1 - smoothing) * logs[i, j, label] - smoothing * logs[i, j].mean()
        for i, row in enumerate(ROWS)
        for j, label in enumerate(row["labels"])
    ]
    found = Objective(smoothing)(net, batch)
    torch.testing.assert_close(found, sum(terms) / len(terms), rtol=FP32_SUM, atol=0)
    assert abs(found - Objective()(net, batch)) > 1e-3


def test_dropped_words_are_in_the_inputs_and_not_in_the_labels():
    torch.manual_seed(0)
    net, seen = tiny.model("marian"), []
    net.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    batch = Collate(net, 89)(ROWS)
    before = {name: tensor.clone() for name, tensor in batch.items()}
    loss = Objective(dropout=WordDropout(0.5, 0.5, (1,), (0, 89, 2)))(net, batch)
    for name, tensor in batch.items():
        assert torch.equal(tensor, before[name])
    for name in ("input_ids", "decoder_input_ids"):
        assert not torch.equal(seen[0][name], batch[name])
    assert torch.equal(seen[0]["attention_mask"], batch["attention_mask"])
    logits = net(**seen[0]).logits.flatten(0, 1)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, batch["labels"].flatten()))


class Echo:
    """Stands in for a tokenizer: ids as text."""

    def batch_decode(self, rows, skip_special_tokens):
        assert skip_special_tokens
        return [" ".join(str(i) for i in row.tolist() if i != 89) for row in rows]


def test_translate_keeps_the_order_and_the_modes():
    """Lengths and numbers of translations in the generation config of the model do not count."""
    net = tiny.model("marian", dropout=0.5).train()
    net.model.decoder.eval()
    modes = {name: module.training for name, module in net.named_modules()}
    lengths, generator = [3, 9, 1, 9, 5, 2, 7], torch.Generator().manual_seed(0)
    rows = [torch.randint(2, 88, (n,), generator=generator).tolist() for n in lengths]
    examples = Dataset.from_dict({"input_ids": rows, "labels": [[2]] * 7})
    accelerator = Accelerator(cpu=True)
    settings = {"num_beams": 3, "length_penalty": 0.7}
    net.generation_config.update(max_new_tokens=2, num_return_sequences=2, num_beams=2)
    found = translate(accelerator, net, examples, Collate(net, 89), Echo(), 3, 7, **settings)
    assert {name: module.training for name, module in net.named_modules()} == modes
    net.eval()
    settings |= {"do_sample": False, "max_new_tokens": 7, "num_return_sequences": 1}
    alone = [Echo().batch_decode(net.generate(torch.tensor([row]), **settings), True)[0] for row in rows]
    assert found == alone
    assert len(set(alone)) > 3
    greedy = translate(accelerator, net, examples, Collate(net, 89), Echo(), 3, 7, num_beams=1)
    assert greedy != found


def test_scores_are_sacrebleus():
    translations = ["the dog sees a small ball .", "some cats like the old house today .", ""]
    references = ["the dog sees the small ball .", "some cats like the house today .", "birds ."]
    scores, signatures = corpus_scores(translations, references)
    assert scores == {
        "bleu": sacrebleu.corpus_bleu(translations, [references]).score,
        "chrf": sacrebleu.corpus_chrf(translations, [references]).score,
    }
    assert 20 < scores["bleu"] < 90
    version = sacrebleu.__version__
    assert signatures["bleu"] == f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{version}"
    assert signatures["chrf"] == f"nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:{version}"
    assert corpus_scores(references, references)[0] == pytest.approx({"bleu": 100, "chrf": 100})
