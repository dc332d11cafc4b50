"""collab-heads compress: what it writes, when it writes nothing, what it refuses before the model runs."""

import json
import shutil
import subprocess
import sys

import commands
import pytest
import torch
import translation_script
from model_configs import rotary_config
from safetensors.torch import load_file
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    MarianMTModel,
)

import tiny
from collab_heads import CompressionPlan, distill, generate_batches, scorer
from collab_heads.command import compressing, inputs, main
from collab_heads.compression import measurements
from collab_heads.compression import plan as planning
from collab_heads.errors import ArgumentError, DataError, OutputError, UnsupportedModelError
from collab_heads.files.folders import damage, digest
from collab_heads.fitting.widths import HEAD_MULTIPLE
from collab_heads.model.site_size import num_bytes

QUICK = ("--refine_steps", "2")


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Forty pairs of sentences of words that the tiny BERT knows."""
    return str(tiny.write_csv(tmp_path_factory.mktemp("table") / "a.csv", tiny.rows(40, 0)))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """The same number of single ones, in a text file."""
    lines = [row["sentence1"] for row in tiny.rows(40, 1)]
    return translation_script.write_lines(tmp_path_factory.mktemp("texts") / "a.txt", lines)


def run(model, *argv):
    return commands.run("compress", model, *argv)


def files(folder):
    return {path.relative_to(folder).as_posix(): digest(path) for path in folder.rglob("*") if path.is_file()}


def test_a_size_is_spent_on_bits_too(bert, texts, tmp_path):
    whole = num_bytes(BertModel.from_pretrained(bert))
    asked = "--bits", 8, 4, "--budget", f"{0.3 * whole}B"
    report = run(bert, "--data", texts, *asked, "--output_dir", tmp_path / "a", *QUICK)
    assert report.of == "bytes" and {site.bits_after for site in report.sites} & {8, 4}
    stored = load_file(tmp_path / "a/model.safetensors")
    assert sum(each.nbytes for each in stored.values()) == report.model_bytes_after <= 0.3 * whole
    assert num_bytes(BertModel.from_pretrained(tmp_path / "a")) == report.model_bytes_after
    report = run(bert, "--data", texts, "--budget", f"{0.8 * whole}B", "--output_dir", tmp_path / "b", *QUICK)
    assert report.of == "bytes" and report.model_bytes_after <= 0.8 * whole


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("bits", ((), ("--bits", 8, 4)))
def test_sizes_are_those_of_the_file_of_a_checkpoint_in_half_precision(dtype, bits, bert, texts, tmp_path, capsys):
    """Only float32 holds codes times scales, so weights of few bits are not cast back."""
    half = shutil.copytree(bert, tmp_path / "half")
    BertModel.from_pretrained(bert, dtype=dtype).save_pretrained(half)

    def taken(folder):
        return sum(each.nbytes for each in load_file(folder / "model.safetensors").values())

    whole = taken(half)
    assert whole == num_bytes(BertModel.from_pretrained(bert)) / 2
    out, asked = tmp_path / "small", f"{(0.7 if bits else 0.9) * whole}B"
    report = run(half, "--data", texts, "--budget", asked, *bits, "--output_dir", out, *QUICK)
    assert 0.6 * whole < taken(out) == report.model_bytes_after <= (0.7 if bits else 0.9) * whole
    assert report.model_bytes_before == whole and str(report) in (out / "README.md").read_text()
    assert BertModel.from_pretrained(out).dtype == (torch.float32 if bits else dtype)
    assert "left their grids" not in "".join(capsys.readouterr())
    if not bits:
        with pytest.raises(ArgumentError, match=rf"the weights of the model take only {whole / 1e6:.6f} MB"):
            run(half, "--data", texts, "--budget", f"{1.1 * whole}B", "--output_dir", tmp_path / "b")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--budget", "10MB", "--of", "operations"), "budget '10MB': the plan is of operations"),
        (("--bits", 5), "--bits 5: weights may have 3, 4, 8"),
        (("--bits", 8, "--table_bits", 2), "--table_bits 2: weights may have 3, 4, 8"),
        (("--bits", 8, "--of", "cache"), "few bits save bytes, and time"),
        (("--engine", "onnxruntime"), "engine='onnxruntime', of='parameters': only time is measured there"),
        (("--max_loss", 1, "--task", "similarity"), "--evaluate missing: --max_loss, --evaluate and --task belong"),
        (("--max_loss", 1, "--budget", 0.5), "--budget and --max_loss exclude each other"),
    ],
)
def test_bits_that_cannot_be_are_refused(bert, texts, tmp_path, flags, said, monkeypatch):
    monkeypatch.setattr(compressing, "load", lambda args: pytest.fail("the model is loaded"))
    with pytest.raises(ArgumentError, match=said):
        run(bert, "--data", texts, "--output_dir", tmp_path / "a", *flags)
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
def test_the_smallest_model_that_keeps_a_score(bert, texts, tmp_path):
    rows, data = tiny.rows(24, 2), tmp_path / "dev.jsonl"
    data.write_text("".join(json.dumps(row | {"score": place % 5}) + "\n" for place, row in enumerate(rows)))
    scoring = "--evaluate", data, "--task", "similarity", "--max_loss", 30
    report = run(bert, "--data", texts, *scoring, "--output_dir", tmp_path / "a", *QUICK)
    score = scorer("similarity", str(data), AutoTokenizer.from_pretrained(bert))
    before, after = report.scores
    assert score(BertModel.from_pretrained(bert)) == pytest.approx(before, abs=1e-3)
    assert score(BertModel.from_pretrained(tmp_path / "a")) == pytest.approx(after, abs=1e-3) and after >= before - 30
    assert report.costs["parameters"].share < 1 and json.loads((tmp_path / "a/compression.json").read_text())["scores"]


def test_a_score_reads_as_the_fit_does_and_is_tried_before_the_plan(bert, texts, tmp_path, monkeypatch):
    def unable(task, tokenizer, model):
        assert task.limits == (5, 16, "w1 ") and len(task) == 24
        raise UnsupportedModelError("it cannot")

    monkeypatch.setattr(compressing, "score_of", unable)
    monkeypatch.setattr(compressing, "planned", lambda *args, **options: pytest.fail("the work has begun"))
    flags = ("--batch_size", 5, "--max_length", 16, "--source_prefix", "w1 ")
    data = tiny.write_csv(tmp_path / "dev.csv", [row | {"score": 1} for row in tiny.rows(24, 2)])
    scoring = ("--evaluate", data, "--task", "similarity", "--max_loss", 1)
    with pytest.raises(UnsupportedModelError, match="it cannot"):
        run(bert, "--data", texts, "--output_dir", tmp_path / "a", *flags, *scoring)


def test_the_smaller_model_is_written_with_its_record(bert, texts, tmp_path, capsys):
    before, out = files(bert), tmp_path / "deep" / "small"
    report = run(bert, "--data", texts, "--budget", 0.4, "--output_dir", out, *QUICK)
    said = capsys.readouterr().out
    assert "predicted error" in said and str(report) in said and f"model: {out}" in said
    model = BertModel.from_pretrained(out)
    assert report.costs["parameters"].share <= 0.4
    stock = BertModel.from_pretrained(bert)
    saved = report.costs["parameters"].before - report.costs["parameters"].after
    assert model.num_parameters() == stock.num_parameters() - saved == report.model_parameters_after
    stored = sum(tensor.numel() for tensor in load_file(out / "model.safetensors").values())
    assert stored == model.num_parameters()
    record = json.loads((out / "compression.json").read_text())
    assert record["model_parameters_after"] == stored and record["plan"]["of"] == "parameters"
    assert str(report) in (out / "README.md").read_text()
    assert (out / "compression.png").stat().st_size > 1000 and (out / "compression.svg").exists()
    assert damage(out) is None and files(bert) == before and [each.name for each in out.parent.iterdir()] == ["small"]
    inputs = AutoTokenizer.from_pretrained(out)("w1 w2 w3", return_tensors="pt")
    with torch.no_grad():
        moved = (model(**inputs)[0] - stock(**inputs)[0]).norm() / stock(**inputs)[0].norm()
    assert 0 < moved < 1


@pytest.mark.slow
def test_head_and_dtype_stay_and_pairs_are_read_as_pairs(bert, table, tmp_path):
    torch.manual_seed(0)
    source, out = tmp_path / "source", tmp_path / "small"
    AutoModelForSequenceClassification.from_pretrained(bert, dtype=torch.bfloat16).save_pretrained(source)
    AutoTokenizer.from_pretrained(bert).save_pretrained(source)
    report = run(source, "--data", table, "--column", "sentence1", "sentence2", "--output_dir", out, *QUICK)
    assert report.budget == 0.5 and report.costs["parameters"].share <= 0.5
    model = AutoModelForSequenceClassification.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    stored, kept = load_file(out / "model.safetensors"), load_file(source / "model.safetensors")
    assert torch.equal(stored["classifier.weight"], kept["classifier.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("sides", (1, 2))
def test_a_translation_model(marian, tmp_path, sides):
    data = translation_script.write_pairs(tmp_path, "dev", 16, 5)[:sides]
    out = tmp_path / "small"
    flags = ("--of", "cache", "--sites", "dec-self", "--max_length", "30")
    report = run(marian, "--data", *data, "--budget", 0.6, *flags, "--output_dir", out, *QUICK)
    assert {site.role for site in report.sites} == {"dec-self"} and report.of == "cache"
    assert report.costs["cache"].share <= 0.6
    model, tokenizer = MarianMTModel.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.num_parameters() == report.model_parameters_after
    (line, *_) = open(data[0], encoding="utf-8").read().splitlines()
    assert model.generate(**tokenizer(line, return_tensors="pt"), max_new_tokens=5).shape[1] > 1


@pytest.mark.slow
def test_an_error_instead_of_a_budget(bert, texts, tmp_path):
    report = run(bert, "--data", texts, "--max_error", 0.06, "--output_dir", tmp_path / "small", *QUICK)
    assert report.budget is None and 0 < report.measured_error <= 0.06
    assert report.costs["parameters"].share < 1


@pytest.mark.slow
@pytest.mark.parametrize("budget", [("--budget", 0.3), ("--budget", 0.2, "--bits", 4, 3)], ids=["width", "bits"])
def test_a_smaller_model_learns_from_its_original(budget, bert, texts, tmp_path):
    plain = run(bert, "--data", texts, *budget, "--output_dir", tmp_path / "plain", *QUICK)
    more = ("--distill_steps", 100, "--batch_size", 4, "--distill_learning_rate", 0.005)
    same = run(bert, "--data", texts, *budget, "--output_dir", tmp_path / "distilled", *QUICK, *more)
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("plain", "distilled")]
    assert sizes[0] == sizes[1]
    assert same.model_parameters_after == plain.model_parameters_after
    record = json.loads((tmp_path / "distilled" / "compression.json").read_text())["distilled"]
    assert record["steps"] > 0 and record["after"]["output"] < record["before"]["output"]
    assert json.loads((tmp_path / "plain" / "compression.json").read_text())["distilled"] is None
    card = (tmp_path / "distilled" / "README.md").read_text()
    assert str(same) in card and "hidden" in card.split(str(same))[1]
    stock, ids = BertModel.from_pretrained(bert).eval(), torch.tensor([[2, 10, 20, 30, 3]])
    with torch.no_grad():
        plain, distilled = (
            (BertModel.from_pretrained(tmp_path / name)(ids)[0] - stock(ids)[0]).norm()
            for name in ("plain", "distilled")
        )
    assert distilled < plain


def test_only_the_named_parts_get_smaller(bert, texts, tmp_path):
    report = run(bert, "--data", texts, "--budget", 0.8, "--parts", "values", "--output_dir", tmp_path / "out", *QUICK)
    for part in ("heads", "query_key"):
        assert all(before == after for before, after in (site.sizes[part] for site in report.sites))


@pytest.mark.slow
def test_the_error_on_texts_of_another_kind_is_reported(bert, texts, tmp_path, capsys):
    others = translation_script.write_lines(tmp_path / "others", [f"w{i} w{i + 1} w9" for i in range(1, 20)])
    report = run(bert, "--data", texts, "--validation", others, "--output_dir", tmp_path / "out", *QUICK)
    record = json.loads((tmp_path / "out" / "compression.json").read_text())
    assert record["validation_error"] == pytest.approx(report.validation_error) and report.validation_error > 0
    assert "on the examples of validation" in capsys.readouterr().out


@pytest.mark.slow
def test_a_plan_changes_and_writes_nothing_but_itself(bert, texts, tmp_path, monkeypatch, capsys):
    before = files(bert)
    monkeypatch.chdir(tmp_path)
    made = run(bert, "--data", texts, "--plan")
    assert str(made) in capsys.readouterr().out and list(tmp_path.iterdir()) == []
    run(bert, "--data", texts, "--plan", "--output_dir", "seen")
    assert sorted(files(tmp_path / "seen")) == ["manifest.json", "plan.json", "plan.png", "plan.svg"]
    assert json.loads((tmp_path / "seen" / "plan.json").read_text())["curve"][-1][0] == pytest.approx(1)
    assert CompressionPlan.load(tmp_path / "seen" / "plan.json").choose(0.5) == made.choose(0.5)
    monkeypatch.setattr(compressing, "missing", lambda extra: ["matplotlib"])
    run(bert, "--data", texts, "--plan", "--output_dir", "without")
    assert sorted(files(tmp_path / "without")) == ["manifest.json", "plan.json"]
    assert files(bert) == before


@pytest.mark.slow
@pytest.mark.parametrize("problem", (OSError(28, "No space left on device"), KeyboardInterrupt()))
def test_what_is_stopped_while_it_writes_leaves_nothing(bert, texts, tmp_path, monkeypatch, problem):
    def stop(*args):
        raise problem

    out = tmp_path / "small"
    monkeypatch.setattr(compressing, "save_figure", stop)  # the model has been written by then
    with pytest.raises((OutputError, KeyboardInterrupt)):
        run(bert, "--data", texts, "--output_dir", out, *QUICK)
    assert list(tmp_path.iterdir()) == []


def test_sentences_are_drawn_by_the_seed(bert, texts, tmp_path):
    lines = {"source": [str(i) for i in range(100)], "target": [str(-i) for i in range(100)]}
    one, same, other = (inputs.drawn(lines, 10, seed) for seed in (0, 0, 1))
    assert one == same != other and len(one["source"]) == 10
    assert one["target"] == [str(-int(line)) for line in one["source"]]
    assert list(map(int, one["source"])) == sorted(map(int, one["source"])) != list(range(10))
    assert inputs.drawn(lines, 200, 0) == lines
    with pytest.raises(DataError, match="7 sentences, and one of 8 is kept"):
        run(bert, "--data", texts, "--samples", 7, "--plan")


@pytest.mark.slow
def test_the_other_parts_of_a_sentence_transformer_come_along(bert, texts, tmp_path):
    source, out = tmp_path / "source", tmp_path / "small"
    (source / "1_Pooling").mkdir(parents=True)
    for path in bert.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    (source / "1_Pooling" / "config.json").write_text('{"word_embedding_dimension": 32}')
    (source / "modules.json").write_text('[{"path": ""}, {"path": "1_Pooling"}]')
    run(source, "--data", texts, "--output_dir", out, *QUICK)
    assert (out / "1_Pooling" / "config.json").read_text() == '{"word_embedding_dimension": 32}'
    assert (out / "modules.json").read_bytes() == (source / "modules.json").read_bytes()
    config = json.loads((out / "config.json").read_text())
    assert config["collab_heads"] and damage(out) is None


def refused(tmp_path, bert, texts):
    """Flags, the error, a part of its words."""
    used, empty = tmp_path / "used", translation_script.write_lines(tmp_path / "empty", [])
    used.mkdir()
    (used / "mine").write_text("")
    few, out = translation_script.write_lines(tmp_path / "few", ["w1 w2"] * 7), tmp_path / "out"
    return (
        ([texts, "--output_dir", out, "--budget", "1.5"], ArgumentError, "budget 1.5 must be a share"),
        ([texts, "--output_dir", out, "--budget", "0"], ArgumentError, "--budget: 0 is too small"),
        ([texts, "--output_dir", out, "--budget", "0.5", "--max_error", "0.1"], ArgumentError, "exclude each other"),
        ([texts, "--plan", "--budget", "0.5"], ArgumentError, "--plan shows every budget: leave --budget"),
        ([texts], ArgumentError, "--output_dir is missing: a new folder"),
        ([texts, "--output_dir", used], OutputError, "used is in use: choose another, or move"),
        ([texts, "--output_dir", bert], OutputError, "is in use: choose another"),
        ([texts, "--output_dir", empty], OutputError, "empty is a file"),
        ([texts, "--output_dir", f"{empty}/small"], OutputError, "cannot be made: .*empty is not a folder"),
        ([texts, "--output_dir", out, "--of", "size"], ArgumentError, "unknown --of 'size'"),
        ([texts, "--output_dir", out, "--kind", "none"], ArgumentError, "'none'"),
        ([texts, "--output_dir", out, "--parts", "head"], ArgumentError, "unknown --parts 'head'"),
        ([texts, "--plan", "--validation", texts], ArgumentError, "--validation measures the smaller model"),
        ([texts, "--output_dir", out, "--validation", "no.txt"], DataError, "no.txt"),
        ([texts, "--plan", "--distill_steps", "5"], ArgumentError, "--plan makes no model that --distill_steps"),
        ([texts, "--output_dir", out, "--distill_learning_rate", "0"], ArgumentError, "--distill_learning_rate: 0"),
        (
            [texts, "--output_dir", out, "--measurements", f"{out}/a.json"],
            ArgumentError,
            "a.json would be in --output_dir",
        ),
        ([texts, "--output_dir", out, "--sites", "decoder"], ArgumentError, "'decoder'"),
        ([texts, texts, "--output_dir", out], ArgumentError, "does not translate: give one, or both in a mixture"),
        ([empty, "--output_dir", out], DataError, "empty is empty"),
        ([few, "--output_dir", out], DataError, "few: 7 sentences, and one of 8 is kept to measure on: give more"),
        ([texts, "--output_dir", out, "--max_length", "2"], ArgumentError, "--max_length: 2 tokens leave no room"),
        ([texts, "--output_dir", out, "--budgets", "0.5"], ArgumentError, "did you mean '--budget'"),
    )


def test_what_is_refused_before_the_model_runs(bert, texts, tmp_path, monkeypatch):
    monkeypatch.setattr(BertModel, "forward", None)
    cases = refused(tmp_path, bert, texts)
    before = files(tmp_path)
    for argv, error, said in cases:
        with pytest.raises(error, match=said):
            run(bert, "--data", *argv)
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    "budget, said", ((0.01, r"budget 0.01 of parameters is below 0\.\d+, which"), ("1kB", r"\d MB at the least"))
)
def test_a_budget_below_the_least_is_refused_before_the_plan_is_made(budget, said, bert, texts, tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "measure_model", None)
    with pytest.raises(ArgumentError, match=said):
        run(bert, "--data", texts, "--budget", budget, "--parts", "values", "--output_dir", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_so_is_the_default_where_it_is_below_the_least(bert, texts, tmp_path, monkeypatch):
    """Key widths alone reach no half; a plan, which shows every budget, has no default."""
    argv = ("--data", texts, "--parts", "query_key", *QUICK)
    assert isinstance(run(bert, *argv, "--plan"), CompressionPlan)
    monkeypatch.setattr(planning, "measure_model", None)
    with pytest.raises(ArgumentError, match=r"budget 0.5 of parameters is below 0\.\d+, which"):
        run(bert, *argv, "--output_dir", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_models_that_are_not_supported_are_refused_in_one_line(bert, texts, tmp_path, capsys):
    gpt, unknown = tmp_path / "gpt", tmp_path / "unknown"
    gpt.mkdir()
    (gpt / "config.json").write_text(json.dumps({"model_type": "gpt_neo", "hidden_size": 8, "num_heads": 2}))
    for folder in (gpt, tmp_path / "nothing"):
        argv = ["compress", str(folder), "--data", texts, "--output_dir", str(tmp_path / "out")]
        assert main.main(argv) == 1
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith("collab-heads: ") and folder.name in said
    model = BertModel.from_pretrained(bert)
    model.save_pretrained(unknown)
    config = json.loads((unknown / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps({**config, "architectures": ["BertForMyTask"]}))
    AutoTokenizer.from_pretrained(bert).save_pretrained(unknown)
    with pytest.raises(UnsupportedModelError, match="is a BertForMyTask, which transformers lacks, and would lose"):
        run(unknown, "--data", texts, "--output_dir", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_head_that_the_config_names_and_the_folder_lacks_is_no_part_of_the_model(texts, tmp_path):
    """As all-mpnet-base-v2's: the head would be random, and what it makes of the states is what would be kept."""
    plain = tiny.write_modules(tiny.save_tiny_bert(tmp_path / "plain"))
    named = shutil.copytree(plain, tmp_path / "named")
    config = json.loads((named / "config.json").read_text())
    (named / "config.json").write_text(json.dumps(config | {"architectures": ["BertForMaskedLM"]}))
    for folder in (plain, named):
        run(folder, "--data", texts, "--budget", 0.8, "--output_dir", tmp_path / f"{folder.name}-small", *QUICK)
    found, expected = (files(tmp_path / f"{name}-small") for name in ("named", "plain"))
    assert found["model.safetensors"] == expected["model.safetensors"] and found.keys() == expected.keys()
    assert "modules.json" in found and "1_Pooling/config.json" in found


LOADS = """
import sys, collab_heads
from transformers import AutoModel
model = AutoModel.from_pretrained(sys.argv[1])
print(model.num_parameters(), model.encoder.layer[0].attention.self.value.weight.shape[0])
"""


@pytest.mark.slow
def test_as_a_command_and_loaded_in_a_fresh_process(bert, texts, tmp_path):
    out = tmp_path / "small"
    command = [sys.executable, "-m", "collab_heads", "compress", str(bert), "--data", texts, "--budget", "0.3", *QUICK]
    subprocess.run([*command, "--output_dir", str(out)], check=True, cwd=tmp_path)
    report = json.loads((out / "compression.json").read_text())
    done = subprocess.run([sys.executable, "-c", LOADS, str(out)], capture_output=True, text=True, check=True)
    number, width = map(int, done.stdout.split())
    cost = report["costs"]["parameters"]
    assert number == report["model_parameters_after"] and cost["after"] <= 0.3 * cost["before"]
    assert width == report["sites"][0]["value_after"] and width % HEAD_MULTIPLE == 0
    again = subprocess.run([*command, "--output_dir", str(out)], capture_output=True, text=True, check=False)
    assert (
        again.returncode == 1
        and again.stderr == f"collab-heads: --output_dir {out} is in use: choose another, or move what is there\n"
    )


@pytest.fixture
def decoder(bert, tmp_path):
    """A random Llama with the tokenizer of the tiny BERT, which puts [CLS] before a text."""
    torch.manual_seed(0)
    LlamaForCausalLM(rotary_config(LlamaConfig)).save_pretrained(tmp_path / "decoder")
    AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path / "decoder")
    return tmp_path / "decoder"


@pytest.mark.slow
def test_a_language_model_distils_at_the_rate_that_is_given(decoder, texts, tmp_path, monkeypatch):
    rates = []

    def noted(*given, learning_rate, **options):
        rates.append(learning_rate)
        return distill(*given, learning_rate=learning_rate, **options)

    monkeypatch.setattr(compressing, "distill", noted)
    for flags in ((), ("--distill_learning_rate", 0.003)):
        out = ("--output_dir", tmp_path / f"small{len(flags)}")
        run(decoder, "--data", texts, "--budget", 0.6, "--distill_steps", 2, *flags, *out, *QUICK)
    assert rates == [0.01, 0.003]


@pytest.mark.slow
def test_texts_that_the_model_writes_itself(decoder, texts, tmp_path, monkeypatch, capsys):
    given = []

    def noted(layers, batches, *options):
        given.extend(batches)
        return planning.planned(layers, given, *options)

    monkeypatch.setattr(compressing, "planned", noted)
    flags = ("--generated", 70, "--max_length", 20, "--batch_size", 16, "--seed", 3)
    run(decoder, "--data", texts, "--budget", 0.6, *flags, "--output_dir", tmp_path / "small", *QUICK)
    assert "--generated" not in capsys.readouterr().out
    assert [len(batch["input_ids"]) for batch in given] == [16, 16, 8, 16, 16, 16, 16, 6]
    own = torch.cat([batch["input_ids"] for batch in given[3:]])
    first = AutoTokenizer.from_pretrained(decoder).cls_token_id
    model = LlamaForCausalLM.from_pretrained(decoder)
    assert torch.equal(own, torch.cat([b["input_ids"] for b in generate_batches(model, 70, 20, start=[first], seed=3)]))
    LlamaForCausalLM.from_pretrained(tmp_path / "small")


def test_a_mixture_calibrates(decoder, texts, table, tmp_path, capsys):
    data = (f"{texts}:2", f"{table}:1", "--column", "sentence1")
    made = run(decoder, "--data", *data, "--plan", *QUICK)
    said = capsys.readouterr().out
    assert "with --generated 64" in said
    assert f"{texts}:2: 40 of 40 texts" in said and f"{table}:1: 20 of 40 texts" in said
    assert made.measured is not None


@pytest.mark.slow
def test_a_second_budget_begins_with_the_measurements_of_the_first(bert, texts, tmp_path, monkeypatch):
    flags = ("--data", texts, "--measurements", tmp_path / "measured.json", *QUICK)
    made = run(bert, *flags, "--plan")
    monkeypatch.setattr(measurements, "site_errors", None)
    report = run(bert, *flags, "--budget", 0.6, "--output_dir", tmp_path / "small")
    assert report.predicted_error == made.predicted(made.choose(0.6))


def test_an_encoder_writes_no_texts(bert, texts):
    with pytest.raises(UnsupportedModelError, match="BertModel writes no texts from nothing"):
        run(bert, "--data", texts, "--plan", "--generated", 8)
