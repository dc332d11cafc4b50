from pathlib import Path

import pytest

import run_glue
from collab_heads.data.tables import read_csv
from collab_heads.demo import glue_demo


def test_the_demo_goes_through_the_script(monkeypatch, tmp_path, capsys):
    """Every row is a run of the real command line; all others start from the fine-tuned original."""
    monkeypatch.setattr(glue_demo, "model_folder", lambda: tmp_path)
    runs = []

    def run(flags):
        args = run_glue.parse(flags)
        assert len(read_csv(Path(args.train_file))) == glue_demo.TRAIN
        assert len(read_csv(Path(args.validation_file))) == glue_demo.DEV
        runs.append(args)
        stages = {"fine_tuned": {"accuracy": 0.9}} | ({"swapped": {"accuracy": 0.8}} if args.collaborative else {})
        swap = {"decomposition_seconds": 2.0} if args.collaborative else None
        if args.compress_budget:
            stages["compressed"] = {"accuracy": 0.85}
            swap = {"seconds": 3.0, "sites": [{"heads_after": 20}, {"neurons_after": 7}, {"heads_after": 30}]}
        heads = {"pruned": {"sites": [{"heads_after": 5}] * 2}} if args.target_heads else None
        parameters = 1000 - 100 * args.collaborative
        return {"stages": stages, "eval_accuracy": 0.9, "swap": swap, "heads": heads, "parameters": parameters}

    results = glue_demo.main(run)
    assert len(runs) == len(results) == 1 + len(glue_demo.SETTINGS)
    assert runs[0].model_name_or_path == str(tmp_path)
    assert not runs[0].collaborative
    assert all(args.model_name_or_path == runs[0].output_dir for args in runs[1:])
    rows = {line[: len(max(results, key=len))].strip(): line for line in capsys.readouterr().out.splitlines()}
    for name, args in zip(glue_demo.SETTINGS, runs[1:], strict=True):
        if args.compress_budget:
            assert rows[name].split("  python ")[0].split()[-7:] == "0.850 0.900 50 1,000 +0.0% 3.0 s".split()
            continue
        cells = ["0.800"] * args.collaborative + ["0.900", "10" if args.target_heads else "72"]
        change = ["900", "-10.0%", "2.0", "s"] if args.collaborative else ["1,000", "+0.0%"]
        row, command = rows[name].split("  python ")
        assert row.split()[-len(cells + change) :] == cells + change
        assert command == f"run_glue.py --demo {2 + [*glue_demo.SETTINGS].index(name)}"
    assert rows["original"].split()[:5] == ["original", "0.900", "72", "1,000", "+0.0%"]
    runs.clear()
    again = glue_demo.main(run, row=4)
    assert [*again] == ["original", "shared 64"] and again["shared 64"] == results["shared 64"] and len(runs) == 2
    assert "python run_glue.py --demo 4" in capsys.readouterr().out.splitlines()[-2]


@pytest.mark.slow
def test_the_demo_learns():
    results = run_glue.main(["--demo"])
    assert all(found["eval_accuracy"] > 0.8 for found in results.values())
