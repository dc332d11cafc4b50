import copy

import pytest
import torch
from transformers import AutoTokenizer, BertConfig, LlamaConfig

import tiny
from collab_heads.data.batches import (
    longest_first,
    padding_multiple,
    share_of_process,
    shuffled_steps,
    token_steps,
    with_padding,
)
from collab_heads.errors import ArgumentError

LENGTHS = [(7 * i) % 31 for i in range(205)]


@pytest.mark.parametrize(
    "precision, longest, limit, expected",
    (("no", 60, None, 1), ("bf16", 60, None, 8), ("bf16", 60, 64, 8), ("fp16", 60, 60, 1), ("bf16", 56, 56, 8)),
)
def test_half_precision_pads_to_multiples_that_the_model_can_read(precision, longest, limit, expected):
    assert padding_multiple(precision, longest, limit) == expected


@pytest.mark.parametrize("lengths", (None, LENGTHS))
def test_every_example_once_per_epoch(lengths):
    steps = shuffled_steps(205, 8, 3, seed=0, epoch=0, lengths=lengths)
    assert sorted(i for step in steps for batch in step for i in batch) == list(range(205))
    assert len(steps) == 9  # ceil(205 / 24)
    assert all(len(batch) <= 8 for step in steps for batch in step)
    assert sum(len(step) < 3 for step in steps) <= 1


@pytest.mark.parametrize("lengths", (None, LENGTHS))
def test_order_depends_on_seed_and_epoch_only(lengths):
    first = shuffled_steps(205, 8, 3, seed=0, epoch=0, lengths=lengths)
    assert first == shuffled_steps(205, 8, 3, seed=0, epoch=0, lengths=lengths)
    assert first != shuffled_steps(205, 8, 3, seed=0, epoch=1, lengths=lengths)
    assert first != shuffled_steps(205, 8, 3, seed=1, epoch=0, lengths=lengths)


@pytest.mark.parametrize("processes, accumulation, size", ((1, 4, 6), (2, 2, 6), (4, 1, 6), (2, 1, 12)))
def test_steps_hold_the_same_examples_however_they_are_shared_out(processes, accumulation, size):
    """Processes x accumulation x batch is 24 in all cases: so is what each step sees."""
    reference = [sorted(batch) for (batch,) in shuffled_steps(205, 24, 1, seed=3, epoch=2)]
    steps = shuffled_steps(205, size, processes * accumulation, seed=3, epoch=2)
    assert [sorted(i for batch in step for i in batch) for step in steps] == reference
    for step in steps:
        shares = [share_of_process(step, rank, processes) for rank in range(processes)]
        assert len({len(share) for share in shares}) == 1  # else one process would wait for ever
        assert sorted(i for share in shares for batch in share for i in batch) == sorted(i for b in step for i in b)


def test_the_last_step_may_leave_a_process_without_examples():
    step = shuffled_steps(3, 4, 2, seed=0, epoch=0)[0]
    assert sorted(share_of_process(step, 0, 2)[0]) == [0, 1, 2]
    assert share_of_process(step, 1, 2) == [[]]


def test_lengths_are_grouped():
    def padding(lengths):
        steps = shuffled_steps(205, 8, 1, seed=0, epoch=0, lengths=lengths)
        return sum(max(LENGTHS[i] for i in batch) * len(batch) for step in steps for batch in step)

    assert padding(LENGTHS) < 0.8 * padding(None)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(tiny.save_tiny_bert(tmp_path_factory.mktemp("encoder")))


@pytest.fixture
def without(tokenizer):
    """A tokenizer without a padding token that ends texts with token 2, as GPT-2's."""
    without = copy.deepcopy(tokenizer)
    without.pad_token, without.eos_token = None, tokenizer.convert_ids_to_tokens(2)
    return without


def test_texts_are_padded_as_a_model_expects(tokenizer, without):
    own, other = tokenizer.pad_token_id, 7
    assert own not in (2, other)
    for config in (LlamaConfig(pad_token_id=own), LlamaConfig(pad_token_id=None), BertConfig(pad_token_id=other)):
        assert with_padding(tokenizer, config) is tokenizer
    assert with_padding(tokenizer, LlamaConfig(pad_token_id=other)).pad_token_id == other
    assert with_padding(tokenizer, LlamaConfig(pad_token_id=len(tokenizer))) is tokenizer  # no token
    assert with_padding(without, LlamaConfig(pad_token_id=None)).pad_token_id == 2
    assert with_padding(without, LlamaConfig(pad_token_id=-1)).pad_token_id == 2
    assert with_padding(without, BertConfig(pad_token_id=other)).pad_token_id == other
    assert tokenizer.pad_token_id == own and without.pad_token is None  # they stay as they were


def test_nothing_to_pad_with(without):
    without.eos_token = None
    with pytest.raises(ArgumentError, match="no padding token and no end token, so batches cannot be made: set its"):
        with_padding(without, LlamaConfig(pad_token_id=None))


def test_evaluation_starts_with_the_longest():
    batches = longest_first([3, 9, 5, 1], 3)
    assert batches == [[1, 2, 0], [3]]


TOKENS = [1 + (7 * i) % 31 for i in range(205)] + [90, 64]  # two are longer than a batch may be, or just as long


@pytest.mark.parametrize("pool", (1, 100))
@pytest.mark.parametrize("batches", (1, 3))
def test_batches_of_tokens_hold_every_example_once(pool, batches):
    steps = token_steps(TOKENS, 64, batches, seed=0, epoch=0, pool=pool)
    assert sorted(i for step in steps for batch in step for i in batch) == list(range(207))
    assert [len(step) for step in steps[:-1]] == [batches] * (len(steps) - 1)
    assert 1 <= len(steps[-1]) <= batches
    assert all(batch for step in steps for batch in step)


def padded(batch: list[int]) -> int:
    """Tokens, padding included."""
    return len(batch) * max(TOKENS[i] for i in batch)


def test_batches_of_tokens_are_full_and_not_too_full():
    filled = [batch for step in token_steps(TOKENS, 64, 2, seed=0, epoch=0) for batch in step]
    assert [batch for batch in filled if padded(batch) > 64] == [[205]]
    assert [206] in filled
    assert max(map(padded, filled)) == 90
    assert sum(TOKENS) / sum(map(padded, filled)) > 0.9  # like lengths together
    assert len(filled) < 1.25 * sum(TOKENS) / 64


def test_the_order_of_batches_of_tokens_depends_on_seed_and_epoch_only():
    first = token_steps(TOKENS, 64, 2, seed=0, epoch=0)
    torch.manual_seed(1)
    assert first == token_steps(TOKENS, 64, 2, seed=0, epoch=0)
    others = [token_steps(TOKENS, 64, 2, seed=seed, epoch=epoch) for seed, epoch in ((0, 1), (1, 0))]
    assert all(sorted(i for step in other for b in step for i in b) == list(range(207)) for other in others)
    assert first not in others
    assert others[0] != others[1]
    lengths = [max(TOKENS[i] for i in step[0]) for step in first]
    assert lengths not in (sorted(lengths), sorted(lengths, reverse=True))  # long ones do not all come first


@pytest.mark.parametrize("processes, accumulation", ((1, 4), (2, 2), (4, 1)))
def test_steps_of_tokens_are_shared_out(processes, accumulation):
    reference = token_steps(TOKENS, 64, 4, seed=3, epoch=2)
    steps = token_steps(TOKENS, 64, processes * accumulation, seed=3, epoch=2)
    assert steps == reference
    for step in steps:
        shares = [share_of_process(step, rank, processes) for rank in range(processes)]
        assert {len(share) for share in shares} == {min(accumulation, -(-len(step) // processes))}
        assert sorted(b for share in shares for b in share if b) == sorted(step)
