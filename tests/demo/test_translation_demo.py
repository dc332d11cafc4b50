"""The demo of run_translation.py: every row is a run of the script; the table says what the runs found."""

import tempfile
from pathlib import Path

import pytest

import run_translation
from collab_heads.demo import corpus
from collab_heads.demo import translation_demo as demo


def test_the_demo_goes_through_the_script(capsys, tmp_path, monkeypatch):
    (tmp_path / "a b").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "a b"))
    runs = []

    def run(flags):
        args = run_translation.parse(flags)
        for split, count, seed in (("train", demo.TRAIN, demo.SEED), ("validation", demo.DEV, demo.SEED + 1)):
            source, target = (Path(path).read_text().splitlines() for path in getattr(args, f"{split}_file"))
            assert (target, source) == corpus(count, seed)
        runs.append(args)
        folder = Path(args.output_dir) / "translations"
        folder.mkdir(parents=True)
        for name in ("validation-loaded-0", "validation-pruned-0"):  # the newest counts
            (folder / f"{name}.txt").write_text("".join(f"{name} {len(runs)} {i}\n" for i in range(demo.DEV)))
        stages = {"fine_tuned": {"bleu": 40.0}} | ({"swapped": {"bleu": 12.345}} if args.collaborative else {})
        heads = {"pruned": {"sites": [{"heads_after": 3}] * 4}} if args.target_heads else None
        return {"stages": stages, "eval_bleu": 56.78, "heads": heads, "parameters": 1000 - 100 * args.collaborative}

    results = demo.main(run)
    assert list(results) == ["original", *demo.SETTINGS]
    assert len(runs) == 1 + len(demo.SETTINGS)
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
            ["validation-pruned-0", str(number), str(i)] for i in range(demo.SAMPLES)
        ]
    english, invented = corpus(demo.DEV, demo.SEED + 1)
    for name, side in (("source", invented), ("reference", english)):
        assert [line[width:].strip() for line in lines if line[:width].strip() == name] == side[: demo.SAMPLES]
    assert not Path(runs[0].output_dir).exists()  # a temporary folder
    assert lines[-1].endswith("seconds in all.")


def test_heads_of_the_original_are_those_of_its_flags():
    args = run_translation.parse([*"--train_file a b --validation_file a b".split(), *demo.MODEL.split()])
    assert args.num_layers * args.num_heads * 3 == 36  # what the table says of models that keep all


def test_the_corpus_is_the_same_on_every_machine():
    english, invented = corpus(3, 0)
    assert (english, invented) == (corpus(5, 0)[0][:3], corpus(5, 0)[1][:3])
    assert english != corpus(3, 1)[0]
    assert english[0] == "the dog follows the quiet horse ."
    assert invented[0] == "li haru li dolon shio sheka ."
    many, there = corpus(2000, 0)
    assert len(set(many)) > 1900
    assert {line.split()[-1] for side in (many, there) for line in side} == {"."}
    assert any(" an old " in line for line in many)
    assert not any(" a old " in f" {line}" for line in many)
    pairs = [(line, other) for line, other in zip(many, there, strict=True) if " near " in line or " with " in line]
    assert len(pairs) > 500
    assert all("ul" in other.split() for _, other in pairs)


@pytest.mark.slow
def test_the_demo_learns():
    results = run_translation.main(["--demo"])
    original = results["original"]["eval_bleu"]
    assert original > 50
    assert all(found["eval_bleu"] > original - 15 for found in results.values())
