"""The errors of sites on examples that are held out, and which those are."""

import json

import pytest
import torch
from compressing import batches_of
from model_sizes import VOCABULARY

from collab_heads import plan
from collab_heads.compression import measurements
from collab_heads.compression.measurements import FEWEST, HELD_OUT, MEASURED, fewer, hold_out
from collab_heads.errors import CalibrationError
from families import FAMILIES


@pytest.mark.slow
def test_errors_of_sites_are_those_of_examples_that_are_held_out():
    """Every part of every site, at every size: other held-out examples give other errors, with the same fits."""
    family, found = FAMILIES["bert"], []
    for seed in (0, 1):
        batches = batches_of(family, 8)
        for i, each in enumerate(batches):
            is_held = torch.arange(i * 3, i * 3 + 3) % HELD_OUT == HELD_OUT - 1
            other = torch.randint(3, VOCABULARY, each["input_ids"].shape, generator=torch.Generator().manual_seed(seed))
            each["input_ids"][is_held] = other[is_held]
        made = plan(family.build(), batches, refine_steps=0)
        found.append(
            [
                (path, part, size, error)
                for path, of_site in made.measured.errors.items()
                for part, errors in of_site.errors.items()
                for size, error in errors.items()
                if size
            ]
        )
    assert {part for _, part, _, _ in found[0]} == {"heads", "query_key", "values", "neurons"}
    same = [one for one, other in zip(*found, strict=True) if one == other]
    assert not same


def batch(start, count):
    return {"input_ids": torch.arange(start, start + count)[:, None], "n": 3}


def numbers(batches):
    return [int(row) for batch in batches for row in batch["input_ids"]]


def test_one_example_of_eight_in_whatever_batches():
    for sizes in ((40,), (3, 3, 3, 3, 3, 25), (1,) * 40):
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        fitted, held = hold_out(batch(start, size) for start, size in zip(starts, sizes, strict=True))
        assert numbers(held) == list(range(HELD_OUT - 1, 40, HELD_OUT))
        assert sorted(numbers(fitted) + numbers(held)) == list(range(40))
        assert all(part["n"] == 3 for part in [*fitted, *held])


def test_no_more_examples_are_measured_on_than_needed():
    fitted, held = hold_out([batch(0, 1000), batch(1000, 1048)])
    assert numbers(held) == list(range(31, 2048, 32)) and len(numbers(held)) == MEASURED
    assert sorted(numbers(fitted) + numbers(held)) == list(range(2048))


def test_few_examples(warnings_logged):
    fitted, held = hold_out([batch(0, 3)])
    assert (numbers(fitted), numbers(held)) == ([0, 1], [2])
    fitted, held = hold_out([batch(0, 1), batch(1, 1)])
    assert (numbers(fitted), numbers(held)) == ([0], [1]) and not warnings_logged.messages
    fitted, held = hold_out([batch(0, 1)])
    assert (numbers(fitted), numbers(held)) == ([0], [0])
    assert "one calibration example" in warnings_logged.text and "Pass at least 8" in warnings_logged.text


def test_batches_that_cannot_be_divided_stay_whole():
    whole = [{"input_ids": torch.zeros(2, 3), "positions": torch.zeros(5), "i": i} for i in range(9)]
    fitted, held = hold_out(whole)
    assert [each["i"] for each in held] == [7]
    assert [each["i"] for each in fitted] == [0, 1, 2, 3, 4, 5, 6, 8]


def test_what_is_no_batch_is_refused():
    with pytest.raises(CalibrationError, match="batches is empty"):
        hold_out([])
    with pytest.raises(CalibrationError, match="holds no examples"):
        hold_out([batch(0, 0)])
    family = FAMILIES["bert"]
    first, *_ = batches_of(family)
    with pytest.raises(CalibrationError, match="batch 1 holds no examples"):
        plan(family.build(), [first, {name: value[:0] for name, value in first.items()}])


def test_sensitivities_are_measured_on_an_even_sample_of_long_texts():
    """Of 40 examples of 50 positions every second one is read: about as many positions as are asked for."""
    batches = [{"input_ids": torch.arange(20)[:, None].repeat(1, 50) + start} for start in (0, 20)]
    few = fewer(batches, 1000)
    assert torch.cat([batch["input_ids"][:, 0] for batch in few]).tolist() == list(range(1, 40, 2))
    assert len(torch.cat([batch["input_ids"] for batch in fewer(batches, 1)])) == FEWEST
    assert fewer(batches, 2000) is batches
    images = [{"pixel_values": torch.zeros(40, 3, 8, 8)}]
    assert fewer(images, 10) is images


@pytest.mark.slow
def test_the_sensitivities_of_a_plan_are_measured_on_few_positions(monkeypatch):
    model, seen = FAMILIES["bert"].build(), []
    monkeypatch.setattr(measurements, "PROBED", 70)
    inner = measurements.Probe.error

    def noted(probe):
        seen.append(sum(batch["input_ids"].numel() for batch in probe.batches))
        return inner(probe)

    monkeypatch.setattr(measurements.Probe, "error", noted)
    made = plan(model, batches_of(FAMILIES["bert"], 64), sites="enc-ffn", refine_steps=0)
    whole = sum(batch["input_ids"].numel() for batch in made.measured.probe.batches)
    assert seen and set(seen) == {seen[0]} and 35 <= seen[0] <= 105 < whole
    made.measure([0.5])
    assert seen[-1] == whole


@pytest.mark.parametrize("factor", (1.0, 1e3))
def test_a_curve_is_not_that_of_one_token_of_outlying_norm(factor, tmp_path):
    """In many decoders the neurons of the first token have a hundred times the norm of those of others."""
    model = FAMILIES["llama"].build()
    batches = [{"input_ids": torch.randint(8, VOCABULARY, (40, 12), generator=torch.Generator().manual_seed(0))}]
    factors = torch.ones(12, 1)
    batches[0]["input_ids"][:, 0] = 7
    factors[0] = factor
    model.model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda _, args: args[0] * factors)
    plan(model, batches, parts="neurons", refine_steps=0, measurements=tmp_path / "measured.json")
    stored = json.loads((tmp_path / "measured.json").read_text())
    curve = dict(stored["sites"]["layers.0.mlp"]["neurons"]["errors"])
    assert 0.05 < curve[16] < 0.3 and curve[0] == 1


def test_batches_that_cannot_be_divided_count_as_one_each():
    whole = [{"input_ids": torch.zeros(20, 128), "position_ids": torch.zeros(1, 128), "i": i} for i in range(4)]
    assert fewer(whole, 1000) is whole
    many = whole * 4
    assert len(fewer(many, 1000)) == len(many) // 2
