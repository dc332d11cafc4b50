"""Flags of the Hugging Face example scripts: what is kept, how AdamW runs, how a training ends early."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
import translation_script
from later import Later, run_glue, run_translation
from safetensors.torch import load_file
from scripts import ROOT, checkpoints, flags, run

from collab_heads.data import translation
from collab_heads.errors import ArgumentError

classifier = Later("collab_heads.training.runs.classifier")
translator = Later("collab_heads.training.runs.translator")


def differ(one, other):
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    return any(not torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_adam_runs_with_the_settings_of_the_flags(bert, files, tmp_path):
    """The defaults that the help names are those without flags; others change the steps."""
    few = ("--max_train_steps", 2)
    given = {
        "none": (),
        "same": ("--adam_beta1", 0.9, "--adam_beta2", 0.999, "--adam_epsilon", 1e-8),
        "beta1": ("--adam_beta1", 0.5),
        "beta2": ("--adam_beta2", 0.5),
        "epsilon": ("--adam_epsilon", 0.1),
    }
    for name, more in given.items():
        run(bert, files, tmp_path / name, *few, *more)
    assert {name: differ(tmp_path / name, tmp_path / "none") for name in given} == {
        "none": False,
        "same": False,
        "beta1": True,
        "beta2": True,
        "epsilon": True,
    }
    with pytest.raises(ArgumentError, match=r"adam_beta1.*1.0 must be below 1"):
        run(bert, files, None, "--adam_beta1", 1.0)


SCORES = (0.5, 0.7, 0.6, 0.7, 0.9)  # the best comes too late


@pytest.fixture
def scored(monkeypatch):
    """Evaluations give these scores, one after the other, also in a run that goes on."""
    seen = []

    def measure(learner, model):
        seen.append(seen[-1] + 1 if seen else len(learner.session.progress.get("history", [])))
        return {"accuracy": SCORES[seen[-1]]}

    monkeypatch.setattr(classifier.Classifier, "measure", measure)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("every", ("epoch", 2))
def test_a_training_ends_early(every, scored, bert, files, tmp_path):
    """After the third epoch, or third evaluation; and so it does when it goes on from any checkpoint."""
    evaluated = () if every == "epoch" else ("--eval_steps", every)
    more = ("--num_train_epochs", 5, "--early_stopping_patience", 2, "--checkpointing_steps", every, *evaluated)
    results = run(bert, files, tmp_path / "out", *more)
    stages = [entry["metrics"]["accuracy"] for entry in results["history"]]
    assert stages == list(SCORES[:4])
    (trained,) = results["train"]
    assert trained["steps"] == (4 * 14 if every == "epoch" else 4 * 2)
    assert every == "epoch" or trained["train_loss"] > 0.4  # of the steps taken: two classes, hardly learned: ln 2
    expected = load_file(tmp_path / "out" / "model.safetensors")
    for folder in checkpoints(tmp_path / "out", "every" if every == 2 else "once"):
        scored.clear()
        again = run(bert, files, tmp_path / "out", *more, "--resume_from_checkpoint", folder)
        assert [entry["metrics"] for entry in again["history"]] == [entry["metrics"] for entry in results["history"]]
        weights = load_file(tmp_path / "out" / "model.safetensors")
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
        assert again["train_loss"] == pytest.approx(results["train_loss"], rel=1e-12)


def test_where_a_training_must_not_end_early(bert, files, tmp_path):
    with pytest.raises(ArgumentError, match=r"heads that are learned in training exclude each other"):
        run(bert, files, None, "--early_stopping_patience", 2, "--target_heads", 5)
    assert run_glue.parse(
        flags(bert, files, None, "--early_stopping_patience", 2, "--target_heads", 5, "--head_selection", "gradient")
    )


@pytest.mark.slow
def test_a_translation_ends_early_with_its_best_weights(marian, bilingual, tmp_path, monkeypatch):
    scores = iter((20.0, 30.0, 10.0, 11.0, 40.0))
    monkeypatch.setattr(translator.Translator, "score", lambda *given: {"bleu": next(scores), "chrf": 1.0})
    more = ("--early_stopping_patience", 2, "--load_best_model_at_end", "--eval_steps", 1)
    results = translation_script.run(marian, bilingual, tmp_path / "out", *more)
    assert results["best"] == {"bleu": 30.0, "stage": "fine_tuned", "step": 1}
    assert results["train"][0]["steps"] == 3
    with pytest.raises(ArgumentError, match=r"--average_checkpoints exclude each other"):
        every = ("--average_checkpoints", 2, "--checkpointing_steps", 1)
        translation_script.run(marian, bilingual, tmp_path / "other", "--early_stopping_patience", 2, *every)


@pytest.mark.slow
def test_tokenized_pairs_are_kept_and_read(marian, bilingual, tmp_path, monkeypatch):
    """The same examples and weights; other lengths, sentences or a damaged file are made anew."""
    made = []
    tokenize = translation.tokenize
    monkeypatch.setattr(translation, "tokenize", lambda *given: made.append(None) or tokenize(*given))
    few = ("--max_train_steps", 1, "--cache_dir", tmp_path / "cache")
    translation_script.run(marian, bilingual, tmp_path / "first", *few)
    assert len(made) == 2  # train and validation
    kept = sorted((tmp_path / "cache" / "tokenized").iterdir())
    assert len(kept) == 2
    suffixes = {path.suffix for folder in kept for path in folder.iterdir()}
    assert suffixes == {".arrow", ".json"}
    translation_script.run(marian, bilingual, tmp_path / "second", *few)
    assert len(made) == 2
    assert translation_script.differing(tmp_path / "second", tmp_path / "first") == []
    translation_script.run(marian, bilingual, tmp_path / "third", *few, "--max_source_length", 5)
    assert len(made) == 4
    (arrow,) = kept[0].glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:-8])
    translation_script.run(marian, bilingual, tmp_path / "fourth", *few)
    assert len(made) == 5
    assert translation_script.differing(tmp_path / "fourth", tmp_path / "first") == []


@pytest.mark.slow
def test_other_ways_to_prepare_pairs_give_the_same_training(marian, bilingual, tmp_path):
    few = ("--max_train_steps", 2)
    run_ = translation_script.run
    run_(marian, bilingual, tmp_path / "one", *few)
    run_(marian, bilingual, tmp_path / "two", *few, "--preprocessing_num_workers", 2)
    assert translation_script.differing(tmp_path / "two", tmp_path / "one") == []


@pytest.mark.slow
def test_pairs_are_padded_to_the_longest(marian, bilingual, monkeypatch):
    shapes = set()
    call = translation.Objective.__call__

    def seen(objective, model, batch):
        shapes.add((batch["input_ids"].shape[1], batch["labels"].shape[1]))
        return call(objective, model, batch)

    monkeypatch.setattr(translation.Objective, "__call__", seen)
    words = translation_script.flags(marian, bilingual, None, "--max_train_steps", 2, "--pad_to_max_length")
    with pytest.raises(ArgumentError, match="--pad_to_max_length and --max_tokens exclude each other"):
        run_translation.main(words)
    at = words.index("--max_tokens")
    run_translation.main([*words[:at], *words[at + 2 :]])
    assert shapes == {(40, 40)}


@pytest.mark.slow
def test_downloads_are_kept_in_a_folder(bert, files, tmp_path):
    """A model that lies in that folder as the Hub's client puts it there is found by its name, without a network."""
    place = tmp_path / "cache" / "hub" / "models--some--bert"
    shutil.copytree(bert, place / "snapshots" / ("a" * 40))
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("a" * 40)
    results = run("some/bert", files, None, "--max_train_steps", 1, "--cache_dir", tmp_path / "cache")
    assert results["train"][0]["steps"] == 1
    with pytest.raises(ArgumentError, match=r"cannot load .* from 'some/bert'"):
        run("some/bert", files, None, "--max_train_steps", 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launch", "processes"), ((["--num_processes", "2"], 1), (["--multi_gpu", "--num_processes", "2"], 2))
)
def test_one_process_where_several_were_likely_meant_is_said(launch, processes, bert, files, tmp_path):
    more = [*launch, "--main_process_port", "0"] if processes > 1 else launch
    command = [sys.executable, "-m", "accelerate.commands.launch", *more, "run_glue.py"]
    words = flags(bert, files, tmp_path / "out", "--max_train_steps", 1)
    environment = dict(os.environ, HF_HOME=str(tmp_path), OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    result = subprocess.run([*command, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-2000:]
    said = "one process, on a CPU: for several, accelerate launch --multi_gpu --num_processes N" in result.stdout
    assert said == (processes == 1)
    assert json.loads((tmp_path / "out" / "all_results.json").read_text())["processes"] == processes
