"""collab-heads evaluate: what it prints is what the library reports; wrong flags are refused before torch is there."""

import json

import commands
import pytest
from transformers import AutoModel

import tiny
from collab_heads import evaluate, prune_heads
from collab_heads.command import main
from collab_heads.errors import ArgumentError, DataError, LoadError
from collab_heads.evaluation import candidates


@pytest.fixture
def table(tmp_path):
    rows = [row | {"score": number % 5} for number, row in enumerate(tiny.rows(16, 4))]
    return tiny.write_csv(tmp_path / "dev.csv", rows)


@pytest.mark.slow
def test_the_report_is_that_of_the_library(bert, table, capsys):
    report = commands.run("evaluate", bert, bert, "--task", "similarity", "--data", table)
    assert str(report) in capsys.readouterr().out
    expected = evaluate(bert, {str(bert): bert}, task="similarity", data=table).models
    assert [(each.name, each.scores, each.flips) for each in report.models] == [
        (each.name, each.scores, each.flips) for each in expected
    ]


def test_flags_reach_the_library_and_json_is_the_report(bert, table, tmp_path, capsys, monkeypatch):
    model = AutoModel.from_pretrained(bert)
    prune_heads(model, heads={"enc-self": [[0], [1]]})
    model.save_pretrained(tmp_path / "pruned")
    columns = ("--column", "sentence2", "sentence1", "label")
    flags = ("--device", "cpu:0", "--seed", "3", "--batch_size", "4", "--max_length", "5")
    argv = [
        "evaluate",
        bert,
        tmp_path / "pruned",
        "--task",
        "similarity",
        "--data",
        table,
        *columns,
        *flags,
        "--json",
        "--quiet",
    ]
    places = []
    with monkeypatch.context() as patch:
        patch.setattr(candidates, "placed", lambda model, device: places.append(device) or model)
        assert main.main([*map(str, argv), "--json", "--quiet"]) == 0
    assert set(places) == {"cpu:0"}
    found = json.loads(capsys.readouterr().out)
    settings = {"columns": columns[1:], "seed": 3, "batch_size": 4, "max_length": 5}
    expected = evaluate(bert, tmp_path / "pruned", task="similarity", data=table, **settings).to_dict()
    assert (found["timed"], found["examples"]) == (4, 16)
    for name in ("scores", "changes", "flips"):
        assert [each[name] for each in found["models"]] == [each[name] for each in expected["models"]]


def test_what_is_refused(bert, table, tmp_path):
    for argv, error, said in (
        ((bert, bert, "--task", "similarty"), ArgumentError, r"unknown --task 'similarty' \(did you mean 'similarity'"),
        ((bert, tmp_path, "--task", "similarity"), LoadError, "holds no model: it has no config.json"),
        ((tmp_path / "no" / "thing", bert, "--task", "similarity"), LoadError, "there is no folder"),
    ):
        with pytest.raises(error, match=said):
            commands.parse("evaluate", *argv, "--data", table)
    with pytest.raises(DataError, match=r"none\.tsv: No such file"):
        commands.parse("evaluate", bert, bert, "--task", "similarity", "--data", tmp_path / "none.tsv")
