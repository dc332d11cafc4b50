"""A run of run_translation.py that was stopped ends as an unbroken one; two processes do what one does."""

import json
import shutil

import pytest
import torch
from later import run_translation
from scripts import ADAM32, checkpoints, finish, fork, from_checkpoints, kill_at, start
from translation_script import PROCESSES, SCRATCH, SWAP, as_json, differing, flags, run, translations, weights

from collab_heads import CollabHeadsError
from collab_heads.files.folders import digest, write_folder

NO_MANIFEST = shutil.ignore_patterns("manifest.json", "translations")
NOISY = "--dropout 0.2 --word_dropout source=0.1,target=0.2 --word_dropout_with random --label_smoothing 0.1".split()
RISK = "--objective minimum_risk --risk_samples 4 --risk_cross_entropy 0.5".split()
LEARNED = "--target_heads 5 --importance_samples 16 --selection_share 0.8".split()


def same(one: dict, other: dict) -> None:
    """What two runs found is the same, but for what they took."""
    names = ("history", "heads", "best", "signatures", "parameters", "swap")
    assert as_json(one, *names[:-1]) == as_json(other, *names[:-1])
    assert (one["swap"] is None) == (other["swap"] is None)


RUNS = {
    "scratch": (*SCRATCH, *NOISY, "--eval_steps", 2),
    "learned": (*LEARNED, "--label_smoothing", 0.1),
    "swap": (*SWAP, "--swap", "between", "--max_train_steps", 3),
    "best": ("--eval_steps", 1, "--load_best_model_at_end"),
    "best of each": ("--eval_steps", 1, "--load_best_model_at_end", *SWAP, "--swap", "between", "--max_train_steps", 2),
    "average": ("--average_checkpoints", 2),
    "epochs": ("--checkpointing_steps", "epoch", "--max_train_samples", 60, "--gradient_accumulation_steps", 2),
    "frozen": ("--trainable_parameters", "encoder.*q_proj", "decoder.*fc1", *SWAP),  # the swap renames q_proj
    "risk": (*RISK, "--gradient_accumulation_steps", 2, "--max_train_samples", 60, *LEARNED[:2]),
    "frozen gates": ("--trainable_parameters", "encoder", "--gate_weight", 0.3),  # gates are never frozen
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
@from_checkpoints
def test_resuming_in_one_process(name, resumed, marian, bilingual, tmp_path):
    """From checkpoints of a run, in place: the same end."""
    more, out = ("--checkpointing_steps", 2, "--max_train_steps", 4, *RUNS[name]), tmp_path / "out"
    model = [] if name == "scratch" else marian
    whole = run(model, bilingual, out, *more)
    expected = weights(out)
    for folder in checkpoints(out, resumed, count=2):
        found = run(model, bilingual, out, *more, "--resume_from_checkpoint", folder)
        same(found, whole)
        assert differing(weights(out), expected) == []


@pytest.mark.slow
def test_gates_of_frozen_parts_still_learn(marian, bilingual, tmp_path):
    """What the resumed run above must not lose."""
    run(marian, bilingual, tmp_path / "out", "--checkpointing_steps", 3, *RUNS["frozen gates"])
    before, after = (weights(tmp_path / "out" / f"step_0_{step}") for step in (3, 6))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert len([name for name in moved if "log_alpha" in name]) == 3
    assert all("encoder" in name or "log_alpha" in name for name in moved)


@pytest.mark.slow
def test_a_killed_run_ends_as_an_unbroken_one(bilingual, tmp_path):
    """SIGKILL right after a checkpoint appears; from scratch, with all that is random, the best weights and beams."""
    more = (
        *NOISY,
        "--max_train_steps",
        24,
        "--eval_steps",
        5,
        "--num_beams",
        2,
        "--checkpointing_steps",
        4,
        "--load_best_model_at_end",
    )
    unbroken = run(SCRATCH, bilingual, tmp_path / "unbroken", *more)
    out = tmp_path / "killed"
    kill_at(out / "step_0_8", fork(run_translation.main, flags(SCRATCH, bilingual, out, *more)))
    assert not (out / "all_results.json").exists()
    resumed = run(SCRATCH, bilingual, out, *more, "--resume_from_checkpoint")
    same(resumed, unbroken)
    assert differing(out, tmp_path / "unbroken") == []
    names = [path.stem for path in (tmp_path / "unbroken" / "translations").iterdir()]
    assert len(names) == 6
    assert all(translations(out, name) == translations(tmp_path / "unbroken", name) for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("more", (("--load_best_model_at_end",), ("--average_checkpoints", 2)))
def test_what_earlier_checkpoints_hold_is_not_looked_for_elsewhere(more, marian, bilingual, tmp_path):
    out = tmp_path / "out"
    more = (*more, "--max_train_steps", 4, "--checkpointing_steps", 2)
    run(marian, bilingual, out, *more)
    resume = ("--resume_from_checkpoint", out / "step_0_4")
    with pytest.raises(CollabHeadsError, match=f"need what the run left in {out}: resume there"):
        run(marian, bilingual, tmp_path / "other", *more, *resume)
    assert not (tmp_path / "other").exists()
    if (out / "best").exists():
        (out / "best").rename(tmp_path / "moved")
        with pytest.raises(CollabHeadsError, match=f"{out / 'best'} is gone"):
            run(marian, bilingual, out, *more, *resume)


@pytest.mark.slow
def test_what_is_averaged_is_of_the_same_run_and_whole(marian, bilingual, tmp_path):
    out, more = tmp_path / "out", ("--max_train_steps", 4, "--checkpointing_steps", 2, "--average_checkpoints", 2)
    run(marian, bilingual, tmp_path / "other", *more, "--seed", 7)
    run(marian, bilingual, out, *more)
    averaged = weights(out)
    more = (*more, "--resume_from_checkpoint", out / "step_0_4")

    def refused(message, *others):
        with pytest.raises(CollabHeadsError, match=f"--average_checkpoints 2: .*{message}"):
            run(marian, bilingual, out, *more, *others)
        assert differing(weights(out), averaged) == []

    refused("step_0_3", "--checkpointing_steps", 1)
    (out / "step_0_2").rename(tmp_path / "moved")
    refused("step_0_2")
    shutil.copytree(tmp_path / "other" / "step_0_2", out / "step_0_2")
    refused("step_0_2 is of another run: seed was 7")
    shutil.rmtree(out / "step_0_2")
    shutil.copytree(tmp_path / "moved", out / "step_0_2")
    (out / "step_0_2" / "progress.json").write_text("{")
    refused("step_0_2")
    shutil.rmtree(out / "step_0_2")
    (tmp_path / "moved").rename(out / "step_0_2")
    run(marian, bilingual, out, *more)
    assert differing(weights(out), averaged) == []


@pytest.mark.slow
def test_states_that_are_none_of_this_run_are_refused(marian, bilingual, tmp_path):
    """Their digests are as the manifest says, as in a folder from a stranger."""
    out, more = tmp_path / "out", ("--max_train_steps", 2, "--checkpointing_steps", 1)
    run(marian, bilingual, out, *more)
    folder = out / "step_0_1"
    shutil.copytree(folder, tmp_path / "kept")
    for name, change, message in (
        (
            "optimizer.bin",
            lambda state: state["state"][0].update(exp_avg=torch.zeros(3)),
            "does not fit this run: exp_avg",
        ),
        ("optimizer.bin", lambda state: state["state"][0].update(step=torch.tensor(1e30)), "is not at step 1"),
        ("scheduler.bin", lambda state: state.update(last_epoch=0), "is not at step 1"),
        ("scheduler.bin", lambda state: state.update(last_epoch="x"), "is not at step 1"),
        ("scheduler.bin", lambda state: state.update(base_lrs=[1e9]), "begins with other rates"),
        ("random_states_0.pkl", lambda state: state.update(torch_manual_seed="x"), "could not be set"),
        ("random_states_0.pkl", None, "could not be set"),
    ):
        state = torch.load(folder / name, weights_only=False)
        torch.save([1] if change is None else change(state) or state, folder / name)
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["files"][name] = digest(folder / name)
        (folder / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(CollabHeadsError, match=message):
            run(marian, bilingual, out, *more, "--resume_from_checkpoint", folder)
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "kept", folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("model.safetensors", "adapter_config.json"))
def test_a_file_that_the_manifest_does_not_list_is_not_read(name, marian, bilingual, tmp_path):
    out, more = tmp_path / "out", ("--max_train_steps", 2, "--checkpointing_steps", 1)
    run(marian, bilingual, out, *more)
    folder = out / "step_0_2"
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"].pop(name, None)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    shutil.copy(marian / "model.safetensors", folder / name)
    with pytest.raises(CollabHeadsError, match=f"holds {name}, which its manifest.json does not list: move it away"):
        run(marian, bilingual, out, *more, "--resume_from_checkpoint", folder)


@pytest.mark.slow
def test_damaged_or_other_best_weights_are_seen(marian, bilingual, tmp_path, caplog):
    out, more = tmp_path / "out", ("--load_best_model_at_end", "--max_train_steps", 2, "--checkpointing_steps", 1)
    run(marian, bilingual, out, *more)
    last = (*more, "--resume_from_checkpoint", out / "step_0_2")
    run(marian, bilingual, out, *last)
    assert "is not of the evaluation" not in caplog.text
    write_folder(out / "best", lambda folder: shutil.copytree(marian, folder, dirs_exist_ok=True, ignore=NO_MANIFEST))
    run(marian, bilingual, out, *last)
    assert f"{out / 'best'} is not of the evaluation" in caplog.text
    (out / "best" / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(CollabHeadsError, match=f"{out / 'best'} is damaged: model.safetensors has 3 bytes"):
        run(marian, bilingual, out, *last)


def test_other_flags_or_data_do_not_continue_a_run(marian, bilingual, tmp_path):
    out, more = tmp_path / "out", ("--max_train_steps", 2, "--checkpointing_steps", 1)
    run(marian, bilingual, out, *more)
    for other, message in (
        (("--max_tokens", 300), "max_tokens was 400 and is 300"),
        (("--word_dropout", 0.1), "word_dropout was 0.0 and is 0.1"),
        (("--max_train_samples", 100), "data was"),
        (("--trainable_parameters", "encoder"), "trainable_parameters was None"),
    ):
        with pytest.raises(CollabHeadsError, match=message):
            run(marian, bilingual, out, *more, *other, "--resume_from_checkpoint")


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(bilingual, tmp_path):
    """Without dropout, whose random numbers differ: two micro-batches a step, on one process or on two."""
    model, heads = (*SCRATCH, "--dropout", 0), ("--target_heads", 5, "--importance_samples", 16)
    more = (*heads, "--label_smoothing", 0.1, "--max_train_steps", 8, "--eval_steps", 4)
    one = run(model, bilingual, tmp_path / "one", *more, "--gradient_accumulation_steps", 2)
    finish(start([*PROCESSES, *flags(model, bilingual, tmp_path / "two", *more)]))
    two = json.loads((tmp_path / "two" / "all_results.json").read_text())
    assert (one["processes"], two["processes"]) == (1, 2)
    assert two["stages"] == one["stages"]
    assert [entry["examples"] for entry in two["train"]] == [entry["examples"] for entry in one["train"]]
    assert as_json(two, "heads") == as_json(one, "heads")
    found, expected = weights(tmp_path / "two"), weights(tmp_path / "one")
    for name in expected:
        if name.endswith("k_proj.bias"):
            continue  # its gradient is 0 but for rounding, of which Adam makes steps
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=ADAM32)
    for name in ("validation-fine_tuned-4", "validation-fine_tuned-8", "validation-pruned-0"):
        assert translations(tmp_path / "two", name) == translations(tmp_path / "one", name)


@pytest.mark.slow
def test_two_processes_resume_as_well(marian, bilingual, tmp_path):
    """With dropout and the best weights: every process goes on with its own random numbers."""
    out = tmp_path / "two"
    more = (*SWAP, "--word_dropout", 0.1, "--eval_steps", 2, "--checkpointing_steps", 2, "--load_best_model_at_end")
    finish(start([*PROCESSES, *flags(marian, bilingual, out, *more)]))
    expected, whole = weights(out), json.loads((out / "all_results.json").read_text())
    finish(start([*PROCESSES, *flags(marian, bilingual, out, *more, "--resume_from_checkpoint", out / "step_0_2")]))
    same(json.loads((out / "all_results.json").read_text()), whole)
    assert differing(weights(out), expected) == []


@pytest.mark.slow
def test_two_processes_lower_the_risk_of_a_changed_model(marian, bilingual, tmp_path):
    """Shared keys and heads that are chosen: two processes sample for themselves, end with one model, and go on."""
    out = tmp_path / "two"
    more = (*RISK, *SWAP, *LEARNED[:2], "--checkpointing_steps", 2, "--max_train_steps", 4)
    finish(start([*PROCESSES, *flags(marian, bilingual, out, *more)]))
    expected, whole = weights(out), json.loads((out / "all_results.json").read_text())
    assert (whole["processes"], list(whole["stages"])) == (2, ["loaded", "swapped", "fine_tuned", "pruned"])
    finish(start([*PROCESSES, *flags(marian, bilingual, out, *more, "--resume_from_checkpoint", out / "step_0_2")]))
    same(json.loads((out / "all_results.json").read_text()), whole)
    assert differing(weights(out), expected) == []
