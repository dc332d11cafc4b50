"""collab-heads analyze: what it takes, what it measures on, what it refuses before the model runs."""

import json
import subprocess
import sys

import commands
import pytest
from translation_script import write_lines

import tiny
from collab_heads.analysis import without_heads
from collab_heads.analysis.report import head_report
from collab_heads.analysis.report.savings import cheapest, metric_without
from collab_heads.command import work
from collab_heads.command.inputs import load
from collab_heads.errors import ArgumentError, DataError, OutputError, UnsupportedModelError
from collab_heads.evaluation.evaluate import made, score_of
from collab_heads.evaluation.task import Limits


def run(argv):
    return commands.run("analyze", *argv)


PARTS = ("--parts", "statistics", "--examples", "0")


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """Drawing has tests of its own."""
    saved = []
    monkeypatch.setattr(work.HeadReport, "save", lambda report, folder: saved.append(folder) or folder)
    return saved


def test_an_encoder_reads_text(bert, tmp_path, capsys, no_pictures):
    lines = ["the dog runs", "", "a cat", "the old man sees it", " "]
    report = run([str(bert), "--data", write_lines(tmp_path / "text.txt", lines), *PARTS, "--output_dir", "there"])
    printed = capsys.readouterr().out
    assert "left out 2 of 5 lines, which are empty" in printed and str(report) in printed
    assert report.data["sentences"] == 3 and report.data["name"].endswith("text.txt") and report.roles is None
    assert [str(folder) for folder in no_pictures] == ["there"]
    tokens = report.statistics.tokens[report.sites[0].path]
    tokenizer = load(commands.parse("analyze", bert, "--data", tmp_path / "text.txt")).tokenizer
    ids = [tokenizer(line)["input_ids"] for line in lines if line.strip()]
    assert tokens == sum(len(row) - 1 for row in ids)  # [SEP] does not count, [CLS] does


def test_sentences_of_the_users_choice(bert, tmp_path):
    """They are shown first, whole, and no measure counts them."""
    data = write_lines(tmp_path / "text.txt", ["the dog runs", "a cat"])
    chosen = write_lines(tmp_path / "chosen.txt", ["one two three four five six", ""])
    plain, report = (run([str(bert), "--data", data, *PARTS, *more]) for more in ((), ("--sentences", chosen)))
    (example,) = report.examples
    assert example.chosen and len(example.tokens["encoder"]) == 8 and report.statistics == plain.statistics
    with pytest.raises(DataError, match="nothing"):
        run([str(bert), "--data", data, "--sentences", "nothing"])
    table = write_lines(tmp_path / "table.tsv", ["said", "the dog runs", "a cat"])
    of_table = run([str(bert), "--data", table, "--column", "said", *PARTS, "--sentences", chosen])
    assert of_table.statistics == plain.statistics and of_table.examples[0].tokens == example.tokens


def test_the_summary_comes_first_and_a_row_per_head_when_asked_for(bert, tmp_path, capsys):
    text = write_lines(tmp_path / "text.txt", ["the dog runs", "a cat"])
    argv = [str(bert), "--data", text, "--parts", "statistics", "reconstruction", "--examples", "0"]
    report = run(argv)
    row = "  ".join(report.text_rows()[1][-1][:3]).split()
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == report.described()[:2] and any(line.startswith("What can go: 1 of 8 heads") for line in lines)
    assert not any(line.split()[:3] == row for line in lines)
    run([*argv, "--all_heads"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == report.described()[:2]
    assert sum(line.split()[:1] == row[:1] for line in lines) == 1 + 8 and any(
        line.split()[:3] == row for line in lines
    )


def test_sentences_that_are_too_long_are_cut_and_counted(bert, tmp_path, capsys):
    text = write_lines(tmp_path / "text.txt", ["a dog", "the old man sees it", "a cat"])
    report = run([str(bert), "--data", text, *PARTS, "--max_length", "4"])
    assert report.data["sentences"] == 3
    assert run([str(bert), "--data", text, *PARTS, "--samples", "1"]).data["sentences"] == 1
    printed = capsys.readouterr().out
    assert "cut 1 of 3 sentences to 4 tokens (--max_length)" in printed and "query tokens: 9 of enc-self" in printed
    long = write_lines(tmp_path / "long", ["a dog", "a " * 300])
    assert run([str(bert), "--data", long, *PARTS, "--max_length", "999"]).data["sentences"] == 2
    assert "(this model reads no more)" in capsys.readouterr().out
    with pytest.raises(ArgumentError, match="--max_length: 2 tokens leave no room for text"):
        run([str(bert), "--data", text, *PARTS, "--max_length", "2"])


def test_sentences_for_a_translation_model(marian, pairs, tmp_path):
    """Pairs, or its own translations."""
    one, other = (write_lines(tmp_path / name, [text]) for name, text in (("one", "a a"), ("other", "a a a")))
    (both,), (alone,) = (
        run([marian, "--data", *pairs, *PARTS, "--sentences", *files]).examples for files in ((one, other), (one,))
    )
    tokenizer = load(commands.parse("analyze", marian, "--data", one)).tokenizer
    target = tokenizer.convert_ids_to_tokens(tokenizer(text_target="a a a")["input_ids"])
    assert both.tokens["decoder"][1:] == tuple(target[:-1]) and both.tokens["encoder"] == alone.tokens["encoder"]
    assert both.chosen and alone.chosen


@pytest.mark.slow
def test_what_removing_heads_costs_on_the_users_task(bert, tmp_path, capsys):
    """Once without each head, and without all that can go; the score is that of `collab-heads evaluate`."""
    data = write_lines(tmp_path / "text.txt", ["the dog runs", "a cat"])
    table = tmp_path / "dev.jsonl"
    table.write_text(
        "".join(json.dumps(row | {"score": place % 5}) + "\n" for place, row in enumerate(tiny.rows(24, 2)))
    )
    scoring, parts = ("--evaluate", table, "--task", "similarity"), ("--parts", "reconstruction", "ablation")
    report = run([str(bert), "--data", data, *parts, *scoring, "--max_length", "6", "--batch_size", "4"])
    model, tokenizer, _ = load(commands.parse("analyze", bert, "--data", data))
    task = made("similarity", str(table), None, Limits(4, 6, ""))
    assert report.ablation.metric == "similarity" and report.ablation.higher_is_better
    assert report.ablation.original == pytest.approx(score_of(task, tokenizer, model))
    with without_heads(model, cheapest(report).by_path()):
        assert report.without_cheapest == pytest.approx(score_of(task, tokenizer, model)) != report.ablation.original
    assert metric_without(report) in capsys.readouterr().out
    for flags, said in (
        (scoring[:2], "--task missing: --evaluate and --task belong"),
        ((*scoring, "--parts", "roles"), "--evaluate is of the ablation"),
        ((*scoring[:3], "similar"), "did you mean 'similarity'"),
    ):
        with pytest.raises(ArgumentError, match=said):
            run([str(bert), "--data", data, *flags])


@pytest.mark.slow
def test_contributions_after_prefixes_and_beside_a_checkpoint(marian, pairs, capsys):
    flags = ["--parts", "contributions", "--samples", "4", "--prefixes", "reference", "random"]
    report = run([marian, "--data", *pairs, *flags, "--compare_with", marian])
    compared = report.compared_contributions
    assert [run.prefixes for _, run in compared.runs] == ["reference", "random"] * 2
    assert str(compared) in capsys.readouterr().out


def test_what_is_refused(bert, marian, pairs, tmp_path):
    short = write_lines(tmp_path / "short", ["one line"])
    empty = write_lines(tmp_path / "empty", [])
    blank = write_lines(tmp_path / "blank", [" ", "  "])
    gpt = tmp_path / "gpt"
    gpt.mkdir()
    (gpt / "config.json").write_text(json.dumps({"model_type": "gpt_neo", "hidden_size": 8, "num_heads": 2}))
    for argv, error, said in (
        ([marian, "--data", pairs[0], short], DataError, "7 lines and .* 1"),
        ([marian, "--data", *pairs, short], ArgumentError, "--data has 3 files"),
        ([bert, "--data", *pairs], ArgumentError, "BertModel does not translate: give one, or both in"),
        ([bert, "--data", empty], DataError, "empty is empty"),
        ([bert, "--data", blank], DataError, "blank is empty"),
        ([bert, "--data", tmp_path / "missing"], DataError, "missing"),
        ([bert, "--data", short, "--treebank", tmp_path / "no.conllu"], DataError, "no.conllu"),
        ([bert, "--data", short, "--output_dir", short], OutputError, "is a file"),
        ([bert, "--data", short, "--output_dir", gpt], OutputError, "gpt is in use: choose another"),
        ([tmp_path / "nothing", "--data", short], ArgumentError, "there is no folder .*nothing"),
        ([short, "--data", short], ArgumentError, "there is no folder .*short"),
        (["nothing", "--data", short], ArgumentError, "cannot load AutoConfig from 'nothing'"),
        ([bert, "--data", short, "--parts", "lrp"], ArgumentError, "unknown part 'lrp'"),
        ([marian, "--data", *pairs, "--parts", "roles", "--prefixes", "own"], ArgumentError, "--prefixes is of"),
        ([marian, "--data", *pairs, "--parts", "roles", "--compare_with", marian], ArgumentError, "--compare_with is"),
        ([bert, "--data", short, "--parts", "worth", "--treebank", short], ArgumentError, "--treebank is of roles"),
        ([marian, "--data", *pairs, "--prefixes", "owm"], ArgumentError, "unknown --prefixes 'owm'"),
        ([marian, "--data", *pairs, "--compare_with", tmp_path / "nothing"], ArgumentError, "no folder .*nothing"),
        ([bert, "--data", short, "--device", "nonsense"], ArgumentError, "device 'nonsense': "),
    ):
        with pytest.raises(error, match=said):
            run([str(word) for word in argv])
    with pytest.raises((UnsupportedModelError, ArgumentError), match=r"gpt_neo|cannot load"):
        run([str(gpt), "--data", short])


def test_without_matplotlib_there_are_the_page_and_numbers(bert, tmp_path, monkeypatch, capsys):
    monkeypatch.undo()  # it is written
    text = write_lines(tmp_path / "text.txt", ["the dog runs", "a cat"])
    for module in (work, head_report):
        monkeypatch.setattr(module, "missing", lambda extra: ["matplotlib"])
    report = run([bert, "--data", text, *PARTS, "--output_dir", tmp_path / "out"])
    said = capsys.readouterr()
    assert said.err.startswith("matplotlib is not installed: no curves and distributions (pip install matplotlib)")
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == json.loads(report.to_json())
    assert "what was measured" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8").lower()


WITHOUT_TRAIN = """
import runpy, sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        missing = "accelerate datasets evaluate sacrebleu sklearn scipy sentencepiece tensorboard tensorly".split()
        return None if name.split(".")[0] in missing else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
sys.argv[:1] = ["collab_heads", "analyze"]
runpy.run_module("collab_heads", run_name="__main__")
"""


@pytest.mark.slow
def test_as_a_command_with_the_packages_of_its_own_extra_only(bert, marian, pairs, tmp_path):
    """Those of `train` are not there; SentencePiece is, which Marian's tokenizer needs."""
    text = write_lines(tmp_path / "text.txt", ["the dog runs", "a cat"])
    code = WITHOUT_TRAIN.replace("sentencepiece ", "")
    bare = WITHOUT_TRAIN.replace("accelerate ", "accelerate matplotlib PIL ")
    for without, argv in (
        (WITHOUT_TRAIN, ["--help"]),
        (bare, [bert, "--data", text, "--output_dir", tmp_path / "bare"]),
        (WITHOUT_TRAIN, [bert, "--data", text, "--output_dir", tmp_path / "bert"]),
        (code, [marian, "--data", *pairs, "--output_dir", tmp_path / "marian"]),
    ):
        command = [sys.executable, "-c", without, *map(str, argv)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
    assert {path.name for path in (tmp_path / "bare").iterdir()} == {"report.json", "report.html"}
    assert (tmp_path / "bert" / "report.html").is_file() and (tmp_path / "marian" / "report.html").is_file()


@pytest.mark.slow
def test_as_a_command(bert, tmp_path):
    text = write_lines(tmp_path / "text.txt", ["the dog runs", "a cat"])
    out = tmp_path / "out"
    command = [sys.executable, "-m", "collab_heads", "analyze", str(bert), "--data", text]
    subprocess.run([*command, "--output_dir", str(out)], check=True, cwd=tmp_path)
    assert (out / "report.html").stat().st_size > 10_000
    wrong = subprocess.run(
        [*command, "--output_dir", "new", "--parts", "lrp"], capture_output=True, text=True, check=False
    )
    assert wrong.returncode == 2 and "Traceback" not in wrong.stderr
    assert wrong.stderr.endswith("contributions, ablation\n")
