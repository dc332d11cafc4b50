"""Both scripts with --distill_steps: what is learned from whom, when, and by how many processes."""

import copy
import json

import pytest
import torch
import translation_script
from later import Later, run_glue
from safetensors.torch import load_file
from scripts import ADAM32, SWAP, checkpoints, flags, from_checkpoints, run, run_on_two
from transformers import AutoModelForSequenceClassification

import tiny
from collab_heads import CollabHeadsError

runs = Later("collab_heads.training.runs.run")

COMPRESS = "--compress_budget 0.4 --refine_steps 3 --calibration_samples 32".split()
DISTILL = "--distill_steps 12".split()


@pytest.fixture
def seen(monkeypatch):
    """The originals that runs learned from, and what came of it."""
    found, distill = [], runs.distill

    def spy(model, original, batches, steps, **more):
        before = copy.deepcopy(original)
        report = distill(model, original, batches, steps, **more)
        found.append((before, batches, report, steps, more["seed"]))
        return report

    monkeypatch.setattr("collab_heads.training.runs.run.distill", spy)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("change", (COMPRESS, SWAP))
@pytest.mark.parametrize("precision", ("no", "bf16"))
def test_a_classifier_learns_from_itself_before_the_change(change, precision, bert, files, tmp_path, seen):
    more = ("--swap", "between", "--mixed_precision", precision, "--checkpointing_steps", "epoch")
    results = run(bert, files, tmp_path / "out", *change, *DISTILL, *more)
    changed = "compressed" if change is COMPRESS else "swapped"
    assert list(results["stages"]) == ["fine_tuned", changed, "distilled", "fine_tuned_again"]
    ((original, batches, report, *asked),) = seen
    assert asked == [12, results["arguments"]["seed"]]
    trained = load_file(tmp_path / "out" / "epoch_0_2" / "model.safetensors")
    assert all(torch.equal(trained[name], tensor) for name, tensor in original.state_dict().items())
    assert all("labels" not in batch for batch in batches)
    assert sum(len(batch["input_ids"]) for batch in batches) == 107  # all there are
    assert results["distilled"] == report.to_dict()
    written = json.loads((tmp_path / "out" / "all_results.json").read_text())
    assert written["distilled"] == json.loads(json.dumps(results["distilled"]))
    assert report.steps > 0 and report.after.total(1.0) <= report.before.total(1.0)


@pytest.mark.slow
def test_a_translation_model_learns_before_it_is_trained(marian, bilingual, tmp_path, seen):
    results = translation_script.run(marian, bilingual, tmp_path / "out", *COMPRESS, *DISTILL)
    assert list(results["stages"]) == ["loaded", "compressed", "distilled", "fine_tuned"]
    ((_, batches, report, *_),) = seen
    assert all(sorted(batch) == ["attention_mask", "decoder_input_ids", "input_ids"] for batch in batches)
    assert report.after.output <= report.before.output


@pytest.mark.slow
def test_another_model_can_be_learned_from(bert, files, tmp_path, seen):
    run(bert, files, tmp_path / "teacher", "--max_train_steps", 3)
    teacher = load_file(tmp_path / "teacher" / "model.safetensors")
    run(tmp_path / "teacher", files, tmp_path / "out", *SWAP, *DISTILL, "--distill_from", tmp_path / "teacher")
    ((original, *_),) = seen
    assert all(torch.equal(teacher[name], tensor) for name, tensor in original.state_dict().items())


@pytest.mark.slow
def test_an_original_that_does_not_fit_is_refused_before_anything_is_written(bert, marian, files, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(bert, num_hidden_layers=1)
    model.save_pretrained(tmp_path / "one")
    for folder, message in (
        (tmp_path / "one", "num_hidden_layers 2 and 1"),
        (tmp_path / "none", "cannot load BertForSequenceClassification"),
    ):
        with pytest.raises(CollabHeadsError, match=message):
            run(bert, files, tmp_path / "out", *SWAP, *DISTILL, "--distill_from", folder)
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_collaborative_from_the_start_has_no_original(bilingual, tmp_path):
    with pytest.raises(CollabHeadsError, match="has no original to learn from"):
        translation_script.run(translation_script.SCRATCH, bilingual, tmp_path / "out", "--collaborative", *DISTILL)


@from_checkpoints
@pytest.mark.slow
def test_resuming_in_one_process(resumed, bert, files, tmp_path):
    """From checkpoints of a run, in place, before and after the distillation: the same end."""
    more = (*COMPRESS, *DISTILL, "--swap", "between", "--max_train_steps", 4, "--checkpointing_steps", 3)
    whole = run(bert, files, tmp_path / "out", *more)
    expected = load_file(tmp_path / "out" / "model.safetensors")
    for folder in checkpoints(tmp_path / "out", resumed, count=2):
        found = run(bert, files, tmp_path / "out", *more, "--resume_from_checkpoint", folder)
        assert found["history"] == whole["history"]
        after = [json.loads(json.dumps(each["distilled"]))["history"] for each in (found, whole)]
        assert after[0] == after[1]
        weights = load_file(tmp_path / "out" / "model.safetensors")
        assert [name for name in weights if not torch.equal(weights[name], expected[name])] == []


@pytest.mark.slow
def test_two_processes_learn_as_one(files, tmp_path):
    """Without dropout, whose random numbers differ: the same model, but for sums in another order."""
    bert = tiny.save_tiny_bert(tmp_path / "bert", dropout=0.0)
    more = (*COMPRESS, *DISTILL, "--max_train_steps", 0, "--swap", "after")
    run(bert, files, tmp_path / "start", "--max_train_steps", 3)
    one = run(tmp_path / "start", files, tmp_path / "one", *more)
    run_on_two(run_glue.main, flags(tmp_path / "start", files, tmp_path / "two", *more))
    two = json.loads((tmp_path / "two" / "all_results.json").read_text())
    assert two["processes"] == 2 and two["stages"] == one["stages"]
    weights, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "one"))
    assert weights.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(weights[name], expected[name], rtol=0, atol=ADAM32)


@pytest.mark.slow
def test_a_run_that_was_stopped_in_the_distillation_begins_it_again(bert, files, tmp_path, monkeypatch):
    def stop(*args, **more):
        raise KeyboardInterrupt

    more = (*COMPRESS, *DISTILL, "--swap", "between", "--max_train_steps", 4, "--checkpointing_steps", 2)
    whole, out = run(bert, files, tmp_path / "whole", *more), tmp_path / "stopped"
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("collab_heads.training.runs.run.distill", stop)
        run(bert, files, out, *more)
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == ["step_0_2", "step_0_4"]
    found = run(bert, files, out, *more, "--resume_from_checkpoint")
    assert found["history"] == whole["history"]
    weights, expected = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "whole"))
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
