"""The demos: each row is a run of the script, and is repeated by the command beside it."""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from later import run_glue, run_image_classification, run_translation

from collab_heads.command import main
from collab_heads.data.tables import read_csv
from collab_heads.demo import corpus, demos
from collab_heads.errors import ArgumentError

DEMO = replace(demos.GLUE, settings={"one": "", "two": ""})
NAMES = DEMO.rows


def test_the_first_row_is_always_run():
    assert DEMO.chosen(None) == NAMES
    assert DEMO.chosen(1) == ["original"] and DEMO.chosen(3) == ["original", "two"]
    with pytest.raises(ArgumentError, match="--demo 4: its rows are 1 original, 2 one, 3 two"):
        DEMO.chosen(4)


@pytest.mark.parametrize(
    ("typed", "said"),
    (
        ("python -c pass", "python run_glue.py --demo 2"),
        (".venv/bin/python run_glue.py --demo", ".venv/bin/python run_glue.py --demo 2"),
        ("python run_glue.py --quiet --demo 3 --seed 1", "python run_glue.py --demo 2"),
        ("python -m collab_heads glue --json --demo", "python -m collab_heads glue --demo 2"),
    ),
)
def test_the_command_begins_as_it_was_typed(typed, said, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", typed.split())
    assert DEMO.repeating("one") == said


def test_a_command_on_the_path_needs_no_python(monkeypatch, tmp_path):
    command = tmp_path / "collab-heads"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    monkeypatch.setattr(sys, "orig_argv", ["/x/python", str(command), "glue", "--demo"])
    assert DEMO.repeating("two") == f"/x/python {command} glue --demo 3"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert DEMO.repeating("two") == "collab-heads glue --demo 3"


@pytest.mark.parametrize("row", ("0", "-1", "shared"))
def test_a_row_is_a_number(row):
    with pytest.raises(ArgumentError, match="--demo"):
        run_glue.parse(["--demo", row])
    assert run_glue.parse(["--demo", "2"]).demo == 2


def test_flags_that_a_demo_would_pass_over_are_refused():
    with pytest.raises(ArgumentError, match=r"--demo has flags of its own: leave out --analyze, --output_dir$"):
        run_glue.parse(["--demo", "2", "--analyze", "--output_dir=out", "--quiet"])
    assert run_glue.parse(["--quiet", "--demo"]).demo is True


def test_the_demo_of_glue(monkeypatch, tmp_path, capsys):
    """Every row is a run of the real command line; all others start from the fine-tuned original."""
    monkeypatch.setattr(demos, "model_folder", lambda: tmp_path)
    runs = []

    def run(flags):
        args = run_glue.parse(flags)
        assert len(read_csv(Path(args.train_file))) == demos.PARAPHRASES["train"][0]
        assert len(read_csv(Path(args.validation_file))) == demos.PARAPHRASES["validation"][0]
        runs.append(args)
        stages = {"fine_tuned": {"accuracy": 0.9}} | ({"swapped": {"accuracy": 0.8}} if args.collaborative else {})
        swap = {"decomposition_seconds": 2.0} if args.collaborative else None
        if args.compress_budget:
            stages["compressed"] = {"accuracy": 0.85}
            swap = {"seconds": 3.0, "sites": [{"heads_after": 20}, {"neurons_after": 7}, {"heads_after": 30}]}
        heads = {"pruned": {"sites": [{"heads_after": 5}] * 2}} if args.target_heads else None
        parameters = 1000 - 100 * args.collaborative
        return {"stages": stages, "eval_accuracy": 0.9, "swap": swap, "heads": heads, "parameters": parameters}

    results = demos.GLUE.main(run)
    assert len(runs) == len(results) == 1 + len(demos.GLUE.settings)
    assert runs[0].model_name_or_path == str(tmp_path)
    assert not runs[0].collaborative
    assert all(args.model_name_or_path == runs[0].output_dir for args in runs[1:])
    rows = {line[: len(max(results, key=len))].strip(): line for line in capsys.readouterr().out.splitlines()}
    for name, args in zip(demos.GLUE.settings, runs[1:], strict=True):
        if args.compress_budget:
            assert rows[name].split("  python ")[0].split()[-7:] == "0.850 0.900 50 1,000 +0.0% 3.0 s".split()
            continue
        cells = ["0.800"] * args.collaborative + ["0.900", "10" if args.target_heads else "72"]
        change = ["900", "-10.0%", "2.0", "s"] if args.collaborative else ["1,000", "+0.0%"]
        row, command = rows[name].split("  python ")
        assert row.split()[-len(cells + change) :] == cells + change
        assert command == f"run_glue.py --demo {2 + [*demos.GLUE.settings].index(name)}"
    assert rows["original"].split()[:5] == ["original", "0.900", "72", "1,000", "+0.0%"]
    runs.clear()
    again = demos.GLUE.main(run, row=4)
    assert [*again] == ["original", "shared 64"] and again["shared 64"] == results["shared 64"] and len(runs) == 2
    assert "python run_glue.py --demo 4" in capsys.readouterr().out.splitlines()[-2]


@pytest.mark.slow
def test_the_demo_of_glue_learns():
    results = run_glue.main(["--demo"])
    assert all(found["eval_accuracy"] > 0.8 for found in results.values())


@pytest.mark.slow
def test_the_demo_of_images(capsys, tmp_path, monkeypatch):
    """Every row is a run of the real command line; all others start from the trained original; paths have spaces."""
    (tmp_path / "a b").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "a b"))
    runs = []

    def run(flags):
        args = run_image_classification.parse(flags)
        counts = [len(list(Path(folder).glob("*/*.png"))) for folder in (args.train_dir, args.validation_dir)]
        assert counts == [demos.TRAIN_DIGITS, 600]
        runs.append(args)
        stages = {"fine_tuned": {"accuracy": 0.9}}
        stages |= {"swapped": {"accuracy": 0.8}} if args.collaborative else {}
        stages |= {"compressed": {"accuracy": 0.7}} if args.compress_budget else {}
        return {"stages": stages, "eval_accuracy": 0.9, "parameters": 1000 - 100 * args.collaborative}

    results = demos.IMAGES.main(run)
    assert len(runs) == len(results) == 1 + len(demos.IMAGES.settings)
    assert runs[0].model_type == "deit" and not runs[0].collaborative
    assert all(args.model_name_or_path == runs[0].output_dir for args in runs[1:])
    said = capsys.readouterr().out.splitlines()
    lines = {name: next(line for line in said if line.startswith(f"{name}  ")) for name in results}
    rows = {name: line.split("  python ")[0].split() for name, line in lines.items()}
    assert lines["8 of 16 heads"].endswith("  python examples/run_image_classification.py --demo 4")
    assert rows["original"][1:] == ["0.900", "1,000", "+0.0%"]
    assert rows["shared 16 of 64"][-4:] == ["0.800", "0.900", "900", "-10.0%"]
    assert rows["half of attention"][-4:] == ["0.700", "0.900", "1,000", "+0.0%"]


@pytest.mark.parametrize("processes, code", ((None, 0), ("1", 0), ("2", 2)))
def test_the_command_runs_it_in_one_process(processes, code, monkeypatch, capsys):
    monkeypatch.setattr(demos.Demo, "main", lambda self, run, row: {"original": 1})
    if processes:
        monkeypatch.setenv("WORLD_SIZE", processes)
    assert main.main(["images", "--demo", "--json"]) == code
    said = capsys.readouterr()
    assert json.loads(said.out or "null") == (None if code else {"original": 1})
    assert ("--demo is for one process" in said.err) is bool(code)


@pytest.mark.slow
def test_the_demo_of_images_learns():
    results = run_image_classification.main(["--demo"])
    assert all(found["eval_accuracy"] > 0.85 for found in results.values())


@pytest.mark.slow
def test_the_demo_of_translation(capsys, tmp_path, monkeypatch):
    (tmp_path / "a b").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "a b"))
    runs = []

    def run(flags):
        args = run_translation.parse(flags)
        for split, (count, seed) in demos.PAIRS.items():
            source, target = (Path(path).read_text().splitlines() for path in getattr(args, f"{split}_file"))
            assert (target, source) == corpus(count, seed)
        runs.append(args)
        folder = Path(args.output_dir) / "translations"
        folder.mkdir(parents=True)
        for name in ("validation-loaded-0", "validation-pruned-0"):  # the newest counts
            (folder / f"{name}.txt").write_text(
                "".join(f"{name} {len(runs)} {i}\n" for i in range(demos.PAIRS["validation"][0]))
            )
        stages = {"fine_tuned": {"bleu": 40.0}} | ({"swapped": {"bleu": 12.345}} if args.collaborative else {})
        heads = {"pruned": {"sites": [{"heads_after": 3}] * 4}} if args.target_heads else None
        return {"stages": stages, "eval_bleu": 56.78, "heads": heads, "parameters": 1000 - 100 * args.collaborative}

    results = demos.TRANSLATION.main(run)
    assert list(results) == ["original", *demos.TRANSLATION.settings]
    assert len(runs) == 1 + len(demos.TRANSLATION.settings)
    assert runs[0].model_type == "marian"
    assert not runs[0].collaborative
    assert all(args.model_name_or_path == runs[0].output_dir for args in runs[1:])
    assert len({args.output_dir for args in runs}) == len(runs)
    lines = capsys.readouterr().out.splitlines()
    width = len(max(results, key=len))
    for number, (name, args) in enumerate(zip(results, runs, strict=True), 1):
        rows = [line for line in lines if line[:width].strip() == name]
        cells = ["12.3"] * args.collaborative + ["56.8", "12" if args.target_heads else "36"]
        cells += ["900", "-10.0%"] if args.collaborative else ["1,000", "+0.0%"]
        assert rows[-1][width:].split() == [*cells, *f"python run_translation.py --demo {number}".split()]
        assert [row[width:].split() for row in rows[:-1]] == [
            ["validation-pruned-0", str(number), str(i)] for i in range(demos.SAMPLES)
        ]
    english, invented = corpus(*demos.PAIRS["validation"])
    for name, side in (("source", invented), ("reference", english)):
        assert [line[width:].strip() for line in lines if line[:width].strip() == name] == side[: demos.SAMPLES]
    assert not Path(runs[0].output_dir).exists()  # a temporary folder
    assert lines[-1].endswith("seconds in all.")


def test_heads_of_the_original_are_those_of_its_flags():
    args = run_translation.parse([*"--train_file a b --validation_file a b".split(), *demos.MARIAN.split()])
    assert args.num_layers * args.num_heads * 3 == 36  # what the table says of models that keep all


@pytest.mark.slow
def test_the_demo_of_translation_learns():
    results = run_translation.main(["--demo"])
    original = results["original"]["eval_bleu"]
    assert original > 50
    assert all(found["eval_bleu"] > original - 15 for found in results.values())
