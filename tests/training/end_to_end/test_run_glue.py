"""The script from end to end, on a tiny model: phases, results, files, resuming, processes, and what it refuses."""

import csv
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from later import Later, run_glue
from model_configs import rotary_config
from model_runs import swapped
from safetensors.torch import load_file
from scripts import (
    ADAM32,
    LAUNCH,
    LEARNS,
    ROOT,
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
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

import tiny
from collab_heads import CollabHeadsError
from collab_heads.training.runs import swap as swapping

loop = Later("collab_heads.training.loop.fine_tune")

FP64_SUM = 1e-12  # the same float64 sum, begun again from a number in JSON; seen: 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "swap, stages",
    (
        (None, ["fine_tuned"]),
        ("before", ["swapped", "fine_tuned"]),
        ("after", ["fine_tuned", "swapped"]),
        ("between", ["fine_tuned", "swapped", "fine_tuned_again"]),
    ),
)
def test_phases(swap, stages, bert, files, tmp_path):
    results = run(bert, files, tmp_path / "out", *((*SWAP, "--swap", swap) if swap else ()))
    assert list(results["stages"]) == stages
    assert json.loads((tmp_path / "out" / "all_results.json").read_text()) == json.loads(json.dumps(results))
    assert results["eval_accuracy"] == results["history"][-1]["metrics"]["accuracy"]
    trained = [stage for stage in stages if stage != "swapped"]
    assert [entry["stage"] for entry in results["train"]] == trained
    assert all(entry["steps"] == 28 and entry["samples_per_second"] > 0 for entry in results["train"])
    assert [e["epoch"] for e in results["history"] if e["stage"] == trained[0]] == [1, 2]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert set(swapped(model)) == {swap is not None}
    assert model.num_parameters() == results["parameters"]
    if swap:
        found = results["swap"]
        assert found["decomposition_seconds"] > 0
        assert 0 < found["mean_relative_error"] < 1
        assert [site["dim"] for site in found["sites"]] == [16, 16]


@pytest.mark.slow
def test_a_decoder_that_knows_no_padding_gets_it(bert, files, tmp_path):
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(bert)
    config = rotary_config(LlamaConfig)
    config.pad_token_id, config.vocab_size = None, len(tokenizer)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "decoder")
    tokenizer.save_pretrained(tmp_path / "decoder")
    out, test = tmp_path / "out", Path(files[1]).with_name("test.csv")
    results = run(tmp_path / "decoder", files, out, *LEARNS, "--do_predict", "--test_file", test)
    assert results["eval_accuracy"] > 0.75
    model = AutoModelForSequenceClassification.from_pretrained(out).eval()
    assert model.config.pad_token_id == tokenizer.pad_token_id
    with test.open(encoding="utf-8") as file:
        pairs = [tokenizer(row["sentence1"], row["sentence2"], return_tensors="pt") for row in csv.DictReader(file)]
    assert len({pair["input_ids"].shape for pair in pairs}) > 1  # so batches are padded
    with torch.no_grad():
        alone = [int(model(**pair).logits.argmax()) for pair in pairs]
    lines = (out / "predictions" / "predictions.tsv").read_text().splitlines()[1:]
    assert len(set(alone)) > 1 and [line.split("\t")[1] for line in lines] == [str(answer) for answer in alone]


@pytest.mark.parametrize("precision", ("no", "bf16"))
def test_texts_longer_than_the_positions_are_cut(precision, bert, files, tmp_path):
    """A tokenizer may not know how many there are; padding to a multiple of 8 would need more than 21."""
    tokenizer = AutoTokenizer.from_pretrained(bert)
    tokenizer.model_max_length = int(1e30)
    tokenizer.save_pretrained(tmp_path / "short")
    config = AutoConfig.from_pretrained(bert, max_position_embeddings=21)
    BertForSequenceClassification(config).save_pretrained(tmp_path / "short")
    long = [{"sentence1": "w1 " * 50, "sentence2": "w2 " * 50, "label": "0"}]
    validation = tiny.write_csv(tmp_path / "validation.csv", [*tiny.rows(9, 1), *long])
    flags = "--max_train_steps", 1, "--max_length", 64, "--mixed_precision", precision
    run(tmp_path / "short", [*files[:3], str(validation)], None, *flags)


def test_training_learns_and_a_lossless_swap_keeps_it(bert, files, tmp_path):
    lossless = ("--collaborative", "--swap", "after", *LEARNS)
    results = run(bert, files, tmp_path / "out", *lossless)
    first, *_, last = [entry["metrics"]["accuracy"] for entry in results["history"] if entry["stage"] == "fine_tuned"]
    assert last > 0.9 > first
    assert results["stages"]["swapped"] == results["stages"]["fine_tuned"]


@pytest.mark.slow
def test_saved_model_evaluates_to_the_same(bert, files, tmp_path):
    """What was saved, loaded by the same script with nothing to train, gives the metrics it ended with."""
    ended = run(bert, files, tmp_path / "out", *SWAP, "--num_train_epochs", 4)
    loaded = run(tmp_path / "out", files, None, "--num_train_epochs", 0)
    assert loaded["stages"] == {"loaded": ended["stages"]["fine_tuned"]}


@pytest.mark.slow
def test_a_run_without_output_folder_writes_nothing(bert, files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(bert, files, None, "--max_train_steps", 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_same_seed_same_run(bert, files, tmp_path):
    runs = [run(bert, files, None, *SWAP, "--seed", seed)["history"] for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


@pytest.mark.slow
def test_predictions_and_tracking(bert, files, tmp_path):
    test = Path(files[1]).with_name("test.csv")
    out = tmp_path / "out"
    run(bert, files, out, "--do_predict", "--test_file", test, "--with_tracking", "--logging_steps", 5)
    lines = (out / "predictions" / "predictions.tsv").read_text().splitlines()
    assert lines[0] == "index\tprediction"
    assert [line.split("\t")[0] for line in lines[1:]] == [str(i) for i in range(20)]
    assert {line.split("\t")[1] for line in lines[1:]} <= {"0", "1"}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "logs" / "glue"))
    events.Reload()
    assert [point.step for point in events.Scalars("train_loss")] == [5, 10, 15, 20, 25, 28]
    assert len(events.Scalars("eval_accuracy")) == 2


@pytest.mark.slow
@pytest.mark.parametrize("terms", ("content", "context"))
def test_score_terms_stay_restricted_through_training(terms, bert, files, tmp_path):
    run(bert, files, tmp_path / "out", *SWAP, "--score_terms", terms)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    kinds = {"content": "mixing", "context": "content_bias.weight"}
    for kind, name in kinds.items():
        found = [tensor for key, tensor in weights.items() if key.endswith(name)]
        assert len(found) == 2
        assert all((tensor == 0).all() == (kind == terms) for tensor in found)


@pytest.mark.slow
def test_bf16_trains(bert, files):
    results = run(bert, files, None, *SWAP, "--mixed_precision", "bf16", *LEARNS)
    assert results["eval_accuracy"] > 0.9


@pytest.mark.slow
def test_a_killed_run_ends_as_an_unbroken_one(bert, files, tmp_path):
    """SIGKILL in both phases, each time right after a checkpoint appears; dropout and the swap are part of the run."""
    more = (*SWAP, "--swap", "between", "--checkpointing_steps", 5, "--save_total_limit", 2)
    unbroken = run(bert, files, tmp_path / "unbroken", *more)
    out = tmp_path / "killed"
    arguments = flags(bert, files, out, *more)
    for checkpoint in ("step_0_10", "step_1_15"):
        kill_at(out / checkpoint, fork(run_glue.main, arguments))
        assert not (out / "all_results.json").exists()
        if "--resume_from_checkpoint" not in arguments:
            arguments.append("--resume_from_checkpoint")
    resumed = run_glue.main(arguments)
    assert resumed["history"] == unbroken["history"]
    weights, expected = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "unbroken"))
    assert weights.keys() == expected.keys()
    assert [name for name in weights if not torch.equal(weights[name], expected[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    (
        "--checkpointing_steps 3 --gradient_accumulation_steps 3 --max_train_steps 8",  # 5 steps an epoch
        "--checkpointing_steps epoch --gradient_accumulation_steps 3 --max_train_steps 8 --group_by_length",
        "--checkpointing_steps 5 --gradient_accumulation_steps 3 --max_train_steps 12",  # at the end of an epoch
        f"--checkpointing_steps 3 --max_train_steps 4 --mixed_precision bf16 --swap between {' '.join(SWAP)}",
    ),
)
@from_checkpoints
def test_resuming_in_one_process(more, resumed, bert, files, tmp_path):
    """From checkpoints of a run, in place, in either phase: the same end."""
    more, out = more.split(), tmp_path / "out"
    whole = run(bert, files, out, *more)
    expected = load_file(out / "model.safetensors")
    names = ("config.json", "tokenizer.json", "tokenizer_config.json", "README.md")
    names = [name for name in names if (out / name).exists()]
    texts = {name: (out / name).read_text(encoding="utf-8") for name in names}
    for folder in checkpoints(out, resumed, count=2):
        found = run(bert, files, out, *more, "--resume_from_checkpoint", folder)
        assert {name: (out / name).read_text(encoding="utf-8") for name in names} == texts
        assert found["history"] == whole["history"]
        losses = [entry["train_loss"] for entry in whole["train"]]
        assert [entry["train_loss"] for entry in found["train"]] == pytest.approx(losses, rel=FP64_SUM)
        assert found["train_loss"] == found["train"][-1]["train_loss"] > 0.1
        weights = load_file(out / "model.safetensors")
        assert [name for name in weights if not torch.equal(weights[name], expected[name])] == []


@pytest.mark.slow
def test_both_phases_train_in_the_same_precision(bert, files, monkeypatch):
    """What mixed precision wraps around a model must come off, and go on again."""
    dtypes = []
    stock = swapping.swap

    def swap(args, model, calibration):
        report = stock(args, model, calibration)
        model.bert.encoder.layer[0].output.dense.register_forward_hook(lambda m, i, o: dtypes.append(o.dtype))
        return report

    monkeypatch.setattr(swapping, "swap", swap)
    run(bert, files, None, *SWAP, "--swap", "between", "--mixed_precision", "bf16", "--max_train_steps", 2)
    assert dtypes[-1] == torch.bfloat16


@pytest.mark.slow
def test_a_half_precision_checkpoint_is_trained_in_full_precision(bert, files, tmp_path):
    AutoModelForSequenceClassification.from_pretrained(bert).to(torch.bfloat16).save_pretrained(tmp_path / "half")
    AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path / "half")
    run(tmp_path / "half", files, tmp_path / "out", "--max_train_steps", 1)
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.float32}


@pytest.mark.slow
def test_another_runs_folder_is_not_written_to(bert, files, tmp_path):
    more = ("--max_train_steps", 2, "--checkpointing_steps", 1)
    for name in ("first", "second"):
        run(bert, files, tmp_path / name, *more)
    before = (tmp_path / "second" / "all_results.json").read_bytes()
    with pytest.raises(CollabHeadsError, match="is in use"):
        run(bert, files, tmp_path / "second", *more, "--resume_from_checkpoint", tmp_path / "first" / "step_0_1")
    assert (tmp_path / "second" / "all_results.json").read_bytes() == before
    with pytest.raises(CollabHeadsError, match="which the run reads"):
        run(tmp_path / "first", files, tmp_path / "first", "--overwrite_output_dir")
    assert (tmp_path / "first" / "model.safetensors").exists()


def test_a_checkpoint_of_nan_is_not_written(bert, files, tmp_path, monkeypatch):
    """Or it would push out a good one."""
    stock = loop.optimizer_step

    def step(accelerator, model, *rest):
        loss = stock(accelerator, model, *rest)
        model.classifier.bias.data.fill_(float("nan"))
        return loss

    monkeypatch.setattr("collab_heads.training.loop.fine_tune.optimizer_step", step)
    with pytest.raises(CollabHeadsError, match="weights are NaN or inf at step 2: lower --learning_rate"):
        run(bert, files, tmp_path / "out", "--checkpointing_steps", 2)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["manifest.json"]


@pytest.mark.slow
def test_checkpoints_are_models(bert, files, tmp_path):
    run(bert, files, tmp_path / "out", *SWAP, "--checkpointing_steps", "epoch")
    last = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "epoch_0_2").state_dict()
    final = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(last[name], final[name]) for name in final)


@pytest.mark.slow
def test_two_processes_give_the_metrics_of_one(files, tmp_path):
    """Without dropout, whose random numbers differ: same steps, same weights, same metrics, same predictions."""
    bert = tiny.save_tiny_bert(tmp_path / "bert", dropout=0.0)
    test = ("--do_predict", "--test_file", Path(files[1]).with_name("test.csv"))
    one = run(bert, files, tmp_path / "one", *SWAP, *test)
    more = ("--per_device_train_batch_size", 4)
    run_on_two(run_glue.main, flags(bert, files, tmp_path / "two", *SWAP, *test, *more))
    two = json.loads((tmp_path / "two" / "all_results.json").read_text())
    assert (one["processes"], two["processes"]) == (1, 2)
    assert two["stages"] == one["stages"]
    weights, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "one"))
    for name in expected:
        torch.testing.assert_close(weights[name], expected[name], rtol=0, atol=ADAM32)
    predictions = [(tmp_path / name / "predictions" / "predictions.tsv").read_text() for name in ("one", "two")]
    assert predictions[0] == predictions[1]


@pytest.mark.slow
def test_two_processes_resume_as_well(bert, files, tmp_path):
    """With dropout: every process goes on with its own random numbers."""
    more = (*SWAP, "--per_device_train_batch_size", 4, "--checkpointing_steps", 5)
    finish(start([*LAUNCH, *flags(bert, files, tmp_path / "two", *more)]))
    expected = load_file(tmp_path / "two" / "model.safetensors")
    resume = ("--resume_from_checkpoint", tmp_path / "two" / "step_0_10")
    finish(start([*LAUNCH, *flags(bert, files, tmp_path / "two", *more, *resume)]))
    weights = load_file(tmp_path / "two" / "model.safetensors")
    assert [name for name in weights if not torch.equal(weights[name], expected[name])] == []


def broken(folder: Path, kind: str) -> Path:
    """A GLUE folder whose MRPC training file is broken in one way."""
    header, row = ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"], [1, 2, 3, "w1 w2", "w3"]
    train = {
        "columns": [row],
        "label": [row, [7, *row[1:]]],
        "fields": [row, row[:4]],
        "empty": [],
        "good": [row, row],
    }[kind]
    names = [*header[:4], "#2 Strin"] if kind == "columns" else header
    tiny.write_glue(folder, "MRPC", names, {"train": train, "dev": [row]})
    return folder


@pytest.mark.parametrize(
    "kind, message",
    (
        ("columns", r"train.tsv has no column '#2 String' \(did you mean '#2 Strin'\?\)"),
        ("label", r"train.tsv, example 2: label '7' in column 'Quality'; allowed: 0, 1"),
        ("fields", r"train.tsv, row 3: 4 fields, expected 5"),
        ("empty", r"train.tsv has a header and no rows"),
    ),
)
def test_broken_data_is_refused_before_anything_is_written(kind, message, bert, tmp_path):
    data = ["--task_name", "mrpc", "--data_dir", str(broken(tmp_path / "glue", kind))]
    with pytest.raises(CollabHeadsError, match=message):
        run(bert, data, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_glue_folder_is_read(bert, tmp_path):
    data = ["--task_name", "MRPC", "--data_dir", str(broken(tmp_path / "glue", "good"))]
    for name in ("text_columns", "label_column"):
        with pytest.raises(CollabHeadsError, match=f"--{name} needs --train_file"):
            run(bert, data, None, f"--{name}", "#1 String")
    results = run(bert, data, None, "--max_train_steps", 1)
    assert set(results["stages"]["fine_tuned"]) == {"accuracy", "f1"}


@pytest.mark.parametrize(
    "more, message",
    (
        (("--task_name", "mprc"), r"unknown --task_name 'mprc' \(did you mean 'mrpc'\?\)"),
        (("--task_name", "mrpc"), "--task_name and files of your own exclude each other"),
        (("--text_columns", "a", "b", "c"), "--text_columns names 3 columns: give one or two"),
        (("--text_columns", "sentense1"), r"has no column 'sentense1' \(did you mean 'sentence1'\?\)"),
        (("--dim_shared_query_key", 8), "--dim_shared_query_key needs --collaborative"),
        (("--collaborative", "--dim_shared_query_key", 9000), "9000"),
        (("--collaborative", "--kind", "per-head"), r"unknown --kind 'per-head' \(did you mean 'per_head'\?\)"),
        (("--lerning_rate", 1), r"unknown flag '--lerning_rate' \(did you mean '--learning_rate'\?\)"),
        (("--learning_rate", "fast"), "argument --learning_rate: invalid"),
        (("--num_train_epochs", "nan"), "finite number"),
        (("--max_train_steps", 0), "0 epochs or steps .* this one has no classification head"),
        (("--lr_scheduler_type", "reduce_lr_on_plateau"), "unknown --lr_scheduler_type"),
        (("--resume_from_checkpoint",), "holds no finished checkpoint"),
        (("--with_tracking", "--report_to", "tensorbord"), r"did you mean 'tensorboard'"),
        (("--do_predict",), "--do_predict needs --test_file"),
        (("--test_file", "x.csv"), "--test_file needs --do_predict"),
        (("--model_name_or_path", "/nowhere"), "cannot load AutoConfig from '/nowhere'"),
    ),
)
def test_wrong_flags_are_refused_before_anything_is_written(more, message, bert, files, tmp_path):
    with pytest.raises(CollabHeadsError, match=message):
        run(bert, files, tmp_path / "out", *more)
    assert not (tmp_path / "out").exists()


def test_an_output_folder_in_use_is_refused(bert, files, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(CollabHeadsError, match="is in use"):
        run(bert, files, out, "--max_train_steps", 1)
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]
    run(bert, files, out, "--max_train_steps", 2, "--checkpointing_steps", 1, "--overwrite_output_dir")
    assert (out / "step_0_1").is_dir()
    run(bert, files, out, "--max_train_steps", 1, "--overwrite_output_dir")
    assert not (out / "step_0_1").exists()  # or "latest" would be of another run
    assert (out / "thesis.txt").read_text() == "mine"


@pytest.mark.slow
def test_a_head_that_does_not_fit_is_refused(bert, files, tmp_path):
    run(bert, files, tmp_path / "two", "--max_train_steps", 1)
    three = tiny.write_csv(tmp_path / "three.csv", tiny.rows(30, 0, labels=3))
    data = ["--train_file", str(three), "--validation_file", str(three)]
    with pytest.raises(CollabHeadsError, match=r"has 2 output\(s\) \(0, 1\), the task needs 3 \(0, 1, 2\)"):
        run(tmp_path / "two", data, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    results = run(tmp_path / "two", data, None, "--max_train_steps", 1, "--ignore_mismatched_sizes")
    assert list(results["stages"]) == ["fine_tuned"]


@pytest.mark.slow
def test_a_model_that_gives_nan_is_not_scored(bert, files, tmp_path):
    """An argmax over NaN is a valid class."""
    run(bert, files, tmp_path / "out", "--max_train_steps", 1)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    model.base_model.embeddings.LayerNorm.weight.data.fill_(3e38)  # states overflow
    model.save_pretrained(tmp_path / "out")
    with pytest.raises(CollabHeadsError, match="validation: the model's outputs for 41 of 41 examples are NaN"):
        run(tmp_path / "out", files, None, "--num_train_epochs", 0)


@pytest.mark.slow
def test_a_swapped_model_is_not_swapped_again(bert, files, tmp_path):
    run(bert, files, tmp_path / "out", *SWAP, "--max_train_steps", 1)
    with pytest.raises(CollabHeadsError, match="is collaborative already"):
        run(tmp_path / "out", files, tmp_path / "again", *SWAP)
    assert not (tmp_path / "again").exists()


def test_a_damaged_or_foreign_checkpoint_is_refused(bert, files, tmp_path):
    out = tmp_path / "out"
    more = ("--max_train_steps", 2, "--checkpointing_steps", 1)
    run(bert, files, out, *more)
    results = (out / "all_results.json").read_bytes()
    for folder, message in (
        (bert, "is not a finished checkpoint"),
        (tmp_path / "none", "is not a folder"),
        (out / "step_0_1.partial", "was not finished"),
    ):
        if folder.name.endswith("partial"):
            (out / "step_0_1").rename(folder)
        with pytest.raises(CollabHeadsError, match=message):
            run(bert, files, out, *more, "--resume_from_checkpoint", folder)
    assert (out / "step_0_1").is_dir()  # it was whole, but for its name
    with pytest.raises(CollabHeadsError, match=r"learning_rate was 0.003 and is 0.001"):
        run(bert, files, out, *more, "--resume_from_checkpoint", "--learning_rate", 1e-3)
    (out / "step_0_2" / "optimizer.bin").unlink()
    with pytest.raises(CollabHeadsError, match=r"lacks optimizer.bin.*is whole: --resume_from_checkpoint .*step_0_1"):
        run(bert, files, out, *more, "--resume_from_checkpoint", out / "step_0_2")
    assert (out / "all_results.json").read_bytes() == results


def test_the_command_line_shows_errors_without_a_traceback(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run_glue.py", "--task_name", "rtee", "--model_name_or_path", "x"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "run_glue.py"), run_name="__main__")
    assert str(ended.value.code).startswith("run_glue.py: unknown --task_name 'rtee' (did you mean")
