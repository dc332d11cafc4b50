"""Heads that change places in run_glue.py: when, which, what else stays, and how such a run goes on."""

import json
from dataclasses import replace

import pytest
import torch
from later import Later
from model_sizes import HEADS
from scripts import checkpoints, from_checkpoints, run
from transformers import AutoModelForSequenceClassification
from translation_script import as_json, differing, weights

import tiny
from collab_heads import CollabHeadsError, rotate_heads
from collab_heads.rotation.exchange import Slot
from collab_heads.training import HeadRotation

loop = Later("collab_heads.training.loop.fine_tune")
classifier = Later("collab_heads.training.runs.classifier")
head_steps = Later("collab_heads.training.runs.head_steps")

PATHS = [f"encoder.layer.{layer}.attention.self" for layer in (0, 1)]
EPOCHS = ("--per_device_train_batch_size", 36, "--num_train_epochs", 4)  # of 3 steps
RANKED = "--importance_samples 32".split()
FIRST = {"role": "enc-self", "layers": [0, 1], "heads": [0, 3]}
SECOND = {"paths": [PATHS[1], PATHS[1]], "heads": [1, 2]}
PAIRS = [[(PATHS[0], 0), (PATHS[1], 3)]], [[(PATHS[1], 1), (PATHS[1], 2)]]


@pytest.fixture
def schedule(tmp_path):
    """Write a schedule; its path."""

    def write(content) -> str:
        path = tmp_path / "rotation.json"
        path.write_text(json.dumps(content))
        return str(path)

    return write


@pytest.mark.slow
def test_heads_change_places_as_scheduled(schedule, bert, files, tmp_path, monkeypatch):
    """The weights are, to the bit, those of a training whose loop calls rotate_heads by hand; moments come along."""
    path, out = schedule({"2": [FIRST], "4": [FIRST, SECOND]}), tmp_path / "out"
    results = run(bert, files, out, *EPOCHS, "--rotation_schedule", path, "--checkpointing_steps", "epoch")
    done = [{"epoch": 2, "kind": "swap", "pairs": PAIRS[0]}, {"epoch": 4, "kind": "swap", "pairs": PAIRS[0] + PAIRS[1]}]
    assert as_json({"found": results["heads"]["rotation"]}, "found") == as_json({"found": done}, "found")
    stored = [json.loads((out / f"epoch_0_{epoch}" / "progress.json").read_text())["rotation"] for epoch in range(1, 5)]
    assert [(state["epoch"], len(state["history"])) for state in stored] == [(1, 0), (2, 1), (3, 1), (4, 2)]
    assert json.loads((out / "all_results.json").read_text())["heads"]["rotation"] == stored[-1]["history"]

    def by_hand(moments: bool):
        def before_epoch(model, epoch, optimizer):
            pairs = {2: PAIRS[0], 4: PAIRS[0] + PAIRS[1]}.get(epoch, [])
            rotate_heads(model, [[Slot(*end) for end in pair] for pair in pairs], optimizer if moments else None)

        return lambda self, hooks: replace(hooks, before_epoch=before_epoch)

    for moments in (True, False):
        monkeypatch.setattr(head_steps.HeadSteps, "add_to", by_hand(moments))
        hand = run(bert, files, tmp_path / str(moments), *EPOCHS)
        assert (differing(out, tmp_path / str(moments)) == []) == moments
        assert (hand["history"] == results["history"]) or not moments
    plain = run(bert, files, tmp_path / "plain", *EPOCHS)
    assert plain["heads"] is None
    assert len(differing(out, tmp_path / "plain")) > 20


def test_before_the_epoch_that_is_named(schedule, bert, files, tmp_path, monkeypatch):
    """Epoch 2 ends with the heads where they are; what starts the next one has them exchanged, W_O as it was."""
    seen, stock = [], loop.optimizer_step

    def step(accelerator, model, *rest):
        seen.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        return stock(accelerator, model, *rest)

    monkeypatch.setattr("collab_heads.training.loop.fine_tune.optimizer_step", step)
    more = (*EPOCHS, "--checkpointing_steps", "epoch", "--rotation_schedule", schedule({"3": [FIRST]}))
    run(bert, files, tmp_path / "out", *more)
    for epoch in (1, 2, 3):
        stored, started = weights(tmp_path / "out" / f"epoch_0_{epoch}"), seen[3 * epoch]
        moved = {name for name in stored if not torch.equal(stored[name], started[name])}
        if epoch != 2:
            assert moved == set()
            continue
        assert len(moved) == 12
        assert all(".attention.self." in name for name in moved)
        for kind in ("query", "key", "value"):
            names = [f"bert.encoder.layer.{layer}.attention.self.{kind}.weight" for layer in (0, 1)]
            assert torch.equal(started[names[0]][:8], stored[names[1]][24:])
            assert torch.equal(started[names[1]][24:], stored[names[0]][:8])


@pytest.fixture
def batches(monkeypatch):
    """The validation batches that runs have measured heads on."""
    seen, stock = [], classifier.Classifier.validation

    def validation(self, **options):
        found = list(stock(self, **options))
        seen[:] = found
        return found

    monkeypatch.setattr(classifier.Classifier, "validation", validation)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("policy, metric", (("hard", "confidence"), ("soft", "l2"), ("local", "l2"), ("random", "l2")))
def test_heads_that_a_policy_chooses(policy, metric, bert, files, tmp_path, batches):
    """By what they do on the validation examples after the epoch before; and back."""
    out = tmp_path / "out"
    more = ("--rotate", policy, "--rotation_metric", metric, "--rotation_start", 2, "--checkpointing_steps", "epoch")
    results = run(bert, files, out, *EPOCHS, *more)
    done = results["heads"]["rotation"]
    assert [(entry["epoch"], entry["kind"]) for entry in done] == [(2, "swap"), (3, "back"), (4, "swap")]
    assert done[1]["pairs"] == done[0]["pairs"][::-1]
    assert len(done[0]["pairs"]) == (2 if policy == "local" else 1)
    for entry in (done[0], done[2]):
        model = AutoModelForSequenceClassification.from_pretrained(out / f"epoch_0_{entry['epoch'] - 1}")
        rotation = HeadRotation(policy=policy, metric=metric, start=2, seed=42, exclude=[tiny.SPECIAL.index("[SEP]")])
        planned = rotation.plan(model, entry["epoch"], batches or None)
        assert [[[end.path, end.head] for end in pair] for pair in planned] == entry["pairs"]
    assert sum(len(batch["labels"]) for batch in batches) == 41
    state = json.loads((out / "epoch_0_2" / "progress.json").read_text())["rotation"]
    assert state["swapped"] == {"enc-self": {"since": 2, "pairs": done[0]["pairs"]}}
    assert json.loads((out / "epoch_0_3" / "progress.json").read_text())["rotation"]["swapped"] == {}


@pytest.mark.slow
def test_gates_and_alphas_beside_rotation(bert, files, tmp_path):
    """Gates leave with their heads, alphas stay; removed heads take no part."""
    more = (*EPOCHS, "--rotate", "hard")
    results = run(bert, files, tmp_path / "gates", *more, "--target_heads", 4, "--selection_share", 0.5, *RANKED)
    assert results["heads"]["pruned"]["removed"] == HEADS
    assert len(results["heads"]["rotation"]) == 4
    chosen = ("--target_heads", 5, "--head_selection", "gradient", *RANKED, "--alpha_mixing")
    results = run(bert, files, tmp_path / "chosen", *more, *chosen)
    kept = {site["path"]: set(site["kept"]) for site in results["heads"]["pruned"]["sites"]}
    kept = {path: kept.get(path, set(range(HEADS))) for path in PATHS}
    swaps = [pair for entry in results["heads"]["rotation"] for pair in entry["pairs"]]
    assert len(swaps) == 4
    assert all(head in kept[path] for pair in swaps for path, head in pair)
    assert run(tmp_path / "chosen", files, None, "--num_train_epochs", 0)["eval_accuracy"] == results["eval_accuracy"]


def test_what_removal_makes_impossible_is_said_before_training(schedule, bert, files, tmp_path, monkeypatch):
    """Not in the epoch that it is for; what the flags alone rule out, before anything is written."""
    monkeypatch.setattr("collab_heads.training.loop.fine_tune.optimizer_step", None)  # nothing may train
    alive = tmp_path / "alive.json"
    alive.write_text('{"enc-self": [[0, 1, 1, 1], [1, 1, 1, 1]]}')
    more = ("--alive_heads", alive, "--rotation_schedule", schedule({"4": [FIRST]}), *EPOCHS)
    with pytest.raises(CollabHeadsError, match=f"head 0 of {PATHS[0]} was removed"):
        run(bert, files, tmp_path / "out", *more)
    more = ("--gate_weight", 0.1, "--gated_sites", PATHS[0], "--rotation_schedule", schedule({"4": [FIRST]}), *EPOCHS)
    with pytest.raises(CollabHeadsError, match="gates"):
        run(bert, files, tmp_path / "other", *more)
    more = ("--gate_weight", 0.1, "--alpha_mixing", "--rotate", "hard", "--rotation_start", 4, *EPOCHS)
    with pytest.raises(CollabHeadsError, match="heads with gates and alphas cannot rotate"):
        run(bert, files, tmp_path / "third", *more)
    more += ("--gated_sites", PATHS[0], "--alpha_sites", "enc-self")
    with pytest.raises(CollabHeadsError, match=f"{PATHS[0]} would have gates and alphas"):
        run(bert, files, tmp_path / "third", *more)
    assert not (tmp_path / "third").exists()
    more = ("--gate_weight", 0.1, "--gated_sites", PATHS[0], "--alpha_mixing", "--alpha_sites", PATHS[1])
    more += ("--rotation_schedule", schedule({"1": [{"paths": [PATHS[1]] * 2, "heads": [0, 1]}]}))
    with pytest.raises(TypeError):  # this can be: the training begins
        run(bert, files, None, *more)


@pytest.mark.parametrize(
    "content, message",
    (
        ({"5": [FIRST]}, "the schedule has epoch 5, the training 4"),
        ({"1": [{**FIRST, "layers": [0, 2]}]}, "the model has no enc-self layer 2"),
        ({"1": [{**FIRST, "heads": [0, 4]}]}, f"head 4 of {PATHS[1]} does not exist"),
        ({"1": [{**FIRST, "role": "dec-enc"}]}, "the model has no dec-enc attention"),
        (
            {"1": [{"paths": [PATHS[0], "encoder.layer.2.attention.self"], "heads": [0, 0]}]},
            "is not the path of a site",
        ),
        ({"1": [{**FIRST, "layers": [1, 1], "heads": [2, 2]}]}, "cannot change places with itself"),
        ({"0": [FIRST]}, "rotation.json: epoch '0' must be 1 or more"),
        ([], "rotation.json: a schedule must be a dict"),
    ),
)
def test_wrong_schedules_are_refused_before_anything_is_written(content, message, schedule, bert, files, tmp_path):
    with pytest.raises(CollabHeadsError, match=message):
        run(bert, files, tmp_path / "out", *EPOCHS, "--rotation_schedule", schedule(content))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "more, message",
    (
        (("--rotation_schedule", "/nowhere/rotation.json"), "/nowhere/rotation.json: .*No such file"),
        (("--rotate", "hard", "--rotation_start", 5), "start 5 is beyond the last epoch, 4"),
        (("--rotate", "hard", "--rotation_count", 5), "count 5 is more than half of the 8 enc-self heads"),
        (("--rotate", "hard", "--rotation_sites", "dec-enc"), "the model has no dec-enc attention"),
        (("--rotate", "hard", "--max_train_steps", 3, "--rotation_start", 2), "start 2 is beyond the last epoch, 1"),
        (("--rotate", "hrad"), r"unknown --rotate 'hrad' \(did you mean 'hard'\?\)"),
    ),
)
def test_wrong_flags_are_refused_before_anything_is_written(more, message, bert, files, tmp_path):
    with pytest.raises(CollabHeadsError, match=message):
        run(bert, files, tmp_path / "out", *EPOCHS, *more)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_schedule_inside_the_output_folder_is_not_overwritten(bert, files, tmp_path):
    out = tmp_path / "out"
    run(bert, files, out, "--max_train_steps", 1)
    (out / "rotation.json").write_text(json.dumps({"1": [FIRST]}))
    more = ("--rotation_schedule", out / "rotation.json", "--overwrite_output_dir")
    with pytest.raises(CollabHeadsError, match=r"would delete .*rotation.json"):
        run(bert, files, out, *more)
    assert (out / "model.safetensors").exists()


RUNS = {
    "cycle": ("--rotate", "hard", "--rotation_frequency", 2, "--checkpointing_steps", 4),
    "epochs": (
        "--rotate",
        "local",
        "--rotation_metric",
        "l2",
        "--checkpointing_steps",
        "epoch",
        "--num_train_epochs",
        3,
    ),
    "random": ("--rotate", "random", "--checkpointing_steps", 6),  # at the ends of epochs
    "gates": ("--rotate", "hard", "--target_heads", 4, *RANKED, "--selection_share", 0.8, "--checkpointing_steps", 4),
    "bf16": ("--rotate", "soft", "--mixed_precision", "bf16", "--checkpointing_steps", 5),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
@from_checkpoints
def test_resuming_in_one_process(name, resumed, bert, files, tmp_path):
    """From checkpoints of a run, in place: the same end; in an epoch, between two, swapped and not."""
    more, out = (*EPOCHS, *RUNS[name]), tmp_path / "out"
    whole = run(bert, files, out, *more)
    expected = weights(out)
    for folder in checkpoints(out, resumed, count={"random": 2, "bf16": 2}.get(name, 3)):
        found = run(bert, files, out, *more, "--resume_from_checkpoint", folder)
        assert as_json(found, "history", "heads") == as_json(whole, "history", "heads")
        assert differing(weights(out), expected) == []


@pytest.mark.slow
def test_a_schedule_resumes_and_another_does_not_continue_it(schedule, bert, files, tmp_path):
    """Also where the file has changed under the same name."""
    path, out = schedule({"2": [FIRST], "3": [SECOND]}), tmp_path / "out"
    more = (*EPOCHS, "--rotation_schedule", path, "--gradient_accumulation_steps", 2, "--checkpointing_steps", 3)
    whole = run(bert, files, out, *more)
    expected = weights(out)
    for step in (3, 6):  # in epoch 2 of 2 steps each, and at the end of epoch 3
        found = run(bert, files, out, *more, "--resume_from_checkpoint", out / f"step_0_{step}")
        assert as_json(found, "history", "heads") == as_json(whole, "history", "heads")
        assert differing(weights(out), expected) == []
    schedule({"2": [FIRST], "4": [SECOND]})
    with pytest.raises(CollabHeadsError, match="not the state of this rotation: schedule"):
        run(bert, files, out, *more, "--resume_from_checkpoint", out / "step_0_3")
    with pytest.raises(CollabHeadsError, match="rotate was None and is 'hard'"):
        run(bert, files, out, *EPOCHS, "--rotate", "hard", "--resume_from_checkpoint", out / "step_0_3")
