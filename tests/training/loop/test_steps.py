"""How many optimizer steps a training has, and where in its epochs one lies."""

import pytest
from datasets import Dataset
from later import Later

loop = Later("collab_heads.training.loop.steps")


def steps(num_epochs: float, max_steps: int | None = None):
    """Epochs of 3 and of 4 steps in turn, each of one example."""
    return loop.TrainingSteps(lambda epoch: [[[i]] for i in range(3 + epoch % 2)], num_epochs, max_steps)


@pytest.mark.parametrize(
    "num_epochs, max_steps, total, epochs",
    ((3, None, 10, 3), (2.5, None, 9, 3), (0.5, None, 2, 1), (0, None, 0, 0), (3, 8, 8, 3), (1, 7, 7, 2), (3, 0, 0, 0)),
)
def test_how_many_there_are(num_epochs, max_steps, total, epochs):
    """A part of an epoch is rounded up to whole steps; a number of steps counts before a number of epochs."""
    assert (steps(num_epochs, max_steps).total, steps(num_epochs, max_steps).epochs_begun) == (total, epochs)


def test_a_part_of_an_epoch_is_no_more_than_was_asked_for():
    """1.1 - 1 is a little above 0.1."""
    assert loop.TrainingSteps(lambda _: [[[i]] for i in range(10)], 1.1).total == 11


def test_where_the_next_step_lies():
    """Of epochs that differ in length; after the last step of an epoch it is the first of the next."""
    assert [steps(3).position(done) for done in (0, 2, 3, 6, 7)] == [(0, 0), (0, 2), (1, 0), (1, 3), (2, 0)]


def test_shuffled_steps_take_every_example_once_an_epoch(parse):
    examples = Dataset.from_dict({"input_ids": [[1] * (1 + i % 5) for i in range(50)]})
    for flags in ("", "--group_by_length"):
        made = loop.TrainingSteps.shuffled(parse(f"--num_train_epochs 2 {flags}"), examples, 2, seed=7)
        assert made.total == 2 * 4  # of twice 8 examples
        orders = [[i for step in made.of_epoch(epoch) for batch in step for i in batch] for epoch in (0, 1)]
        assert sorted(orders[0]) == sorted(orders[1]) == list(range(50))
        assert orders[0] != orders[1]
        assert loop.TrainingSteps.shuffled(parse(flags), examples, 2, seed=8).of_epoch(0) != made.of_epoch(0)
