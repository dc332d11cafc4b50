"""--analyze_every: the training does not change, what is noted is what is there, resumed runs, what is refused."""

import json
import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import scripts
import torch
import translation_script
from later import Later, run_glue, run_translation
from scripts import checkpoints
from transformers import AutoModelForSequenceClassification
from translation_script import SCRATCH, as_json, differing, weights

import tiny
from collab_heads import get_adapter
from collab_heads.analysis import head_statistics
from collab_heads.base.extras import MissingPackageError
from collab_heads.contract.registry import head_numbers
from collab_heads.errors import ArgumentError, OutputError
from collab_heads.heads.history import HeadHistory, rounded
from collab_heads.rotation.head_rotation import HeadRotation

analysis = Later("collab_heads.training.runs.analysis")
classifier = Later("collab_heads.training.runs.classifier")

FOLDER, SERIES = "head_history", "head_history/head_history.json"
ALPHAS = ("--alpha_mixing", "--alpha_growth_weight", 0.05, "--alpha_sites", "dec-self", "dec-enc")
GATES = ("--target_heads", 2, "--gated_sites", "enc-self", "--selection_share", 0.9, "--importance_samples", 0)


@pytest.fixture
def without_pictures(monkeypatch):
    """They take longer than all else."""
    monkeypatch.setattr("collab_heads.training.runs.analysis.history_curves", lambda *args, **options: None)
    monkeypatch.setattr("collab_heads.training.runs.analysis.history_strip", lambda *args, **options: None)
    for name in ("png_bytes", "svg_bytes", "history_gif"):
        monkeypatch.setattr(f"collab_heads.training.runs.analysis.{name}", lambda *args: b"drawn")


@pytest.fixture
def drawing(monkeypatch):
    """Looking at heads uses up random numbers of all kinds, as a data loader does."""
    stock = analysis.HeadWatch.look

    def look(self, model, moment):
        random.random(), np.random.rand(), torch.rand(3)
        stock(self, model, moment)

    monkeypatch.setattr(analysis.HeadWatch, "look", look)


def series(out) -> HeadHistory:
    return HeadHistory.load(out / SERIES)


@pytest.mark.slow
@pytest.mark.usefixtures("without_pictures", "drawing")
@pytest.mark.parametrize("script", ("glue", "translation"))
def test_the_training_is_the_same(script, bert, files, marian, bilingual, tmp_path):
    """Losses, metrics and weights, bit for bit; with dropout, gates that are drawn and heads that change places."""
    if script == "glue":
        run, model, data = scripts.run, bert, files
        more = ("--max_train_steps", 5, "--gate_weight", 0.1, "--rotate", "local")
    else:
        run, model, data = translation_script.run, (*SCRATCH, "--dropout", 0.2), bilingual
        more = ("--max_train_steps", 5, *ALPHAS)
    without = run(model, data, tmp_path / "without", *more)
    watched = run(model, data, tmp_path / "watched", *more, "--analyze_every", 2)
    assert as_json(watched, "history", "heads", "train_loss") == as_json(without, "history", "heads", "train_loss")
    assert differing(tmp_path / "watched", tmp_path / "without") == []
    assert [moment.step for moment in series(tmp_path / "watched").moments] == [0, 2, 4, 5]
    assert not (tmp_path / "without" / FOLDER).exists()


@pytest.fixture
def batches(monkeypatch):
    """The validation batches of a run."""
    seen, stock = [], classifier.Classifier.validation

    def validation(self, **options):
        seen[:] = list(stock(self, **options))
        return seen

    monkeypatch.setattr(classifier.Classifier, "validation", validation)
    return seen


@pytest.mark.slow
@pytest.mark.usefixtures("without_pictures")
def test_what_is_noted_is_what_is_there(bert, files, tmp_path, batches):
    """As checkpoints of the same steps have it; over two trainings, whose steps are counted on."""
    out = tmp_path / "out"
    more = (
        "--swap",
        "between",
        *scripts.SWAP,
        "--max_train_steps",
        5,
        "--analyze_every",
        2,
        "--checkpointing_steps",
        4,
    )
    scripts.run(bert, files, out, *more)
    found = series(out)
    expected = [(0, "fine_tuned"), (2, "fine_tuned"), (4, "fine_tuned"), (5, "fine_tuned")]
    expected += [(5 + step, "fine_tuned_again") for step, _ in expected]
    assert [(moment.step, moment.stage) for moment in found.moments] == expected
    assert list(found.values) == ["confidence"]
    assert sum(len(batch["labels"]) for batch in batches) == 41
    for index, name in ((2, "step_0_4"), (6, "step_1_4")):
        model = AutoModelForSequenceClassification.from_pretrained(out / name)
        exclude = [tiny.SPECIAL.index("[SEP]")]
        measured = head_statistics(model, batches, measures=("confidence",), exclude=exclude).confidence
        assert found.values["confidence"].keys() == measured.keys()
        for path, rows in found.values["confidence"].items():
            assert torch.equal(rows[index], rounded(measured[path]))
    rows = next(iter(found.values["confidence"].values()))
    assert len({tuple(row.tolist()) for row in rows}) == len(rows)  # the swap, and every step, changes them


@pytest.mark.slow
@pytest.mark.usefixtures("without_pictures")
def test_gates_alphas_and_removed_heads(marian, bilingual, tmp_path, monkeypatch):
    """What is noted last is what the run ends with; heads that were removed before the training were never there."""
    seen, stock = [], analysis.head_scores
    monkeypatch.setattr(
        analysis,
        "head_scores",
        lambda model, batches, *more, **o: seen.append(batches) or stock(model, batches, *more, **o),
    )
    out, alive = tmp_path / "out", tmp_path / "alive.json"
    alive.write_text(json.dumps({"dec-enc": [[1, 0, 1, 1]]}))
    more = (*ALPHAS, *GATES, "--alive_heads", alive, "--max_train_steps", 6, "--analyze_every", 4)
    results = translation_script.run(marian, bilingual, out, *more, "--analyze_samples", 5)
    found = series(out)
    assert [moment.step for moment in found.moments] == [0, 4, 6]
    assert [sum(len(batch["labels"]) for batch in batches) for batches in seen] == [5] * 3
    assert set(found.values) == {"confidence", "gates", "alphas"}
    roles = {site.path: site.role for site in found.sites}
    assert {roles[path] for path in found.values["gates"]} == {"enc-self"}
    assert {roles[path] for path in found.values["alphas"]} == {"dec-self", "dec-enc"}
    (gates,) = found.values["gates"].values()
    assert gates[0].min() > 0.9 and (gates[-1] > 0.5).sum() == 2
    for path, rows in found.values["alphas"].items():
        size = len(found.heads[path])
        assert found.heads[path] == ((0, 2, 3) if roles[path] == "dec-enc" else (0, 1, 2, 3))
        assert torch.equal(rows[0], torch.eye(size, dtype=torch.float64)) and not torch.equal(rows[-1], rows[0])
        distance = next(site["distance"] for site in results["heads"]["alphas"]["sites"] if site["path"] == path)
        change = float((rows[-1] - torch.eye(size, dtype=torch.float64)).norm())
        assert change == pytest.approx(distance, rel=1e-4)  # six digits of numbers about one are kept


@pytest.mark.slow
@pytest.mark.usefixtures("without_pictures")
def test_heads_that_go_between_two_trainings(bert, files, tmp_path):
    """They keep their places, without numbers."""
    out = tmp_path / "out"
    more = ("--swap", "between", *scripts.SWAP, "--max_train_steps", 2, "--analyze_every", 2)
    chosen = ("--target_heads", 5, "--head_selection", "gradient")
    scripts.run(bert, files, out, *more, *chosen)
    found = series(out)
    assert [moment.step for moment in found.moments] == [0, 2, 2, 4]
    model = AutoModelForSequenceClassification.from_pretrained(out)
    kept = head_numbers(model, get_adapter(model))
    assert sum(map(len, kept.values())) == 5
    for path, rows in found.values["confidence"].items():
        there = rows.isfinite()
        assert there[:2].all()
        for row in there[2:]:
            assert [head for head, is_there in enumerate(row.tolist()) if is_there] == list(kept[path])


@pytest.mark.slow
@pytest.mark.usefixtures("without_pictures")
def test_what_a_rotation_ranks_by_is_noted_per_epoch(bert, files, tmp_path, monkeypatch):
    """The pairs follow from the scores of the epoch before; pictures know when heads changed places."""
    marked = []
    monkeypatch.setattr(analysis, "history_curves", lambda *args, exchanges: marked.append(exchanges))
    out = tmp_path / "out"
    more = ("--rotate", "enc-self=hard", "--rotation_metric", "pairwise", "--analyze_every", "epoch")
    results = scripts.run(bert, files, out, *more, "--num_train_epochs", 3)
    found, steps = series(out), 14  # 107 examples, 8 in a batch
    assert [(moment.step, moment.epoch) for moment in found.moments] == [(e * steps, e) for e in range(4)]
    assert set(found.values) == {"confidence", "map_distance"}
    assert [entry["epoch"] for entry in results["heads"]["rotation"]] == [1, 2, 3]
    rows = found.values["map_distance"]
    for entry, index in ((results["heads"]["rotation"][0], 0), (results["heads"]["rotation"][2], 2)):
        scores = {(path, head): float(score) for path in rows for head, score in enumerate(rows[path][index])}
        ranked = sorted(scores, key=scores.get)
        assert [[tuple(end) for end in pair] for pair in entry["pairs"]] == [[ranked[-1], ranked[0]]]
    assert marked == [{"enc-self": [0, steps, 2 * steps]}] * 2


@pytest.mark.slow
@pytest.mark.usefixtures("without_pictures")
def test_a_training_that_ends_early_is_looked_at_there(bert, files, tmp_path):
    more = ("--learning_rate", 1e-30, "--eval_steps", 2, "--early_stopping_patience", 1, "--analyze_every", 3)
    scripts.run(bert, files, tmp_path / "out", *more)
    assert [moment.step for moment in series(tmp_path / "out").moments] == [0, 3, 4]


RUNS = {
    "alphas": ("--max_train_steps", 4, "--checkpointing_steps", 2, *ALPHAS, "--analyze_every", 1),
    "gates": ("--max_train_steps", 6, "--checkpointing_steps", 3, *GATES, "--analyze_every", 4),
}


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("name", ("alphas", "gates"))
@pytest.mark.slow
def test_a_resumed_run_ends_as_an_unbroken_one(name, marian, bilingual, tmp_path):
    """Also where the series of a killed run is further than its checkpoint, or is gone."""
    out, more = tmp_path / "out", RUNS[name]
    whole = translation_script.run(marian, bilingual, out, *more)
    expected, ended = (out / SERIES).read_bytes(), weights(out)
    (out / SERIES).unlink()
    middle, end = checkpoints(out, "every", count=2)
    resumed = translation_script.run(marian, bilingual, out, *more, "--resume_from_checkpoint", middle)
    assert (out / SERIES).read_bytes() == expected
    assert as_json(resumed, "history", "heads") == as_json(whole, "history", "heads")
    assert differing(weights(out), ended) == []
    assert (out / FOLDER / "gates.gif").exists() == (name == "gates")
    if name == "gates":  # from the very end, into another folder: nothing is left to note
        other = tmp_path / "other"
        translation_script.run(marian, bilingual, other, *more, "--resume_from_checkpoint", end)
        assert (other / SERIES).read_bytes() == expected


@pytest.mark.slow
@pytest.mark.usefixtures("without_pictures")
def test_a_killed_run_ends_as_an_unbroken_one(marian, bilingual, tmp_path):
    """SIGKILL right after a checkpoint appears; the series is whole at every moment."""
    more = (*ALPHAS, "--max_train_steps", 12, "--checkpointing_steps", 3, "--analyze_every", 1)
    translation_script.run(marian, bilingual, tmp_path / "unbroken", *more)
    out = tmp_path / "killed"
    arguments = translation_script.flags(marian, bilingual, out, *more)
    scripts.kill_at(out / "step_0_6", scripts.fork(run_translation.main, arguments))
    assert 6 <= series(out).moments[-1].step < 12
    translation_script.run(marian, bilingual, out, *more, "--resume_from_checkpoint")
    assert (out / SERIES).read_bytes() == (tmp_path / "unbroken" / SERIES).read_bytes()


@pytest.mark.slow
def test_two_processes_note_what_one_does(bert, files, tmp_path):
    """The first one looks for all; as near as their weights are, and drawn by the first one alone."""
    quiet = tiny.save_tiny_bert(tmp_path / "quiet", dropout=0.0)
    more = ("--max_train_steps", 6, "--analyze_every", 3, "--seed", 1)
    one, two = tmp_path / "one", tmp_path / "two"
    scripts.run(quiet, files, one, *more, "--gradient_accumulation_steps", 2)
    scripts.run_on_two(run_glue.main, scripts.flags(quiet, files, two, *more))
    alone, found = series(one), series(two)
    assert found.moments == alone.moments
    for path, rows in alone.values["confidence"].items():
        torch.testing.assert_close(found.values["confidence"][path], rows, rtol=0, atol=scripts.ADAM32)
    assert (two / FOLDER / "confidence.png").exists()


@pytest.mark.slow
def test_pictures(marian, bilingual, tmp_path):
    """Light ones; the record of the run names them, and a run that replaces it takes them away."""
    out = tmp_path / "out"
    translation_script.run(marian, bilingual, out, *RUNS["alphas"])
    names = {path.name for path in (out / FOLDER).iterdir()}
    stills = {f"{name}.{kind}" for name in ("confidence", "confidence_by_head", "alphas") for kind in ("png", "svg")}
    assert names == {"head_history.json", *stills}
    recorded = json.loads((out / "manifest.json").read_text())["files"]
    assert {f"{FOLDER}/{name}" for name in names} <= recorded.keys()
    assert max(path.stat().st_size for path in (out / FOLDER).iterdir()) < 300_000
    before = (out / FOLDER / "confidence.svg").read_bytes()
    translation_script.run(marian, bilingual, out, *RUNS["alphas"], "--overwrite_output_dir")
    assert (out / FOLDER / "confidence.svg").read_bytes() == before
    translation_script.run(marian, bilingual, out, "--max_train_steps", 1, "--overwrite_output_dir")
    assert not (out / FOLDER).exists()


@pytest.mark.parametrize(
    "more, error, said",
    (
        (("--analyze_every", 0), ArgumentError, "argument --analyze_every: 0 is too small"),
        (("--analyze_every", "often"), ArgumentError, "argument --analyze_every: invalid interval value: 'often'"),
        (("--analyze_every", 2, "--max_train_steps", 0), ArgumentError, "there are no training steps"),
        (("--analyze_samples", 3), ArgumentError, "needs --analyze or --analyze_every"),
        (("--analyze_every", 2, "--analyze_ablation"), ArgumentError, "--analyze_ablation needs --analyze"),
    ),
)
def test_what_is_refused_before_anything_is_written(more, error, said, bilingual, tmp_path):
    with pytest.raises(error, match=said):
        translation_script.run(SCRATCH, bilingual, tmp_path / "out", *more)
    assert not (tmp_path / "out").exists()


def test_without_a_folder_there_is_nowhere_to_write(bilingual):
    with pytest.raises(ArgumentError, match="--analyze_every needs --output_dir"):
        run_translation.parse(translation_script.flags(SCRATCH, bilingual, None, "--analyze_every", 5))


@pytest.mark.parametrize("module, package", (("matplotlib", "pictures need matplotlib"), ("PIL", "move need pillow")))
def test_missing_packages_are_told_before_the_training(module, package, bert, files, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr("collab_heads.training.runs.analysis.HeadWatch", None)
    with pytest.raises(MissingPackageError, match=package):
        run_glue.parse(scripts.flags(bert, files, tmp_path / "out", "--analyze_every", 5))


def test_a_damaged_series_in_a_checkpoint():
    learner = SimpleNamespace(session=None)
    for noted in ({}, {"version": 1}, {"version": 2}):
        with pytest.raises(OutputError, match="--resume_from_checkpoint: what it records of heads over the training"):
            analysis.HeadWatch(learner, None, noted)
    assert analysis.HeadWatch(learner, None, None).history is None


def test_a_run_without_heads_says_that_there_is_no_history(capsys, tmp_path):
    accelerator = SimpleNamespace(print=print)
    for output, said in ((tmp_path, "no heads are left: there is no history of them\n"), (None, "")):
        learner = SimpleNamespace(session=SimpleNamespace(writes_to=output, accelerator=accelerator))
        analysis.HeadWatch(learner, None, None).draw({})
        assert capsys.readouterr().out == said


def test_metrics_that_are_watched():
    assert analysis.watched_metrics(None) == ["confidence"]
    assert analysis.watched_metrics(HeadRotation(policy="hard", metric="l2")) == ["confidence", "output_distance"]
    several = HeadRotation(policy={"enc-self": "soft", "dec-enc": "random"}, metric={"enc-self": "pairwise"})
    assert analysis.watched_metrics(several) == ["confidence", "map_distance"]
