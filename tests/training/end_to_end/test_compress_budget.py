"""Both scripts with --compress_budget, and with --dim_value: phases, results, resuming, processes."""

import json

import pytest
import scripts
import torch
import translation_script
from later import run_glue
from safetensors.torch import load_file
from scripts import ADAM32, LAUNCH, SWAP, checkpoints, finish, flags, fork, from_checkpoints, kill_at, run, run_on_two
from transformers import AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

import tiny
from collab_heads import CollabHeadsError

COMPRESS = "--compress_budget 0.5 --refine_steps 3 --calibration_samples 32".split()
NARROW_VALUES = "--collaborative --dim_value 0.5 --calibration_samples 16".split()


@pytest.mark.slow
@pytest.mark.parametrize(
    "swap, stages",
    (
        ("before", ["compressed", "fine_tuned"]),
        ("after", ["fine_tuned", "compressed"]),
        ("between", ["fine_tuned", "compressed", "fine_tuned_again"]),
    ),
)
def test_a_classifier_is_compressed_in_the_place_of_the_swap(swap, stages, bert, files, tmp_path):
    out = tmp_path / "out"
    results = run(bert, files, out, *COMPRESS, "--swap", swap)
    assert list(results["stages"]) == stages
    assert json.loads((out / "all_results.json").read_text()) == json.loads(json.dumps(results))
    found = results["swap"]
    assert found["costs"]["parameters"]["after"] <= 0.5 * found["costs"]["parameters"]["before"]
    model = AutoModelForSequenceClassification.from_pretrained(out)
    assert model.num_parameters() == results["parameters"] == found["model_parameters_after"]
    assert results["parameters"] < found["model_parameters_before"]


@pytest.mark.slow
def test_a_translation_model_is_compressed_between_trainings(marian, bilingual, tmp_path):
    out = tmp_path / "out"
    more = (*COMPRESS, "--swap", "between", "--compress_of", "cache", "--sites", "dec-self")
    results = translation_script.run(marian, bilingual, out, *more)
    assert list(results["stages"]) == ["loaded", "fine_tuned", "compressed", "fine_tuned_again"]
    assert [site["role"] for site in results["swap"]["sites"]] == ["dec-self"]
    cost = results["swap"]["costs"]["cache"]
    assert cost["after"] <= 0.5 * cost["before"]
    assert AutoModelForSeq2SeqLM.from_pretrained(out).num_parameters() == results["parameters"]


@pytest.mark.slow
def test_a_model_from_scratch_is_compressed_after_its_training(bilingual, tmp_path):
    out = tmp_path / "out"
    results = translation_script.run(translation_script.SCRATCH, bilingual, out, *COMPRESS, "--swap", "after")
    assert list(results["stages"]) == ["fine_tuned", "compressed"]
    with pytest.raises(CollabHeadsError, match="has nothing to go by before a model from scratch is trained"):
        translation_script.run(translation_script.SCRATCH, bilingual, tmp_path / "no", *COMPRESS)


@pytest.mark.parametrize("swap", ("before", "between"))
def test_values_get_narrower(swap, bert, files, tmp_path):
    out = tmp_path / "out"
    results = run(bert, files, out, *NARROW_VALUES, "--swap", swap, "--max_train_steps", 3)
    model = AutoModelForSequenceClassification.from_pretrained(out)
    assert [layer.attention.self.value.out_features for layer in model.bert.encoder.layer] == [16, 16]
    assert model.num_parameters() == results["parameters"]


@pytest.mark.slow
def test_narrow_values_from_scratch(bilingual, tmp_path):
    more = ("--collaborative", "--dim_value", 0.5, "--dim_shared_query_key", 16)
    translation_script.run(translation_script.SCRATCH, bilingual, tmp_path / "out", *more)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    assert model.model.encoder.layers[0].self_attn.v_proj.out_features == 16


@pytest.mark.parametrize(
    "more, message",
    (
        (("--collaborative", "--dim_value", 9000), "dim_value 9000 for encoder.layer.0"),
        (
            ("--compress_budget", 0.01, "--compress_parts", "values"),
            "--compress_budget: budget 0.01 of parameters is",
        ),
        (("--compress_budget", 0.5, "--compress_parts", "value"), "unknown --compress_parts .value."),
        (("--compress_budget", 0.5, "--collaborative"), "exclude each other"),
        (("--compress_budget", 0.5, "--sites", "dec-enc"), "has no dec-enc attention"),
    ),
)
def test_wrong_flags_are_refused_before_anything_is_written(more, message, bert, files, tmp_path):
    with pytest.raises(CollabHeadsError, match=message):
        run(bert, files, tmp_path / "out", *more)
    assert not (tmp_path / "out").exists()


@from_checkpoints
@pytest.mark.slow
def test_resuming_in_one_process(resumed, bert, files, tmp_path):
    """From checkpoints of a run, in place, in either phase: the same end."""
    more = (*COMPRESS, "--swap", "between", "--max_train_steps", 4, "--checkpointing_steps", 3)
    whole = run(bert, files, tmp_path / "out", *more)
    expected = load_file(tmp_path / "out" / "model.safetensors")
    for folder in checkpoints(tmp_path / "out", resumed, count=2):
        found = run(bert, files, tmp_path / "out", *more, "--resume_from_checkpoint", folder)
        assert found["history"] == whole["history"]
        weights = load_file(tmp_path / "out" / "model.safetensors")
        assert [name for name in weights if not torch.equal(weights[name], expected[name])] == []


@pytest.mark.slow
def test_a_killed_run_ends_as_an_unbroken_one(bert, files, tmp_path):
    """SIGKILL in both phases, each time right after a checkpoint appears."""
    more = (*COMPRESS, "--swap", "between", "--checkpointing_steps", 5)
    unbroken = run(bert, files, tmp_path / "unbroken", *more)
    out = tmp_path / "killed"
    arguments = flags(bert, files, out, *more)
    for checkpoint in ("step_0_10", "step_1_15"):
        kill_at(out / checkpoint, fork(run_glue.main, arguments))
        if "--resume_from_checkpoint" not in arguments:
            arguments.append("--resume_from_checkpoint")
    assert run_glue.main(arguments)["history"] == unbroken["history"]
    weights, expected = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "unbroken"))
    assert weights.keys() == expected.keys()
    assert [name for name in weights if not torch.equal(weights[name], expected[name])] == []


# An element whose gradient is as small as what rounding leaves of it goes the other way, by the learning rate.
ALMOST_ALL, ADAM32_NOISE = 0.999, 1e-3


@pytest.mark.slow
def test_two_processes_compress_to_the_model_of_one(files, tmp_path):
    """Without dropout, whose random numbers differ: same sizes, same steps, same weights, same metrics."""
    bert = tiny.save_tiny_bert(tmp_path / "bert", dropout=0.0)
    more = (*COMPRESS, "--swap", "between", "--max_train_steps", 6)
    one = run(bert, files, tmp_path / "one", *more)
    run_on_two(run_glue.main, flags(bert, files, tmp_path / "two", *more, "--per_device_train_batch_size", 4))
    two = json.loads((tmp_path / "two" / "all_results.json").read_text())
    assert (one["processes"], two["processes"]) == (1, 2)
    assert two["stages"] == one["stages"]
    weights, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "one"))
    assert weights.keys() == expected.keys()
    gaps = torch.cat([(weights[name] - expected[name]).abs().flatten() for name in expected])
    assert float(gaps.quantile(ALMOST_ALL)) < ADAM32 and float(gaps.max()) < ADAM32_NOISE


@pytest.mark.slow
def test_two_processes_swap_what_was_pruned(files, tmp_path):
    """The others follow the first one from a model that has lost heads in the run."""
    bert = tiny.save_tiny_bert(tmp_path / "bert", dropout=0.0)
    narrow = [*SWAP[:1], "--dim_shared_query_key", "0.5", *SWAP[3:], "--target_heads", "5", "--swap", "after"]
    more = (*narrow, "--max_train_steps", 12, "--per_device_train_batch_size", 4)
    finish(scripts.start([*LAUNCH, *flags(bert, files, tmp_path / "two", *more)]))
    results = json.loads((tmp_path / "two" / "all_results.json").read_text())
    assert list(results["stages"]) == ["fine_tuned", "pruned", "swapped"]
