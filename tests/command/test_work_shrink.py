"""collab-heads shrink: its steps, what it writes, how it goes on after a kill, what it refuses before the work."""

import io
import json
import os
from argparse import Namespace
from contextlib import redirect_stderr, redirect_stdout

import commands
import gguf_models
import pytest
import torch
import translation_script
from safetensors.torch import load_file
from tokenizers_made import FEW, fast
from transformers import AutoTokenizer, BertConfig, BertModel

import tiny
from collab_heads import load_exported
from collab_heads.base import estimates
from collab_heads.base.estimates import Estimate
from collab_heads.base.progress import showing_bars
from collab_heads.command import shrink
from collab_heads.command.inputs import Loaded
from collab_heads.command.shrink_estimate import steps_after
from collab_heads.command.work import examples
from collab_heads.errors import ArgumentError, DataError, OutputError, UnsupportedModelError
from collab_heads.files.folders import damage

EMBEDDING_NOISE = 1e-5  # of embeddings of length 1, in float32 in another engine; seen: 3e-7
QUICK = ("--budget", 0.5, "--distill_steps", 2, "--trim")


@pytest.fixture(scope="module")
def bert(bert, tmp_path_factory):
    """A tiny BERT whose tokenizer can spell."""
    folder, tokenizer, config = tmp_path_factory.mktemp("whole"), fast("WordPiece"), BertConfig.from_pretrained(bert)
    config.vocab_size = len(tokenizer)
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Sentences of some of the words that its tokenizer has seen."""
    return translation_script.write_lines(tmp_path_factory.mktemp("texts") / "a.txt", FEW)


@pytest.fixture(scope="module")
def scoring(tmp_path_factory):
    """The flags that score pairs."""
    data = tmp_path_factory.mktemp("pairs") / "dev.jsonl"
    rows = [row | {"score": place % 5} for place, row in enumerate(tiny.rows(24, 2))]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "--evaluate", data, "--task", "similarity"


def run(model, *argv):
    return commands.run("shrink", model, *argv)


@pytest.fixture(scope="module")
def whole(bert, texts, scoring, tmp_path_factory):
    """The folder of a run that nothing interrupted, its report, what it printed, and its lines on time and memory."""
    out, said, lines = tmp_path_factory.mktemp("runs") / "whole", io.StringIO(), io.StringIO()
    with redirect_stdout(said), redirect_stderr(lines), showing_bars(True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimates, "LEAST", 0.0)
        patch.setattr(shrink, "steps_after", lambda *given: [*steps_after(*given), lambda *_: Estimate(18_000, 0, 1)])
        report = run(bert, "--data", texts, *QUICK, *scoring, "--output_dir", out)
    return out, report, said.getvalue(), [line for line in lines.getvalue().splitlines() if ": about" in line]


def test_the_result_is_a_checkpoint_with_its_scores_and_its_recipe(bert, whole):
    out, report, said, _ = whole
    assert [step.name for step in report.steps] == ["trimmed", "compressed", "distilled"]
    assert [each.name for each in report.scores.models] == ["original", "trimmed", "compressed", "distilled"]
    assert all(step.seconds > 0 for step in report.steps) and str(report) in said and f"result: {out}" in said
    model = BertModel.from_pretrained(out)
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(out)) < len(AutoTokenizer.from_pretrained(bert))
    size = sum(each.nbytes for each in load_file(out / "model.safetensors").values())
    assert report.steps[-1].megabytes == pytest.approx(size / 1e6, abs=0.02)  # the header of the file
    card = (out / "README.md").read_text()
    assert str(report) in card and all(step.said in card for step in report.steps)
    recipe, record = (json.loads((out / name).read_text()) for name in ("recipe.json", "shrink.json"))
    assert recipe["trim"] is True and recipe["budget"] == 0.5 and not {"output_dir", "samples"} & set(recipe)
    assert record["recipe"] == recipe and record["versions"]["torch"] and len(record["files"]) == 2
    assert record["scores"]["models"][3]["scores"]["Spearman"] == report.scores.models[3].scores["Spearman"]
    assert {"trim.json", "compression.json", "distillation.json"} <= {each.name for each in out.iterdir()}
    assert damage(out) is None and [each.name for each in out.parent.iterdir()] == ["whole"]


def test_a_line_says_how_long_all_steps_take_and_one_how_long_the_distillation(whole):
    compression, distillation = whole[3]
    assert compression.startswith("shrink: about 5.0 hours on ") and "GB of memory" in compression
    assert distillation.startswith("distill: about ")


def test_the_estimate_of_all_counts_every_export_and_every_score(bert, scoring):
    args = Namespace(
        to=["onnx", "gguf"], distill_steps=2, trim=True, budget=0.5, evaluate=scoring[1], task="similarity"
    )
    args.batch_size, args.max_length, args.source_prefix = 8, 16, ""
    task, loaded = examples(args), Loaded(BertModel.from_pretrained(bert), AutoTokenizer.from_pretrained(bert), None)
    later = steps_after(args, task, ["onnx"], "onnx")
    names = ["exports_after", "distillation_after", "evaluation_after"]
    assert [each.func.__name__ for each in later] == names
    exports, _, scores = later
    sites = loaded.model.config.num_hidden_layers
    assert exports(loaded, ()).seconds == pytest.approx(sites * (2 * 1.3 + 0.1))  # with the original in int8
    # trimmed, the original in int8, compressed, distilled, and what was exported
    assert scores.args[1] == pytest.approx([1.0, 0.65, 0.6, 0.6, 0.39])
    assert scores(loaded, ()).seconds > 0
    args.distill_steps, args.trim = 0, False
    assert [each.func.__name__ for each in steps_after(args, None, [], None)] == names[:1]


def dies(*args, **options):
    raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("place", ("distill_on", "evaluate"))
def test_a_recipe_repeats_a_model_also_in_a_run_that_was_killed(whole, tmp_path, monkeypatch, capsys, place):
    def repeated(args):
        pytest.fail("a step that is done is done again")

    places = []

    def noted(*args, **options):
        places.append(options.get("output_dir"))
        dies()

    flags = whole[0] / "recipe.json", "--output_dir", tmp_path / "a"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shrink, place, noted)
        run(*flags)
    kept = tmp_path / "a.unfinished"
    assert (kept / "compressed/config.json").exists() and not (tmp_path / "a").exists()
    assert places == [kept if place == "distill_on" else None]  # where a distillation keeps its checkpoints
    for name in ("run_trim", "run_compress"):
        monkeypatch.setattr(shrink, name, repeated)
    report = run(*flags)
    assert "going on after trimmed, compressed" in capsys.readouterr().out and not kept.exists()
    assert [step.name for step in report.steps] == ["trimmed", "compressed", "distilled"]
    assert (whole[0] / "model.safetensors").read_bytes() == (tmp_path / "a/model.safetensors").read_bytes()
    assert [each.scores for each in report.scores.models] == [each.scores for each in whole[1].scores.models]


def copied(args, source, measurements, later, place):
    """Stand in for the step that compresses."""
    BertModel.from_pretrained(source).save_pretrained(place)
    AutoTokenizer.from_pretrained(source).save_pretrained(place)


def stored(args, source, target, int8, place):
    """Stand in for the step that exports."""
    copied(args, source, None, (), place)


def test_a_step_that_was_killed_while_it_was_noted_is_done_again(bert, texts, tmp_path, monkeypatch):
    flags = bert, "--data", texts, "--trim", "--output_dir", tmp_path / "a"
    note = shrink.KeptSteps.note

    def noted(kept):
        note(kept) if not kept.steps else dies()

    monkeypatch.setattr(shrink, "compressed", copied)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shrink.KeptSteps, "note", noted)
        run(*flags)
    assert (tmp_path / "a.unfinished/trimmed/config.json").exists()
    assert [step.name for step in run(*flags).steps] == ["trimmed", "compressed"]


def test_a_step_that_was_damaged_is_done_again(bert, texts, tmp_path, monkeypatch):
    flags = bert, "--data", texts, "--trim", "--output_dir", tmp_path / "a"
    monkeypatch.setattr(shrink, "compressed", dies)
    with pytest.raises(KeyboardInterrupt):
        run(*flags)
    weights = tmp_path / "a.unfinished/trimmed/model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4] + bytes(4))
    with pytest.raises(KeyboardInterrupt):
        run(*flags)
    assert weights.read_bytes() == whole


@pytest.mark.parametrize("wrong", ({"name": "../a"}, {"seconds": "1"}, {"megabytes": -1}, {"said": None}, {"other": 1}))
def test_a_record_of_steps_that_are_none_is_refused(bert, texts, tmp_path, monkeypatch, wrong):
    flags = bert, "--data", texts, "--trim", "--output_dir", tmp_path / "a"
    monkeypatch.setattr(shrink, "compressed", dies)
    with pytest.raises(KeyboardInterrupt):
        run(*flags)
    file = tmp_path / "a.unfinished/shrink.json"
    record = json.loads(file.read_text())
    record["steps"][0] |= wrong
    file.write_text(json.dumps(record))
    with pytest.raises(OutputError, match=r"is in the way, and no unfinished run .*: move it"):
        run(*flags)


def test_the_remains_of_another_run_are_refused_and_stay(bert, texts, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text(open(texts).read())
    flags = bert, "--data", text, "--output_dir", tmp_path / "a"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shrink, "run_compress", dies)
        run(*flags, "--budget", 0.5)
    kept = tmp_path / "a.unfinished"
    with pytest.raises(OutputError, match=r"budget was 0.5 and is 0.4: .* or delete .*a\.unfinished to begin again"):
        run(*flags, "--budget", 0.4)
    text.write_text(text.read_text() + "w1 w2\n")
    with pytest.raises(OutputError, match=r"files was .*text.txt"):
        run(*flags, "--budget", 0.5)
    assert (kept / "shrink.json").exists()
    (kept / "shrink.json").write_text("{}")
    with pytest.raises(OutputError, match=r"is in the way, and no unfinished run .*: move it"):
        run(*flags, "--budget", 0.5)
    assert (kept / "shrink.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("flags", "said"),
    (
        (("--int8",), "--int8 is for engines"),
        (("--int8", "--to", "transformers"), "--int8 is for engines"),
        (("--to", "onnx", "tensorrt"), "--to 'tensorrt'"),
        (("--to", "ctranslate2", "gguf"), "no one --shape suits all of them"),
        (("--max_loss", 1), "--max_loss needs --evaluate and --task"),
        (("--task", "similarity"), "--evaluate missing"),
        (("--max_loss", 1, "--budget", 0.5), "exclude each other"),
    ),
)
def test_flags_that_do_not_fit_are_refused_before_the_work(bert, texts, tmp_path, flags, said):
    with pytest.raises(ArgumentError, match=said):
        run(bert, "--data", texts, "--output_dir", tmp_path / "a", *flags)
    assert not list(tmp_path.iterdir())


def test_a_target_gets_the_shape_that_it_needs(bert, texts, tmp_path, monkeypatch):
    def exported(args, source, target, int8, place):
        copied(args, source, None, (), place)

    def run_compress(args, *more):
        assert args.shape == "ctranslate2" and args.evaluate is None
        copied(args, args.model, None, (), args.output_dir)

    monkeypatch.setattr(shrink, "run_compress", run_compress)
    monkeypatch.setattr(shrink, "exported", exported)
    monkeypatch.setitem(shrink.TARGETS, "ctranslate2", shrink.TARGETS["transformers"])  # needs no package
    run(bert, "--data", texts, "--to", "ctranslate2", "--output_dir", tmp_path / "a")
    assert (tmp_path / "a/ctranslate2/model.safetensors").exists() and (tmp_path / "a/config.json").exists()


@pytest.mark.slow
def test_targets_without_a_score_are_named_before_the_work_and_in_the_table(
    bert, texts, scoring, tmp_path, monkeypatch, capsys
):
    said = "without a score: transformers.js (collab-heads evaluate does not run them on similarity)"
    flags = bert, "--data", texts, "--to", "transformers.js", "--output_dir", tmp_path / "a"
    monkeypatch.setitem(shrink.TARGETS, "transformers.js", shrink.TARGETS["transformers"])  # needs no package
    monkeypatch.setattr(shrink, "exported", stored)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shrink, "compressed", dies)
        run(*flags, *scoring)
    assert said in capsys.readouterr().out.splitlines()
    monkeypatch.setattr(shrink, "compressed", copied)
    report = run(*flags, *scoring)
    assert [each.name for each in report.scores.models] == ["original", "compressed"]
    assert report.not_scored == ("transformers.js",) and str(report).splitlines()[-1] == said
    capsys.readouterr()
    run(*flags[:-1], tmp_path / "b")
    assert "without a score" not in capsys.readouterr().out


@gguf_models.runs
@pytest.mark.slow
def test_a_file_for_llama_cpp_is_scored(texts, tmp_path):
    gguf_models.bert().save_pretrained(tmp_path / "bert")
    gguf_models.word_pieces().save_pretrained(tmp_path / "bert")
    (tmp_path / "dev.tsv").write_text("sentence1\tsentence2\tscore\n" + "ab b\tabba a\t1\na b.\te\t3\nb\tabb\t2\n" * 4)
    flags = "--data", texts, "--budget", 0.8, "--to", "gguf", "--shape", "uniform", "--output_dir", tmp_path / "a"
    report = run(tmp_path / "bert", *flags, "--evaluate", tmp_path / "dev.tsv", "--task", "similarity")
    assert [each.name for each in report.scores.models] == ["original", "original in int8", "compressed", "gguf"]
    compressed, served = (each.scores["Spearman"] for each in report.scores.models[2:])
    assert served == pytest.approx(compressed, abs=1) and report.not_scored == ()
    assert (tmp_path / "a/gguf/model.gguf").exists()


@pytest.mark.slow
def test_a_stock_checkpoint_is_scored_and_a_converted_translator(bert, texts, scoring, tmp_path, monkeypatch):
    monkeypatch.setattr(shrink, "exported", stored)
    monkeypatch.setattr(shrink, "compressed", copied)
    report = run(bert, "--data", texts, "--to", "transformers", *scoring, "--output_dir", tmp_path / "a")
    assert [each.name for each in report.scores.models] == ["original", "compressed", "transformers"]
    assert report.not_scored == () and "without a score" not in str(report)
    assert set(shrink.RUNS["ctranslate2"]) == {"translation", "similarity", "retrieval"}


def test_examples_that_cannot_be_scored_are_refused_before_the_work(bert, texts, tmp_path):
    (tmp_path / "dev.csv").write_text("sentence1,sentence2\na,b\n")
    with pytest.raises(DataError, match="score"):
        run(
            bert,
            "--data",
            texts,
            "--evaluate",
            tmp_path / "dev.csv",
            "--task",
            "similarity",
            "--output_dir",
            tmp_path / "a",
        )
    data = tmp_path / "text.txt"
    data.write_text("w1 w2\n" * 4)
    with pytest.raises(UnsupportedModelError):
        run(bert, "--data", texts, "--evaluate", data, "--task", "perplexity", "--output_dir", tmp_path / "a")
    assert {each.name for each in tmp_path.iterdir()} == {"dev.csv", "text.txt"}


def test_a_pipe_is_refused(bert, tmp_path):
    read, write = os.pipe()
    os.close(write)
    with pytest.raises(ArgumentError, match=f"/dev/fd/{read} is a pipe"):
        run(bert, "--data", f"/dev/fd/{read}", "--output_dir", tmp_path / "a")
    os.close(read)


class Hub:
    """Stand in for HfApi of huggingface_hub."""

    def __init__(self):
        self.calls = []

    def whoami(self):
        self.calls.append("whoami")

    def create_repo(self, name, *, private, exist_ok):
        assert private and exist_ok
        self.calls.append(name)
        return type("Url", (), {"repo_id": f"me/{name}"})

    def upload_folder(self, *, repo_id, folder_path):
        self.calls.append((repo_id, folder_path))


def test_a_result_is_uploaded_if_somebody_is_logged_in(bert, texts, tmp_path, monkeypatch, capsys):
    hub = Hub()
    monkeypatch.setattr(shrink, "HfApi", lambda: hub)
    monkeypatch.setattr(shrink, "compressed", copied)
    flags = "--data", texts, "--push", "small", "--output_dir"
    run(bert, *flags, tmp_path / "a")
    assert hub.calls == ["whoami", "small", ("me/small", str(tmp_path / "a"))]
    assert "uploaded: me/small" in capsys.readouterr().out

    def fails(*args, **options):
        raise ConnectionError("no network")

    hub.upload_folder = fails
    with pytest.raises(OutputError, match=r"no network. The result is complete: hf upload small .*b"):
        run(bert, *flags, tmp_path / "b")
    assert BertModel.from_pretrained(tmp_path / "b")
    hub.whoami = fails
    with pytest.raises(OutputError, match=r"does not know who you are .*hf auth login"):
        run(bert, *flags, tmp_path / "c")
    assert not (tmp_path / "c.unfinished").exists()


@pytest.mark.slow
def test_engines_are_scored_beside_the_original_in_eight_bits(bert, texts, scoring, tmp_path):
    pytest.importorskip("onnxruntime")
    to = "--to", "onnx", "transformers", "--int8"
    report = run(bert, "--data", texts, "--budget", 0.8, *to, *scoring, "--output_dir", tmp_path / "a")
    names = ["original", "original in int8", "compressed", "onnx, int8", "transformers"]
    assert [each.name for each in report.scores.models] == names
    assert load_exported(tmp_path / "a/onnx") is not None
    assert {each.name for each in (tmp_path / "a").iterdir() if each.is_dir()} == {"onnx", "transformers"}


@pytest.mark.slow
def test_the_folder_of_a_sentence_encoder_has_what_other_readers_parse(bert, texts, tmp_path):
    pytest.importorskip("onnxruntime")
    library = pytest.importorskip("sentence_transformers")
    library.SentenceTransformer(str(bert), device="cpu").save_pretrained(str(tmp_path / "encoder"))
    run(tmp_path / "encoder", "--data", texts, "--budget", 0.8, "--to", "onnx", "--output_dir", tmp_path / "a")
    for name in ("1_Pooling/config.json", "sentence_bert_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "a/onnx" / name).read_bytes()
    lines = FEW[:9]
    expected = library.SentenceTransformer(str(tmp_path / "a"), device="cpu").encode(lines)
    found = load_exported(tmp_path / "a/onnx", threads=1).encode(lines)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0, atol=EMBEDDING_NOISE)
