"""What a model is shown: texts of a length that it takes, in batches, with labels where it translates."""

import gzip

import commands
import pytest
import torch

from collab_heads.command.inputs import batches_of, load, longest, own_translations
from collab_heads.command.texts import read_data
from collab_heads.errors import ArgumentError


def loaded(*argv):
    args = commands.parse("analyze", *argv, "--output_dir", "nowhere")
    return args, *load(args)[:2]


@pytest.mark.slow
def test_pairs_are_batched_with_their_labels(marian, pairs):
    args, model, tokenizer = loaded(marian, "--data", *pairs, "--batch_size", 4)
    assert type(model).__name__ == "MarianMTModel" and model.dtype == torch.float32
    texts = read_data(args)
    batches = batches_of(args, model, tokenizer, texts)
    assert [len(batch["labels"]) for batch in batches] == [4, 3]
    seen = {}
    for batch in batches:
        for source, target in zip(batch["input_ids"], batch["labels"], strict=True):
            kept = target[target != -100]
            seen[tokenizer.decode(source, skip_special_tokens=True)] = tokenizer.decode(kept, skip_special_tokens=True)
    assert seen == dict(zip(texts["source"], texts["target"], strict=True))


def test_one_file_is_translated(marian, pairs, tmp_path):
    packed = tmp_path / "dev.xx.gz"
    with gzip.open(packed, "wt", encoding="utf-8") as file, open(pairs[0], encoding="utf-8") as plain:
        file.write(plain.read())
    args, model, tokenizer = loaded(marian, "--data", packed, "--max_length", 12)
    texts = read_data(args)
    assert len(texts["source"]) == 7 and "target" not in texts
    own = own_translations(args, model, tokenizer, texts["source"])
    batches = batches_of(args, model, tokenizer, texts)
    rows = [row[row != -100] for batch in batches for row in batch["labels"]]
    assert sorted(tokenizer.batch_decode(rows, skip_special_tokens=True)) == sorted(own)


def test_long_pairs_are_cut_on_both_sides(marian, pairs, capsys):
    args, model, tokenizer = loaded(marian, "--data", *pairs, "--max_length", 1000)
    texts = read_data(args)
    whole = tokenizer(texts["source"])["input_ids"], tokenizer(text_target=texts["target"])["input_ids"]
    most = args.max_length = max(map(len, whole[1])) - 1
    batches = batches_of(args, model, tokenizer, texts)
    for name, side in zip(("input_ids", "labels"), whole, strict=True):
        cut = [row if len(row) <= most else [*row[: most - 1], row[-1]] for row in side]
        pad = tokenizer.pad_token_id
        found = [row[(row != pad) & (row != -100)].tolist() for batch in batches for row in batch[name]]
        assert sorted(found) == sorted(cut)
    long = sum(max(map(len, rows)) > most for rows in zip(*whole, strict=True))
    assert f"cut {long} of 7 sentences to {most} tokens (--max_length)" in capsys.readouterr().out


def test_an_encoder_reads_the_two_columns_of_a_table_together(bert, tmp_path):
    table = tmp_path / "a.csv"
    table.write_text("one,two\nw1 w2,w3\nw4,w5 w6 w7\n")
    args, model, tokenizer = loaded(bert, "--data", table, "--column", "one", "two", "--source_prefix", "w0 ")
    args.max_length = 8  # [CLS] w0 w1 w2 [SEP] w3 [SEP] has 7 tokens, the other row 8
    texts = read_data(args)
    (batch,) = batches_of(args, model, tokenizer, texts)
    assert tokenizer.decode(batch["input_ids"][0]) == "[CLS] w0 w4 [SEP] w5 w6 w7 [SEP]"
    assert batch["token_type_ids"].tolist() == [[0] * 4 + [1] * 4, [0] * 5 + [1] * 2 + [0]]
    args.max_length = 7
    (batch,) = batches_of(args, model, tokenizer, texts)
    assert tokenizer.batch_decode(batch["input_ids"])[1] == "[CLS] w0 w4 [SEP] w5 w6 [SEP]"  # the longer text is cut
    args.max_length = 3
    with pytest.raises(ArgumentError, match=r"--max_length: 3 tokens leave no room for text, the .* adds 3 of its own"):
        batches_of(args, model, tokenizer, texts)


def test_without_a_padding_token_texts_are_padded_with_their_end(bert, tmp_path):
    """As the tokenizer and the config of GPT-2 are, which stay so: they are stored beside the smaller model."""
    text = tmp_path / "text"
    text.write_text("hello\nhello hello hello\n")
    args, model, tokenizer = loaded(bert, "--data", text)
    tokenizer.pad_token, tokenizer.eos_token, model.config.pad_token_id = None, "[SEP]", None
    (batch,) = batches_of(args, model, tokenizer, read_data(args))
    sums = batch["attention_mask"].sum(1).tolist()
    assert sums[0] > sums[1] and tokenizer.pad_token is model.config.pad_token_id is None
    assert set(batch["input_ids"][batch["attention_mask"] == 0].tolist()) == {tokenizer.eos_token_id}
    model.config.pad_token_id = 0  # of a model that names one
    (batch,) = batches_of(args, model, tokenizer, read_data(args))
    assert set(batch["input_ids"][batch["attention_mask"] == 0].tolist()) == {0}


def test_a_length_that_was_never_typed_is_not_said_to_be(marian, tmp_path, capsys):
    long = tmp_path / "long.txt"
    long.write_text("the dog " * 200 + "\nthe dog\n")
    args, model, tokenizer = loaded(marian, "--data", long, "--max_length", 300)
    most = longest(args, model, tokenizer)
    assert most < 300
    for max_length, why in ((300, "this model reads no more"), (most, "--max_length")):
        args.max_length = max_length
        (batch,) = batches_of(args, model, tokenizer, read_data(args))
        assert f"cut 1 of 2 sentences to {most} tokens ({why})" in capsys.readouterr().out
        assert batch["input_ids"].shape == (2, most) and args.max_length == max_length
