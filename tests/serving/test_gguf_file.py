"""Read a GGUF file without trust, and check what it says: llama.cpp ends the process on some faults."""

import math
import struct

import pytest
from gguf_models import bert, llama_for, word_pieces, written
from opening import layers_of
from tokenizers_made import fast, llama

from collab_heads import prune_heads
from collab_heads.errors import ConfigError
from collab_heads.files.folders import GGUF
from collab_heads.serving.gguf_file import checked_facts, read_gguf

pytest.importorskip("gguf", reason="pip install gguf")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A decoder with each tokenizer, one without any, one of uneven blocks, and an encoder."""
    found = {}
    byte_level = fast("byte-level BPE")
    tokenizers = {"bytes": byte_level, "pieces": llama(tmp_path_factory.mktemp("spm")), "ids": None}
    tokenizers |= {"uneven": byte_level, "encoder": word_pieces()}
    for name, tokenizer in tokenizers.items():
        place = tmp_path_factory.mktemp(name)
        model = bert() if name == "encoder" else llama_for(tokenizer or range(61))
        if name == "uneven":
            prune_heads(model, heads={layers_of(model).attention[1].path: [0, 1]})
        written(model, place, tokenizer=tokenizer)
        found[name] = place / GGUF
    return found


@pytest.mark.parametrize("name", ("bytes", "pieces", "ids", "uneven", "encoder"))
def test_entries_and_shapes_are_those_of_the_package(name, files):
    import gguf

    entries, shapes = read_gguf(files[name])
    reader = gguf.GGUFReader(files[name])
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert entries == expected
    assert shapes == {each.name: each.shape.tolist() for each in reader.tensors}
    facts = checked_facts(entries, shapes)
    assert (facts.width, facts.form.embeds) == (64, name == "encoder")
    assert facts.size == entries[f"{facts.architecture}.vocab_size"]
    assert facts.architecture == {"uneven": "deci", "encoder": "bert"}.get(name, "llama")


@pytest.mark.parametrize("share", (0, 0.00001, 0.001, 0.01))
def test_a_file_that_ends_in_its_entries_is_refused(share, files, tmp_path):
    content = files["pieces"].read_bytes()
    (tmp_path / GGUF).write_bytes(content[: int(share * len(content)) + 3])
    with pytest.raises(ConfigError, match="a length is"):
        read_gguf(tmp_path / GGUF)


HUGE = (1 << 60) + 1
START = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GGML" + bytes(40), "its first bytes is b'GGML'"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(40), "version is 1"),
        (START + struct.pack("<Q", HUGE), "a length is 1152921504606846977"),
        (START + struct.pack("<Q1sIIQ", 1, b"a", 9, 4, HUGE), "a length is"),  # numbers
        (START + struct.pack("<Q1sIIQ", 1, b"a", 9, 8, HUGE), "a length is"),  # texts
        (START + struct.pack("<Q1sIIQ", 1, b"a", 9, 9, 1) + bytes(40), "a type is 9"),  # arrays of arrays
        (START + struct.pack("<Q1sI", 1, b"a", 99), "a type is 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sI", 1, b"a", 9), "the dimensions of a is 9"),
    ],
)
def test_numbers_that_ask_for_room_are_not_trusted(content, message, tmp_path):
    (tmp_path / GGUF).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_gguf(tmp_path / GGUF)


LLAMA, TOKENS = "llama.", "tokenizer.ggml."
CHANGES = [
    ("bytes", "general.architecture", "gemma", "general.architecture is 'gemma', expected .*llama"),
    ("bytes", "general.architecture", ["llama"], "general.architecture is .'llama'."),
    ("bytes", f"{LLAMA}expert_count", 8, "an entry is 'llama.expert_count', expected one that exports have"),
    ("bytes", "split.count", 2, "an entry is 'split.count'"),
    ("bytes", f"{LLAMA}block_count", 0, "llama.block_count is 0"),
    ("bytes", f"{LLAMA}block_count", 600, "llama.block_count is 600, expected a size below 513"),
    ("bytes", f"{LLAMA}context_length", "12", "llama.context_length is '12'"),
    ("bytes", f"{LLAMA}embedding_length", 32, "embedding_length is 32, expected that of token_embd.weight"),
    ("bytes", f"{LLAMA}vocab_size", 1 << 31, "llama.vocab_size is 2147483648"),
    ("bytes", f"{LLAMA}attention.head_count", [4, 4, 4], "head_count is .4, 4, 4., .*each of 2 blocks"),
    ("bytes", f"{LLAMA}attention.head_count", 0, "head_count.* is "),
    ("bytes", f"{LLAMA}attention.head_count_kv", 3, "head_count_kv is 3, expected one that divides the 4 heads"),
    ("uneven", "deci.attention.head_count", [0, 2], "head_count.* is "),
    ("bytes", f"{LLAMA}feed_forward_length", -1, "feed_forward_length is -1"),
    ("bytes", f"{LLAMA}rope.dimension_count", 7, "rope.dimension_count is 7, expected even"),
    ("bytes", f"{LLAMA}attention.key_length", 8, "rope.dimension_count is 16, expected even, and at most 8"),
    ("bytes", f"{LLAMA}attention.layer_norm_rms_epsilon", math.nan, "epsilon is nan, expected a positive number"),
    ("bytes", f"{LLAMA}rope.freq_base", 0.0, "freq_base is 0.0"),
    ("bytes", f"{LLAMA}pooling_type", 1, "llama.pooling_type is 1"),
    ("encoder", "bert.pooling_type", 4, "bert.pooling_type is 4"),
    ("encoder", "bert.attention.causal", True, "bert.attention.causal is True"),
    ("encoder", "collab_heads.normalize", 1, "collab_heads.normalize is 1"),
    ("bytes", f"{TOKENS}model", "rwkv", "tokenizer.ggml.model is 'rwkv', expected one of no_vocab, gpt2, llama"),
    ("bytes", f"{TOKENS}tokens", lambda tokens: tokens[:-1], "tokenizer.ggml.tokens is .*, as embeddings"),
    ("bytes", f"{TOKENS}tokens", lambda tokens: [*tokens[:-1], tokens[7]], "a token is .*, expected there once"),
    ("bytes", f"{TOKENS}tokens", lambda tokens: [*tokens[:-1], 7], "expected texts"),
    ("bytes", f"{TOKENS}bos_token_id", 1 << 20, "bos_token_id is 1048576"),
    ("bytes", f"{TOKENS}token_type", lambda types: [6 for _ in types], "a token of a byte is "),
    ("pieces", f"{TOKENS}tokens", lambda tokens: ["x" * 9 if each == "<0x41>" else each for each in tokens], "a token"),
    ("ids", f"{TOKENS}tokens", ["a"], "tokens is 1, expected not there"),
]


@pytest.mark.parametrize(("name", "entry", "value", "message"), CHANGES)
def test_what_exports_never_say_is_refused(name, entry, value, message, files):
    entries, shapes = read_gguf(files[name])
    checked_facts(entries, shapes)
    entries[entry] = value(entries[entry]) if callable(value) else value
    with pytest.raises(ConfigError, match=message):
        checked_facts(entries, shapes)


def test_a_file_without_embeddings_is_refused(files):
    entries, shapes = read_gguf(files["bytes"])
    with pytest.raises(ConfigError, match="embedding_length is 64"):
        checked_facts(entries, {name: shape for name, shape in shapes.items() if name != "token_embd.weight"})
