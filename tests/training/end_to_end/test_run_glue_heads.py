"""Gates and pruning in the script, from end to end: what is kept, what is written, resuming, and processes."""

import json
from pathlib import Path

import pytest
import torch
from later import run_glue
from model_sizes import HEADS
from opening import record_of
from safetensors.torch import load_file
from scripts import (
    ADAM32,
    LAUNCH,
    SWAP,
    checkpoints,
    finish,
    flags,
    fork,
    from_checkpoints,
    kill_at,
    run,
    run_on_two,
    start,
)
from slow_cases import slow
from transformers import AutoModelForSequenceClassification

import tiny
from collab_heads import CollabHeadsError, get_adapter, prune_heads

NARROW = [*SWAP[:1], "--dim_shared_query_key", "0.5", *SWAP[3:]]  # a share: some heads are gone before the last swap
RANKED = "--importance_samples 32".split()  # they must not be many


def kept(folder: Path) -> list[tuple[int, ...]]:
    """Which heads the saved config keeps; the model that loads has them, and no gates."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    record = record_of(model).sites
    assert all(state.gates is None for state in record.values())
    sites = get_adapter(model).sites(model)
    found = [record[s.path].kept if s.path in record and record[s.path].kept is not None else None for s in sites]
    found = [tuple(range(HEADS)) if one is None else one for one in found]
    assert [len(one) for one in found] == [site.num_heads for site in sites]
    return found


def check(results: dict, out: Path, number: int | None = None) -> None:
    """Results, file, config and model say the same about the heads that are left."""
    assert json.loads((out / "all_results.json").read_text()) == json.loads(json.dumps(results))
    found, pruned = kept(out), results["heads"]["pruned"]
    of_results = {site["path"]: site["kept"] for site in pruned["sites"]}
    paths = [f"encoder.layer.{layer}.attention.self" for layer in (0, 1)]
    assert [tuple(of_results.get(path, range(HEADS))) for path in paths] == found
    assert pruned["removed"] == 2 * HEADS - sum(map(len, found))
    assert number is None or sum(map(len, found)) == number
    model = AutoModelForSequenceClassification.from_pretrained(out)
    assert model.num_parameters() == results["parameters"]


@pytest.mark.parametrize("target", ("3", *slow("enc-self=1")))
def test_an_exact_number_of_heads_is_kept(target, bert, files, tmp_path):
    results = run(bert, files, tmp_path / "out", "--target_heads", target, *RANKED)
    number = int(target[-1])
    check(results, tmp_path / "out", number)
    assert list(results["stages"]) == ["fine_tuned", "pruned"]
    assert results["stages"]["pruned"] == results["stages"]["fine_tuned"]
    gates = results["heads"]["gates"]
    assert (gates["heads"], gates["open"], gates["decided"]) == (8, number, 8)
    assert [tuple(site["open"]) for site in gates["sites"]] == kept(tmp_path / "out")
    loaded = run(tmp_path / "out", files, None, "--num_train_epochs", 0)
    assert loaded["stages"] == {"loaded": results["stages"]["pruned"]}


@pytest.mark.slow
def test_a_weight_leaves_as_many_as_it_leaves(bert, files, tmp_path):
    """And a weight of 0 all of them."""
    more = ("--gate_learning_rate", 0.2)
    results = run(bert, files, tmp_path / "out", "--gate_weight", 0.01, *more)
    check(results, tmp_path / "out", results["heads"]["gates"]["open"])
    assert 0 < results["heads"]["gates"]["open"] < 2 * HEADS
    assert results["stages"]["pruned"] == results["stages"]["fine_tuned"]
    assert run(bert, files, None, "--gate_weight", 0.0, *more)["heads"]["pruned"]["removed"] == 0


@pytest.mark.slow
def test_heads_that_are_not_learned_go_before_training(bert, files, tmp_path):
    alive = tmp_path / "alive.json"
    alive.write_text('{"enc-self": [[0, 1, 0, 1], [0, 0, 0, 0]]}')
    target = ("--target_heads", 3, *RANKED)
    ways = {
        "file": ("--alive_heads", alive),
        "importance": (*target, "--head_selection", "gradient"),
        "reconstruction": (*target, "--head_selection", "reconstruction"),
        "random": (*target, "--head_selection", "random"),
        "learned": target,
    }
    found = {}
    for name, more in ways.items():
        results = run(bert, files, tmp_path / name, *more, "--max_train_steps", 6)
        check(results, tmp_path / name, 2 if name == "file" else 3)
        found[name] = kept(tmp_path / name)
        stages = ["fine_tuned", "pruned"] if name == "learned" else ["pruned", "fine_tuned"]
        assert list(results["stages"]) == stages
        assert ("gates" in results["heads"]) == (name == "learned")
        assert (results["heads"]["pruned"]["sites"][0]["share_lost"] is not None) == (name == "reconstruction")
    assert found["file"] == [(1, 3), ()]
    assert found["importance"] != found["random"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "swap, stages",
    (
        ("between", ["fine_tuned", "swapped", "fine_tuned_again", "pruned"]),
        ("before", ["swapped", "fine_tuned", "pruned"]),
        ("after", ["fine_tuned", "pruned", "swapped"]),
    ),
)
def test_pruning_and_the_swap_go_together(swap, stages, bert, files, tmp_path):
    """Heads are learned in the last training."""
    more = (*NARROW, "--swap", swap, "--target_heads", 3, "--num_train_epochs", 1, *RANKED)
    results = run(bert, files, tmp_path / "out", *more)
    check(results, tmp_path / "out", 3)
    assert list(results["stages"]) == stages
    before = stages[stages.index("pruned") - 1]
    assert results["stages"]["pruned"] == results["stages"][before]
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert any(name.endswith("mixing") for name in names)
    # of all heads before they go, of those left after
    assert sum(site["dim"] for site in results["swap"]["sites"]) == (12 if swap == "after" else 32)


@pytest.mark.slow
def test_chosen_heads_go_after_the_swap(bert, files, tmp_path):
    more = (*NARROW, "--swap", "between", "--target_heads", 3, "--head_selection", "gradient", *RANKED)
    results = run(bert, files, tmp_path / "out", *more, "--num_train_epochs", 1)
    check(results, tmp_path / "out", 3)
    assert list(results["stages"]) == ["fine_tuned", "swapped", "pruned", "fine_tuned_again"]


@pytest.mark.slow
def test_a_pruned_model_is_trained_swapped_and_pruned_on(bert, files, tmp_path):
    """Also where a site has no heads left."""
    alive = tmp_path / "alive.json"
    alive.write_text('{"encoder.layer.1.attention.self": [0, 0, 0, 0]}')
    run(bert, files, tmp_path / "first", "--alive_heads", alive, "--max_train_steps", 2)
    more = (*SWAP, "--target_heads", 2, "--max_train_steps", 3, *RANKED)
    results = run(tmp_path / "first", files, tmp_path / "second", *more)
    assert list(results["stages"]) == ["loaded", "swapped", "fine_tuned", "pruned"]
    assert [len(heads) for heads in kept(tmp_path / "second")] == [2, 0]
    assert [site["path"] for site in results["swap"]["sites"]] == ["encoder.layer.0.attention.self"]
    with pytest.raises(CollabHeadsError, match="target_heads is 5, must be a whole number from 0 to the 4 heads"):
        run(tmp_path / "first", files, tmp_path / "third", "--target_heads", 5)
    assert not (tmp_path / "third").exists()


@pytest.mark.slow
def test_numbers_of_heads_are_tracked(bert, files, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "out"
    run(
        bert,
        files,
        out,
        "--target_heads",
        3,
        "--with_tracking",
        "--logging_steps",
        7,
        "--selection_share",
        0.5,
        *RANKED,
    )
    events = EventAccumulator(str(out / "logs" / "glue"))
    events.Reload()
    points = {point.step: point.value for point in events.Scalars("heads_open")}
    assert points == {7: 6.0, 14: 3.0, 21: 3.0, 28: 3.0}
    assert events.Scalars("heads_sparsity")[-1].value == 0.625


CHOSEN = ("--target_heads", 3, "--head_selection", "gradient", *RANKED)
LEARNED = ("--target_heads", 3, "--selection_share", 0.8, *RANKED)  # falls for 23 of 28 steps


def differing(folder: Path, other: Path) -> list[str]:
    """Names of the weights that are not the same to the last bit."""
    weights, expected = (load_file(path / "model.safetensors") for path in (folder, other))
    assert weights.keys() == expected.keys()
    return [name for name in weights if not torch.equal(weights[name], expected[name])]


def as_json(results: dict, *names: str) -> list[str]:
    """As the file has them: tuples are lists there."""
    return [json.dumps(results[name]) for name in names]


@pytest.mark.slow
def test_a_run_killed_in_the_selection_ends_as_an_unbroken_one(bert, files, tmp_path):
    more = (*LEARNED, "--checkpointing_steps", 5)
    unbroken = run(bert, files, tmp_path / "unbroken", *more)
    out = tmp_path / "killed"
    kill_at(out / "step_0_10", fork(run_glue.main, flags(bert, files, out, *more)))
    assert not (out / "all_results.json").exists()
    resumed = run(bert, files, out, *more, "--resume_from_checkpoint")
    assert as_json(resumed, "history", "heads") == as_json(unbroken, "history", "heads")
    assert differing(out, tmp_path / "unbroken") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    (
        (*LEARNED, "--max_train_steps", 6, "--checkpointing_steps", 2),  # before, in and after the selection
        (*LEARNED, "--max_train_steps", 4, "--checkpointing_steps", 3, *NARROW, "--swap", "between"),
        ("--gate_weight", 0.5, "--max_train_steps", 6, "--checkpointing_steps", 2),
        (*CHOSEN, "--max_train_steps", 4, "--checkpointing_steps", 3, *NARROW, "--swap", "between"),
    ),
    ids=("learned", "learned-between", "weight", "importance-between"),
)
@from_checkpoints
def test_resuming_in_one_process(more, resumed, bert, files, tmp_path):
    """From checkpoints of a run, in place: the same end; before heads go, while they go and afterwards."""
    out, copy = tmp_path / "out", tmp_path / "copy"
    whole = run(bert, files, out, *more)
    copy.mkdir()
    (copy / "model.safetensors").write_bytes((out / "model.safetensors").read_bytes())
    for folder in checkpoints(out, resumed):
        found = run(bert, files, out, *more, "--resume_from_checkpoint", folder)
        assert as_json(found, "history", "heads") == as_json(whole, "history", "heads")
        assert differing(out, copy) == []


@pytest.mark.slow
def test_another_target_does_not_continue_a_run(bert, files, tmp_path):
    more = ("--max_train_steps", 2, "--checkpointing_steps", 1, *RANKED)
    run(bert, files, tmp_path / "out", "--target_heads", "enc-self=3", *more)
    for other, message in (("enc-self=4", "{'enc-self': 3} and is {'enc-self': 4}"), ("3", "and is 3")):
        with pytest.raises(CollabHeadsError, match=f"target_heads was .*{message[-8:-1]}"):
            run(bert, files, tmp_path / "out", "--target_heads", other, *more, "--resume_from_checkpoint")
    run(bert, files, tmp_path / "out", "--target_heads", "enc-self=3", *more, "--resume_from_checkpoint")


@pytest.mark.slow
def test_two_processes_keep_the_heads_of_one(files, tmp_path):
    """Without dropout, whose random numbers differ: ranking, subsets, weights and metrics are the same."""
    bert = tiny.save_tiny_bert(tmp_path / "bert", dropout=0.0)
    learned = (*LEARNED, "--max_train_steps", 12)
    one = run(bert, files, tmp_path / "one", *learned)
    more = (*learned, "--per_device_train_batch_size", 4)
    run_on_two(run_glue.main, flags(bert, files, tmp_path / "two", *more))
    two = json.loads((tmp_path / "two" / "all_results.json").read_text())
    assert (one["processes"], two["processes"]) == (1, 2)
    assert two["stages"] == one["stages"]
    assert kept(tmp_path / "two") == kept(tmp_path / "one")
    weights, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "one"))
    for name in expected:
        if name.endswith("key.bias"):
            continue  # its gradient is 0 but for rounding, of which Adam makes steps
        torch.testing.assert_close(weights[name], expected[name], rtol=0, atol=ADAM32)


@pytest.mark.slow
def test_two_processes_choose_the_same_heads(files, tmp_path):
    """The first one measures, all remove."""
    bert = tiny.save_tiny_bert(tmp_path / "bert", dropout=0.0)
    more = ("--target_heads", 3, "--head_selection", "gradient", *RANKED)
    run(bert, files, tmp_path / "one", *more)
    finish(start([*LAUNCH, *flags(bert, files, tmp_path / "two", *more, "--per_device_train_batch_size", 4)]))
    assert kept(tmp_path / "two") == kept(tmp_path / "one")


@pytest.mark.parametrize(
    "more, message",
    (
        (("--target_heads", 9), "target_heads is 9, must be a whole number from 0 to the 8 heads"),
        (("--target_heads", 0), "would empty a role"),
        (("--target_heads", "dec-enc=1"), "the model has no dec-enc attention"),
        (("--target_heads", 3, "--gate_weight", 1), "exclude each other"),
        (("--target_heads", 3, "--max_train_steps", 0), "--max_train_steps is 0"),
        (("--head_selection", "random"), "needs --target_heads"),
        (("--alive_heads", "/nowhere/alive.json"), "--alive_heads /nowhere/alive.json: .*No such file"),
        (("--gate_weight", 1, "--gated_sites", "enc-sefl"), "did you mean 'enc-self'"),
    ),
)
def test_what_cannot_work_is_refused_before_anything_is_written(more, message, bert, files, tmp_path):
    with pytest.raises(CollabHeadsError, match=message):
        run(bert, files, tmp_path / "out", *more)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_configuration_inside_the_output_folder_is_not_overwritten(bert, files, tmp_path):
    out = tmp_path / "out"
    run(bert, files, out, "--max_train_steps", 1)
    (out / "alive.json").write_text('{"enc-self": [[1, 1, 1, 1], [1, 0, 1]]}')
    with pytest.raises(CollabHeadsError, match="has 4 heads, the list 3 values"):
        run(bert, files, tmp_path / "other", "--alive_heads", out / "alive.json")
    assert not (tmp_path / "other").exists()
    with pytest.raises(CollabHeadsError, match=r"would delete .*alive.json"):
        run(bert, files, out, "--alive_heads", out / "alive.json", "--overwrite_output_dir")
    assert (out / "model.safetensors").exists()


def test_a_model_with_gates_is_refused_before_anything_is_written(bert, files, tmp_path):
    """A checkpoint from the middle of a selection, say."""
    run(bert, files, tmp_path / "first", *LEARNED, "--max_train_steps", 4, "--checkpointing_steps", 2)
    middle = tmp_path / "first" / "step_0_2"
    with pytest.raises(CollabHeadsError, match="has gates already: prune_heads or fold_heads"):
        run(middle, files, tmp_path / "out", "--target_heads", 3)
    assert not (tmp_path / "out").exists()
    report = prune_heads(AutoModelForSequenceClassification.from_pretrained(middle))
    assert report.removed == 2  # of 5, after 2 of ceil(0.8 * 4) steps
