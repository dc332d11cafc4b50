"""Fewer than 128 examples: every function that fits to them, ranks or measures on them says so."""

import pytest
import torch
from model_inputs import batch

import collab_heads
from collab_heads.base.report import loss_in_words
from collab_heads.heads.report import PrunedSite, PruneReport
from families import FAMILIES

CALLS = {
    "swap": lambda model, batches: collab_heads.swap_to_collaborative(
        model, dim_shared_query_key=16, batches=batches, refine_steps=0
    ),
    "prune": lambda model, batches: collab_heads.prune_heads(model, batches, keep=4),
    "named": lambda model, batches: collab_heads.prune_heads(model, batches, heads={"enc-self": [[0], []]}),
    "neurons": lambda model, batches: collab_heads.prune_neurons(model, batches, keep=0.5),
    "importance": lambda model, batches: collab_heads.analysis.head_importance(
        model, batches, criterion="reconstruction"
    ),
    "plan": lambda model, batches: collab_heads.plan(model, batches, parts=["heads"], refine_steps=0),
    "compress": lambda model, batches: collab_heads.compress(model, batches, 0.8, parts=["heads"], refine_steps=0),
    "analyze": lambda model, batches: collab_heads.analyze_heads(model, batches, parts=["statistics"], exclude=[]),
}


def examples(count: int) -> list[dict]:
    torch.manual_seed(0)
    return [{"input_ids": torch.randint(5, 30, (count // 4, 6))} for _ in range(4)]


@pytest.mark.parametrize("name", CALLS)
def test_few_examples_are_counted(name, warnings_logged):
    CALLS[name](FAMILIES["bert"].build(), examples(124))
    assert warnings_logged.text.count("124 examples are few") == 1
    warnings_logged.clear()
    CALLS[name](FAMILIES["bert"].build(), examples(128))
    assert "are few" not in warnings_logged.text


def test_batches_that_are_read_once_are_counted_while_they_are_read(warnings_logged):
    collab_heads.prune_heads(FAMILIES["bert"].build(), iter(examples(16)), heads={"enc-self": [[0], []]})
    assert warnings_logged.text.count("16 examples are few") == 1


def test_batches_of_an_unknown_number_of_examples_are_not_said_to_be_few(warnings_logged):
    odd = batch() | {"position_ids": torch.arange(batch()["input_ids"].shape[1])[None]}
    collab_heads.prune_heads(FAMILIES["bert"].build(), [odd], heads={"enc-self": [[0], []]})
    assert "are few" not in warnings_logged.text


@pytest.mark.parametrize("share, said", ((0.19, ""), (0.2, "much of the output"), (0.67, "most of the output")))
def test_a_large_loss_is_said_in_words(share, said):
    assert said in loss_in_words(share) and bool(loss_in_words(share)) == bool(said)
    site = PrunedSite("a", "enc-self", 4, 1, (0,), 8, 4, 0, 0, share_lost=share)
    lines = str(PruneReport((site,), 8, 4)).splitlines()
    assert ("note: " in lines[-1]) == bool(said) and said in lines[-1]
