import json
import tempfile
from pathlib import Path

import pytest

import run_image_classification
from collab_heads.command import main
from collab_heads.demo import image_demo


def test_the_demo_goes_through_the_script(capsys, tmp_path, monkeypatch):
    """Every row is a run of the real command line; all others start from the trained original; paths have spaces."""
    (tmp_path / "a b").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "a b"))
    runs = []

    def run(flags):
        args = run_image_classification.parse(flags)
        counts = [len(list(Path(folder).glob("*/*.png"))) for folder in (args.train_dir, args.validation_dir)]
        assert counts == [image_demo.TRAIN, 600]
        runs.append(args)
        stages = {"fine_tuned": {"accuracy": 0.9}}
        stages |= {"swapped": {"accuracy": 0.8}} if args.collaborative else {}
        stages |= {"compressed": {"accuracy": 0.7}} if args.compress_budget else {}
        return {"stages": stages, "eval_accuracy": 0.9, "parameters": 1000 - 100 * args.collaborative}

    results = image_demo.main(run)
    assert len(runs) == len(results) == 1 + len(image_demo.SETTINGS)
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
    monkeypatch.setattr(image_demo, "main", lambda run, row: {"original": 1})
    if processes:
        monkeypatch.setenv("WORLD_SIZE", processes)
    assert main.main(["images", "--demo", "--json"]) == code
    said = capsys.readouterr()
    assert json.loads(said.out or "null") == (None if code else {"original": 1})
    assert ("--demo is for one process" in said.err) is bool(code)


@pytest.mark.slow
def test_the_demo_learns():
    results = run_image_classification.main(["--demo"])
    assert all(found["eval_accuracy"] > 0.85 for found in results.values())
