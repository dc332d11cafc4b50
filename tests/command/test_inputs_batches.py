"""What a model is shown: texts of a length that it takes, in batches, with labels where it translates."""

import gzip

import commands
import pytest
import torch

from collab_heads.command.inputs import batches_of, fitting, load, longest, read_data, translations
from collab_heads.errors import ArgumentError


def loaded(*argv):
    args = commands.parse("analyze", *argv, "--output_dir", "nowhere")
    return args, *load(args)[:2]


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
    own = translations(args, model, tokenizer, texts["source"])
    batches = batches_of(args, model, tokenizer, texts)
    rows = [row[row != -100] for batch in batches for row in batch["labels"]]
    assert sorted(tokenizer.batch_decode(rows, skip_special_tokens=True)) == sorted(own)


def test_pairs_of_which_one_side_is_too_long_are_left_out(marian, pairs):
    args, model, tokenizer = loaded(marian, "--data", *pairs, "--max_length", 1000)
    texts = read_data(args)
    args.max_length = max(len(row) for row in tokenizer(text_target=texts["target"])["input_ids"]) - 1
    kept = fitting(args, model, tokenizer, texts)
    assert 0 < len(kept["source"]) == len(kept["target"]) < len(texts["source"])
    assert (
        dict(zip(texts["source"], texts["target"], strict=True)).items()
        >= dict(zip(*kept.values(), strict=True)).items()
    )


def test_an_encoder_reads_the_two_columns_of_a_table_together(bert, tmp_path):
    table = tmp_path / "a.csv"
    table.write_text("one,two\nw1 w2,w3\nw4,w5 w6 w7\n")
    args, model, tokenizer = loaded(bert, "--data", table, "--column", "one", "two", "--source_prefix", "w0 ")
    args.max_length = 8  # [CLS] w0 w1 w2 [SEP] w3 [SEP] has 7 tokens, the other row 8
    texts = read_data(args)
    (batch,) = batches_of(args, model, tokenizer, fitting(args, model, tokenizer, texts))
    assert tokenizer.decode(batch["input_ids"][0]) == "[CLS] w0 w4 [SEP] w5 w6 w7 [SEP]"
    assert batch["token_type_ids"].tolist() == [[0] * 4 + [1] * 4, [0] * 5 + [1] * 2 + [0]]
    args.max_length = 7
    assert fitting(args, model, tokenizer, texts) == {"source": ["w1 w2"], "target": ["w3"]}


def test_without_a_padding_token_texts_are_padded_with_their_end(bert, tmp_path):
    """As the tokenizer of GPT-2 is, which stays so: it is stored beside the smaller model."""
    text = tmp_path / "text"
    text.write_text("hello\nhello hello hello\n")
    args, model, tokenizer = loaded(bert, "--data", text)
    tokenizer.pad_token, tokenizer.eos_token = None, "[SEP]"
    (batch,) = batches_of(args, model, tokenizer, read_data(args))
    sums = batch["attention_mask"].sum(1).tolist()
    assert sums[0] > sums[1] and tokenizer.pad_token is None
    assert set(batch["input_ids"][batch["attention_mask"] == 0].tolist()) == {tokenizer.eos_token_id}


def test_a_length_that_was_never_typed_is_not_said_to_be(marian, tmp_path, capsys):
    long = tmp_path / "long.txt"
    long.write_text("the dog " * 200 + "\n")
    args, model, tokenizer = loaded(marian, "--data", long, "--max_length", 300)
    most = longest(args, model, tokenizer)
    assert most < 300
    said = f"--max_length 300: every sentence of {long} is longer, and this model reads {most} tokens at most"
    for max_length, words in ((300, said), (most, f"--max_length {most}: every sentence of {long} is longer")):
        args.max_length = max_length
        with pytest.raises(ArgumentError) as caught:
            fitting(args, model, tokenizer, read_data(args))
        assert str(caught.value) == words and args.max_length == max_length
    long.write_text("the dog " * 200 + "\nthe dog\n")
    args.max_length = 300
    fitting(args, model, tokenizer, read_data(args))
    assert f"left out 1 of 2 sentences of more than {most} tokens" in capsys.readouterr().out
