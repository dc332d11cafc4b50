from pathlib import Path

import pytest

import run_glue
from collab_heads.training import demo
from collab_heads.training.files import read_csv


def test_the_demo_goes_through_the_script(monkeypatch, tmp_path, capsys):
    """Every row is a run of the real command line; the swaps start from the fine-tuned original."""
    monkeypatch.setattr(demo, "model_folder", lambda: tmp_path)
    runs = []

    def run(flags):
        args = run_glue.parse(flags)
        assert len(read_csv(Path(args.train_file))) == demo.TRAIN
        assert len(read_csv(Path(args.validation_file))) == demo.DEV
        runs.append(args)
        stages = {"fine_tuned": {"accuracy": 0.9}} | ({"swapped": {"accuracy": 0.8}} if args.collaborative else {})
        swap = {"mean_relative_error": 0.1, "decomposition_seconds": 2.0} if args.collaborative else None
        return {"stages": stages, "swap": swap, "parameters": 1000 - 100 * args.collaborative}

    results = demo.main(run)
    assert len(runs) == len(results) == 1 + len(demo.SETTINGS)
    assert runs[0].model_name_or_path == str(tmp_path)
    assert not runs[0].collaborative
    for args, (mixing, width, allocation) in zip(runs[1:], demo.SETTINGS, strict=True):
        assert args.model_name_or_path == runs[0].output_dir
        assert (args.mixing, args.dim_shared_query_key, args.allocation) == (mixing, width, allocation)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:3] == ["original", "-", "0.900"] for line in lines)
    assert sum(line.split()[-7:-3] == ["0.800", "0.900", "900", "-10.0%"] for line in lines) == len(demo.SETTINGS)


@pytest.mark.slow
def test_the_demo_learns():
    results = run_glue.main(["--demo"])
    assert all(found["stages"]["fine_tuned"]["accuracy"] > 0.8 for found in results.values())
