"""The script of images from end to end, on images that the tests draw: phases, heads, resuming, what it refuses."""

import json
import shutil

import image_script
import pytest
import torch
from image_script import LEARNS, SCRATCH, SIZES, SWAP, flags, run, write_images
from later import run_image_classification
from model_runs import sites, swapped
from PIL import Image
from scripts import ADAM32, ONCE, checkpoints, finish, fork, from_checkpoints, kill_at, run_on_two, start
from transformers import AutoImageProcessor, AutoModelForImageClassification
from translation_script import as_json, differing, weights

from collab_heads import CollabHeadsError
from collab_heads.heads.history import HeadHistory

BORN = "--collaborative --dim_shared_query_key 8".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three classes, so many images of each that the last step is smaller."""
    found = tmp_path_factory.mktemp("images")
    for seed, (split, count) in enumerate((("train", 13), ("validation", 5), ("test", 2))):
        write_images(found / split, count, seed)
    return found


@pytest.fixture(scope="module")
def files(folder):
    """Flags that name them."""
    return ["--train_dir", folder / "train", "--validation_dir", folder / "validation"]


@pytest.fixture(scope="module")
def deit(files, tmp_path_factory):
    """A tiny DeiT that the script trained from scratch; it has begun to learn."""
    out = tmp_path_factory.mktemp("deit") / "model"
    results = run(["--model_type", "deit", *SIZES], files, out, *LEARNS)
    assert results["eval_accuracy"] > 0.6 > 0.5 > results["history"][0]["metrics"]["accuracy"]
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    "swap, stages",
    (
        ("before", ["loaded", "swapped", "fine_tuned"]),
        ("after", ["loaded", "fine_tuned", "swapped"]),
        ("between", ["loaded", "fine_tuned", "swapped", "fine_tuned_again"]),
    ),
)
def test_a_trained_model_is_swapped(swap, stages, deit, files, tmp_path):
    out = tmp_path / "out"
    results = run(deit, files, out, *SWAP, "--swap", swap)
    assert list(results["stages"]) == stages
    assert json.loads((out / "all_results.json").read_text()) == json.loads(json.dumps(results))
    model = AutoModelForImageClassification.from_pretrained(out)
    assert all(swapped(model))
    assert results["swap"]["mean_output_error"] > 0  # it was calibrated
    again = run(out, files, None, "--num_train_epochs", 0)
    assert again["stages"] == {"loaded": results["stages"][stages[-1]]}


@pytest.mark.slow
def test_a_lossless_swap_keeps_what_was_learned(deit, files, folder, tmp_path):
    results = run(deit, files, tmp_path / "out", "--collaborative", "--num_train_epochs", 0)
    assert results["stages"]["swapped"] == results["stages"]["loaded"]
    images = [image_script.Image.open(path) for path in sorted((folder / "test" / "disc").iterdir())]
    logits = []
    for each in (deit, tmp_path / "out"):
        pixels = AutoImageProcessor.from_pretrained(each, backend="pil")(images, return_tensors="pt")
        with torch.no_grad():
            logits.append(AutoModelForImageClassification.from_pretrained(each)(**pixels).logits)
    torch.testing.assert_close(*logits)


@pytest.mark.slow
def test_a_model_that_is_collaborative_from_the_start_learns(files, tmp_path):
    results = run(SCRATCH, files, tmp_path / "out", *LEARNS, *BORN)
    assert list(results["stages"]) == ["fine_tuned"]
    assert results["eval_accuracy"] > 0.6
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert [module.query_key.state.dim for module in sites(model).values()] == [8, 8]


def test_heads_are_chosen_and_removed(deit, files, tmp_path):
    results = run(deit, files, tmp_path / "out", "--target_heads", 5)
    assert list(results["stages"]) == ["loaded", "fine_tuned", "pruned"]
    assert results["stages"]["pruned"] == results["stages"]["fine_tuned"]
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert model.num_parameters() == results["parameters"]
    assert results["parameters"] < AutoModelForImageClassification.from_pretrained(deit).num_parameters()


@pytest.mark.slow
def test_compression_and_distillation(deit, files):
    few = "--calibration_samples 16 --refine_steps 2 --distill_steps 2 --max_train_steps 1".split()
    results = run(deit, files, None, "--compress_budget", 0.6, *few)
    assert list(results["stages"]) == ["loaded", "compressed", "distilled", "fine_tuned"]


@pytest.mark.slow
def test_mixing_and_rotation(deit, files, tmp_path):
    out, more = tmp_path / "out", ("--analyze_every", "epoch", "--analyze_samples", 6)
    results = run(deit, files, out, "--alpha_mixing", "--rotate", "hard", "--disagreement_weight", 0.1, *more)
    assert set(results["heads"]) == {"alphas", "rotation"}
    assert results["heads"]["rotation"]
    history = HeadHistory.load(out / "head_history" / "head_history.json")
    assert [moment.epoch for moment in history.moments] == [0, 1, 2] and set(history.values) == {"confidence", "alphas"}


@pytest.mark.slow
def test_predictions_of_the_test_images(deit, files, folder, tmp_path):
    out = tmp_path / "out"
    results = run(deit, files, out, "--num_train_epochs", 0, "--test_dir", folder / "test")
    lines = (out / "predictions" / "test.tsv").read_text().splitlines()
    rows = [line.split("\t") for line in lines[1:]]
    assert lines[0] == "file\tclass"
    right = [file.split("/")[-2] == name for file, name in rows]
    assert len(right) == 6
    assert results["stages"]["test"]["accuracy"] == pytest.approx(sum(right) / 6)


@pytest.mark.slow
def test_training_images_are_limited_class_by_class(files):
    results = run(SCRATCH, files, None, "--max_train_samples", 6, "--max_train_steps", 1, "--max_eval_samples", 3)
    assert results["train"][0]["examples"] == 6


@pytest.mark.slow
def test_the_report_on_heads(deit, files, tmp_path):
    results = run(deit, files, tmp_path / "out", "--num_train_epochs", 0, "--analyze", "--save_head_statistics")
    assert list(results["stages"]) == ["loaded"]
    assert (tmp_path / "out" / "head_report" / "report.html").is_file()
    assert (tmp_path / "out" / "head_statistics").is_dir()


RUNS = {
    "scratch": (*BORN, "--dropout", 0.2, "--horizontal_flip", 0.5, "--gradient_accumulation_steps", 2),
    "learned": ("--target_heads", 5, "--importance_samples", 16, "--horizontal_flip", 0.5),
    "between": (*SWAP, "--swap", "between", "--horizontal_flip", 0.5),
}


@pytest.mark.parametrize("name", RUNS)
@from_checkpoints
@pytest.mark.slow
def test_resuming(name, resumed, deit, files, tmp_path):
    """From checkpoints of a run, in place: the same end, to the last bit."""
    out, more = tmp_path / "out", ("--checkpointing_steps", 2, "--max_train_steps", 4, *RUNS[name])
    model = SCRATCH if name == "scratch" else deit
    whole = run(model, files, out, *more)
    expected = weights(out)
    for folder in checkpoints(out, resumed, count=4 if name == "between" else 2):
        found = run(model, files, out, *more, "--resume_from_checkpoint", folder)
        assert as_json(found, "history", "heads", "parameters") == as_json(whole, "history", "heads", "parameters")
        assert differing(weights(out), expected) == []


@pytest.mark.slow
def test_processes_that_load_batches_change_nothing(files, tmp_path):
    """A run without them, resumed with two, as a user starts it: no process that tests have filled is forked."""
    out, more = tmp_path / "out", ("--checkpointing_steps", 2, "--max_train_steps", 4, *RUNS["scratch"])
    script = ["examples/run_image_classification.py", *flags(SCRATCH, files, out, *more)]
    finish(start(script))
    results, expected = json.loads((out / "all_results.json").read_text()), weights(out)
    (middle,) = checkpoints(out, ONCE, count=2)
    finish(start([*script, "--resume_from_checkpoint", str(middle), "--dataloader_num_workers", "2"]))
    resumed = json.loads((out / "all_results.json").read_text())
    assert as_json(resumed, "history", "parameters") == as_json(results, "history", "parameters")
    assert differing(weights(out), expected) == []


@pytest.mark.slow
def test_mirrored_images_are_others(files, tmp_path):
    """What the resumed runs above must draw again."""
    for name, flip in (("not", 0), ("half", 0.5), ("all", 1)):
        run(SCRATCH, files, tmp_path / name, "--max_train_steps", 2, "--horizontal_flip", flip)
    assert all(differing(tmp_path / one, tmp_path / other) for one, other in (("not", "half"), ("half", "all")))


@pytest.mark.slow
def test_changed_images_do_not_continue_a_run(files, folder, tmp_path):
    out, more = tmp_path / "out", ("--max_train_steps", 2, "--checkpointing_steps", 1)
    shutil.copytree(folder / "train", tmp_path / "train")
    files = ["--train_dir", tmp_path / "train", *files[2:]]
    run(SCRATCH, files, out, *more)
    Image.new("RGB", (16, 16)).save(tmp_path / "train" / "disc" / "000.png")
    with pytest.raises(CollabHeadsError, match="data was"):
        run(SCRATCH, files, out, *more, "--resume_from_checkpoint")


@pytest.mark.slow
def test_a_killed_run_ends_as_an_unbroken_one(files, tmp_path):
    more = (*RUNS["scratch"], "--num_train_epochs", 8, "--checkpointing_steps", 4)
    unbroken = run(SCRATCH, files, tmp_path / "unbroken", *more)
    out = tmp_path / "killed"
    kill_at(out / "step_0_4", fork(run_image_classification.main, flags(SCRATCH, files, out, *more)))
    assert not (out / "all_results.json").exists()
    resumed = run(SCRATCH, files, out, *more, "--resume_from_checkpoint")
    assert as_json(resumed, "history") == as_json(unbroken, "history")
    assert differing(out, tmp_path / "unbroken") == []


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(files, folder, tmp_path):
    """Without dropout and mirrors, whose random numbers differ: half the batch on each of two processes."""
    more = ("--test_dir", folder / "test", *SCRATCH, "--max_train_steps", 4)
    one = run([], files, tmp_path / "one", *more)
    run_on_two(
        run_image_classification.main, flags([], files, tmp_path / "two", *more, "--per_device_train_batch_size", 4)
    )
    two = json.loads((tmp_path / "two" / "all_results.json").read_text())
    assert (one["processes"], two["processes"]) == (1, 2)
    assert two["stages"] == one["stages"]
    found, expected = weights(tmp_path / "two"), weights(tmp_path / "one")
    for name in expected:
        if "k_proj.bias" not in name:  # its gradient is 0 but for rounding, of which Adam makes steps
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=ADAM32)
    predictions = [(tmp_path / name / "predictions" / "test.tsv").read_text() for name in ("one", "two")]
    assert predictions[0] == predictions[1]


@pytest.mark.slow
def test_the_file_is_a_script(files):
    finish(start(["examples/run_image_classification.py", *flags(SCRATCH, files, None, "--max_train_steps", 1)]))


def test_broken_images_are_refused_before_anything_is_written(files, folder, tmp_path):
    shutil.copytree(folder / "validation", tmp_path / "validation")
    (tmp_path / "validation" / "line" / "003.png").write_bytes(b"no image")
    with pytest.raises(CollabHeadsError, match=r"line/003\.png is not an image"):
        run(SCRATCH, [*files[:3], tmp_path / "validation"], tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.slow
def test_models_that_do_not_fit_are_refused(deit, files, folder, tmp_path):
    for split in ("train", "validation"):
        write_images(tmp_path / split, 2, 0, ["disc", "line"])
    two = ["--train_dir", tmp_path / "train", "--validation_dir", tmp_path / "validation"]
    with pytest.raises(CollabHeadsError, match=r"head has 3 output\(s\) \(disc, line, square\), the task needs 2"):
        run(deit, two, None)
    assert run(deit, two, None, "--ignore_mismatched_sizes", "--max_train_steps", 1)["stages"].keys() == {"fine_tuned"}
    other = tmp_path / "other"
    AutoImageProcessor.from_pretrained(deit, backend="pil", size={"height": 24, "width": 24}).save_pretrained(other)
    with pytest.raises(CollabHeadsError, match=r"cannot take .*png, which its image processor makes 3 x 24 x 24"):
        run(deit, files, None, "--image_processor_name", other)
    with pytest.raises(CollabHeadsError, match="cannot load AutoConfig from"):
        run(tmp_path / "train", files, None)


def test_a_head_that_only_predicts_is_refused(deit, files, tmp_path):
    from transformers import DeiTForImageClassificationWithTeacher

    model = AutoModelForImageClassification.from_pretrained(deit)
    DeiTForImageClassificationWithTeacher(model.config).save_pretrained(tmp_path / "teacher")
    with pytest.raises(CollabHeadsError, match="is a DeiTForImageClassificationWithTeacher, which only predicts"):
        run(tmp_path / "teacher", files, None)
