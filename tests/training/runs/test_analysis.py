"""--analyze in both scripts: what is reported, gates over training, what is refused before anything is written."""

import json
import re

import pytest
import scripts
import torch
import translation_script
from heads_by_hand import model_in
from later import Later, run_translation
from translation_script import SCRATCH, write_lines

import tiny
from collab_heads.analysis import HeadReport
from collab_heads.errors import ArgumentError, DataError, OutputError
from collab_heads.files.folders import digest, read_manifest, write_manifest
from collab_heads.heads.history import HeadHistory

analysis = Later("collab_heads.training.runs.analysis")

GATES = ("--target_heads", "8", "--selection_share", "0.9", "--importance_samples", "0")
TREE = "\n".join(
    f"{number}\t{word}\t_\t_\t_\t_\t{head}\t{relation}\t_\t_"
    for number, word, head, relation in ((1, "the", 2, "det"), (2, "dog", 3, "nsubj"), (3, "runs", 0, "root"))
)


def report_of(out):
    return json.loads((out / "head_report" / "report.json").read_text())


@pytest.fixture
def without_pictures(monkeypatch):
    """They take longer than all else; `test_html` draws them."""

    def save(report, folder):
        folder.mkdir(exist_ok=True)
        write_lines(folder / "report.json", [report.to_json()])
        return folder

    monkeypatch.setattr(HeadReport, "save", save)


@pytest.mark.slow
def test_a_translation_run_that_learns_gates(marian, bilingual, tmp_path):
    out = tmp_path / "out"
    more = (*GATES, "--max_train_steps", 6, "--analyze", "--analyze_samples", 5)
    results = translation_script.run(marian, bilingual, out, *more)
    found = report_of(out)
    assert sum(site["num_heads"] for site in found["sites"]) == 8 and sum(found["totals"].values()) == 12
    assert found["data"]["sentences"] == 5 and found["statistics"] and found["relevance"] and found["contributions"]
    assert found["gradient"] and found["roles"] and found["ablation"] is None
    kept = {site["path"]: site["heads_after"] for site in results["heads"]["pruned"]["sites"] if site["heads_after"]}
    assert {path: len(numbers) for path, numbers in found["heads"].items()} == kept
    names = {path.name for path in (out / "head_report").iterdir()}
    assert {"report.html", "report.json", "gate_history.png", "relevance.svg"} <= names
    page = (out / "head_report" / "report.html").read_text(encoding="utf-8")
    assert "8 heads of 12" in page and "validation examples" in page


@pytest.mark.slow
@pytest.mark.usefixtures("without_pictures")
def test_a_glue_run_with_an_ablation_and_a_treebank(bert, files, tmp_path):
    out = tmp_path / "out"
    tree = tmp_path / "tree.conllu"
    tree.write_text(TREE + "\n\n", encoding="utf-8")
    more = ("--analyze", "--analyze_ablation", "--analyze_treebank", str(tree), "--max_train_steps", "2")
    scripts.run(bert, files, out, *more)
    found = report_of(out)
    assert found["data"]["sentences"] == 41 and found["roles"]["sentences"] == 1
    assert found["ablation"]["metric"] == "loss" and set(found["curves"]) >= {"relevance", "gradient", "leave_one_out"}
    assert found["worth"] is not None and found["contributions"] is None
    assert re.fullmatch(r"validation examples of files\d+/validation\.csv", found["data"]["name"])
    assert found["statistics"]["excluded"] == [tiny.SPECIAL.index("[SEP]")]


@pytest.mark.slow
@pytest.mark.usefixtures("without_pictures")
def test_a_metric_without_each_head(marian, bilingual, tmp_path):
    """As the evaluations measure it; and one that is not measured is refused before anything is written."""
    out = tmp_path / "out"
    more = ("--analyze", "--max_train_steps", 0, "--val_max_target_length", 8)
    results = translation_script.run(marian, bilingual, out, *more, "--analyze_ablation", "chrf")
    found = report_of(out)["ablation"]
    assert (found["metric"], found["higher_is_better"]) == ("chrf", True)
    assert report_of(out)["worth"] is not None and report_of(out)["contributions"] is not None
    named = r"validation examples of (bilingual\d+)/dev\.xx and \1/dev\.en"
    assert re.fullmatch(named, report_of(out)["data"]["name"])
    assert found["original"] == pytest.approx(results["eval_chrf"], abs=0)
    without = [value for values in found["without"].values() for value in values]
    assert len(without) == 12 and len(set(without)) > 1
    with pytest.raises(ArgumentError, match="unknown --analyze_ablation 'ter'; known: loss, bleu, chrf"):
        translation_script.run(marian, bilingual, tmp_path / "other", *more, "--analyze_ablation", "ter")
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("without_pictures")
def test_contributions_after_prefixes_beside_an_ablation(marian, bilingual, tmp_path):
    more = ("--analyze", "--max_train_steps", 0, "--analyze_samples", 3, "--val_max_target_length", 8)
    more += ("--analyze_prefixes", "own", "reference", "--analyze_ablation")
    translation_script.run(marian, bilingual, tmp_path / "out", *more)
    found = report_of(tmp_path / "out")
    assert found["contributions"]["prefixes"] == "own" and found["ablation"]["metric"] == "loss"
    assert [run["contributions"]["prefixes"] for run in found["compared_contributions"]["runs"]] == ["own", "reference"]
    with pytest.raises(ArgumentError, match="unknown --analyze_prefixes 'owm'"):
        run_translation.parse(translation_script.flags(marian, bilingual, tmp_path, *more, "--analyze_prefixes", "owm"))


@pytest.mark.slow
def test_gates_over_training_are_the_same_after_a_resumed_run(
    marian, bilingual, tmp_path, monkeypatch, without_pictures
):
    histories, stock = [], analysis.analyze_heads

    def spy(model, batches, **options):
        histories.append(options["gate_history"])
        return stock(model, batches, **options)

    monkeypatch.setattr("collab_heads.training.runs.analysis.analyze_heads", spy)
    more = (*GATES, "--max_train_steps", 6, "--checkpointing_steps", 3, "--analyze")
    out = tmp_path / "out"
    translation_script.run(marian, bilingual, out, *more)
    resumed = ("--resume_from_checkpoint", out / "step_0_3")
    translation_script.run(marian, bilingual, out, *more, *resumed)
    whole, again = histories
    assert whole.moments == again.moments and [moment.step for moment in whole.moments] == list(range(7))
    whole, again = (history.values["gates"] for history in histories)
    assert all(torch.equal(whole[path], again[path]) for path in whole)
    rows = torch.cat([*whole.values()], dim=1)
    assert rows.shape == (7, 12) and rows[0].min() > 0.9 and rows[-1].min() < 0.5
    path = out / "step_0_3" / "progress.json"
    for damage in ([[3, {"a": [0.5]}]], [[0, {next(iter(whole)): [1e30] * 4}]], [7], [["x", {}]] * 2, [[4, {}]], []):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"gates_over_training": damage}))
        write_manifest(path.parent, read_manifest(path.parent)["files"] | {path.name: digest(path)})
        with pytest.raises(OutputError, match="its gates_over_training are damaged"):
            translation_script.run(marian, bilingual, out, *more, *resumed)


def test_a_recorder_keeps_some_hundred_steps_and_the_last():

    model = model_in("marian", "gated", torch.float32)
    recorder = analysis.GateRecorder(model, 1050)
    for step in range(1, 1051):
        recorder(step)
    steps = [moment.step for moment in recorder.history.moments]
    assert steps == [0, *range(10, 1051, 10)] and isinstance(recorder.history, HeadHistory)
    again = analysis.GateRecorder(model, 1050, json.loads(json.dumps(recorder.state())))
    assert again.history.moments == recorder.history.moments
    assert again.state() == recorder.state()


@pytest.mark.parametrize(
    "more, error, said",
    (
        (("--analyze_samples", "3"), ArgumentError, "--analyze_samples needs --analyze or --analyze_every"),
        (("--analyze_treebank", "x"), ArgumentError, "--analyze_treebank needs --analyze$"),
        (("--analyze_prefixes", "own"), ArgumentError, "--analyze_prefixes needs --analyze$"),
        (("--analyze_ablation",), ArgumentError, "--analyze_ablation needs --analyze$"),
        (("--analyze", "--analyze_treebank", "missing.conllu"), DataError, "missing.conllu"),
    ),
)
def test_what_is_refused_before_anything_is_written(more, error, said, bilingual, tmp_path):
    with pytest.raises(error, match=said):
        translation_script.run(SCRATCH, bilingual, tmp_path / "out", *more)
    assert not (tmp_path / "out").exists()


def test_without_a_folder_there_is_nowhere_to_write(bilingual):
    with pytest.raises(ArgumentError, match="--analyze needs --output_dir"):
        run_translation.parse(translation_script.flags(SCRATCH, bilingual, None, "--analyze"))


def test_a_broken_treebank_names_its_line(bilingual, tmp_path):
    tree = write_lines(tmp_path / "tree.conllu", [*TREE.split("\n"), "4\tbroken", ""])
    with pytest.raises(DataError, match=r"tree\.conllu.*4"):
        translation_script.run(SCRATCH, bilingual, tmp_path / "out", "--analyze", "--analyze_treebank", tree)
