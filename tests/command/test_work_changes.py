"""collab-heads swap, prune, fold: what they write is what the library makes, and loads; what they refuse."""

import json

import commands
import pytest
import torch
import translation_script
from opening import gates_in, record_of
from tokenizers_made import FEW, fast
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    ViTImageProcessor,
)

import tiny
from collab_heads import prune_neurons, swap_to_alpha, swap_to_collaborative, swap_to_gated
from collab_heads.errors import ArgumentError, DataError, ModelStateError, OutputError
from collab_heads.sites.record import FIELD
from families import FAMILIES

QUICK = ("--refine_steps", "2", "--samples", "16")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Sentences of words that the tiny BERT knows."""
    lines = [row["sentence1"] for row in tiny.rows(20, 1)]
    return translation_script.write_lines(tmp_path_factory.mktemp("texts") / "a.txt", lines)


def record(folder, name):
    """What a command wrote of its work."""
    return json.loads((folder / f"{name}.json").read_text())


def saved(model, source, folder):
    """A changed model with the tokenizer of its original, in a folder."""
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def output(folder):
    """What a model makes of some tokens."""
    with torch.no_grad():
        return BertModel.from_pretrained(folder).eval()(torch.tensor([[2, 10, 20, 30, 3]]))[0]


def test_a_swap_from_the_weights_is_the_swap_of_the_library(bert, tmp_path, capsys):
    flags = "--dim_shared_query_key 16 --dim_value 0.5 --kind per_head".split()
    report = commands.run("swap", bert, *flags, "--output_dir", tmp_path / "out")
    model = BertModel.from_pretrained(bert)
    expected = swap_to_collaborative(model, dim_shared_query_key=16, dim_value=0.5, kind="per_head")
    assert [site.dim for site in report.sites] == [site.dim for site in expected.sites] == [16, 16]
    loaded = BertModel.from_pretrained(tmp_path / "out")
    assert (
        loaded.num_parameters() == model.num_parameters() and getattr(loaded.config, FIELD) == model.config.collab_heads
    )
    assert record(tmp_path / "out", "swap") == json.loads(json.dumps(report.to_dict()))
    assert str(report) in capsys.readouterr().out


def test_widths_by_role(marian, pairs, tmp_path):
    widths = ("--dim_shared_query_key", "enc-self=8,dec-enc=0.5", "--dim_value", "dec-enc=0.5", "--kind", "per_head")
    commands.run("swap", marian, *widths, "--data", *pairs, *QUICK, "--output_dir", tmp_path / "out")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    sites = {state.role: state for state in record_of(model).sites.values()}
    assert sites.keys() == {"enc-self", "dec-enc"}
    cross = sites["dec-enc"]
    assert sites["enc-self"].query_key.dim < sites["enc-self"].num_heads * sites["enc-self"].query_key.dim_head
    assert cross.query_key.dim * 2 == cross.num_heads * cross.query_key.dim_head
    assert sites["enc-self"].values is None and cross.values.dim * 2 == cross.values.dim_head
    with pytest.raises(ArgumentError, match="dec-self"):
        commands.parse("swap", marian, "--dim_value", "decoder=8", "--output_dir", tmp_path / "other")


def test_heads_are_removed_and_the_others_make_up_for_them(bert, texts, tmp_path):
    for name, more in (("repaired", ()), ("plain", ("--no_repair",))):
        flags = "--target_heads", 4, "--data", texts, *QUICK[2:], *more, "--output_dir", tmp_path / name
        report = commands.run("prune", bert, *flags)
        assert sum(site.heads_after for site in report.sites) == 4
    original = output(bert)
    lost = {name: (output(tmp_path / name) - original).norm() for name in ("repaired", "plain")}
    assert lost["repaired"] < lost["plain"]
    kept = commands.run(
        "prune", bert, "--target_heads", 4, "--head_selection", "random", "--output_dir", tmp_path / "x"
    )
    again = "--target_heads", 4, "--head_selection", "random", "--seed", 1, "--output_dir", tmp_path / "y"
    assert [site.kept for site in kept.sites] != [site.kept for site in commands.run("prune", bert, *again).sites]


def test_heads_that_a_file_names(bert, tmp_path):
    alive = tmp_path / "alive.json"
    alive.write_text(json.dumps({"enc-self": [[1, 0, 0, 1], [1, 1, 1, 1]]}))
    report = commands.run("prune", bert, "--alive_heads", alive, "--output_dir", tmp_path / "out")
    assert [site.kept for site in report.sites] == [(0, 3), (0, 1, 2, 3)]


def test_importance_of_the_heads_of_a_language_model_and_a_translator(bert, marian, pairs, texts, tmp_path):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=44, n_positions=64, n_embd=32, n_layer=1, n_head=4)
    gpt = saved(GPT2LMHeadModel(config), bert, tmp_path / "gpt")
    how = "--head_selection", "gradient", *QUICK[2:]
    report = commands.run("prune", gpt, "--target_heads", 2, *how, "--data", texts, "--output_dir", tmp_path / "a")
    assert [site.heads_after for site in report.sites] == [2]
    shown = commands.run("analyze", gpt, "--data", texts, "--examples", "0", "--output_dir", tmp_path / "report")
    assert shown.gradient is not None and not any("gradient" in note for note in shown.notes)
    flags = "--target_heads", "dec-enc=1", *how, "--data", *pairs, "--output_dir", tmp_path / "b"
    report = commands.run("prune", marian, *flags)
    assert {site.role for site in report.sites} == {"dec-enc"} and sum(site.heads_after for site in report.sites) == 1


def test_what_training_closed_is_removed_or_folded(bert, tmp_path):
    model = BertModel.from_pretrained(bert)
    swap_to_gated(model)
    (_, gates), *_ = gates_in(model)
    with torch.no_grad():
        gates.log_alpha[1:3] = -9.0
    swap_to_alpha(model, sites="encoder.layer.1.attention.self")
    gated = saved(model, bert, tmp_path / "gated")
    report = commands.run("prune", gated, "--output_dir", tmp_path / "pruned")
    assert report.sites[0].kept == (0, 3)
    folded = commands.run("fold", gated, "--output_dir", tmp_path / "folded")
    assert len(folded.gates) == 2 and len(folded.alphas) == 1
    for name in ("pruned", "folded"):
        torch.testing.assert_close(output(tmp_path / name), output(gated))
    assert FIELD not in json.loads((tmp_path / "folded" / "config.json").read_text())


def test_what_is_refused(bert, texts, tmp_path):
    used, out = tmp_path / "used", ("--output_dir", tmp_path / "out")
    used.mkdir()
    (used / "mine").write_text("")
    for argv, error, said in (
        (("swap", bert), ArgumentError, "--output_dir is missing"),
        (("swap", bert, "--output_dir", used), OutputError, "is in use"),
        (("swap", used, *out), ArgumentError, "used holds no model: it has no config.json"),
        (("swap", bert, "--allocation", "balanced", *out), ArgumentError, "--allocation balanced needs --data"),
        (("swap", bert, "--kind", "none", *out), ArgumentError, "unknown --kind 'none'"),
        (("swap", bert, "--dim_shared_query_key", 9000, *out), ArgumentError, "9000"),
        (("swap", bert, "--data", used / "x", *out), DataError, "x: No such file"),
        (("prune", bert, "--target_heads", 4, *out), ArgumentError, "reconstruction needs --data"),
        (("prune", bert, "--target_heads", 4, "--alive_heads", texts, *out), ArgumentError, "exclude each other"),
        (("prune", bert, "--alive_heads", texts, *out), DataError, "--alive_heads .*a.txt"),
        (("prune", bert, "--sites", "enc-self", *out), ArgumentError, "--sites goes with a total"),
        (("prune", bert, *out), ArgumentError, "no gates that say which heads go"),
        (("fold", bert, *out), ModelStateError, "there is nothing to fold"),
    ):
        with pytest.raises(error, match=said):
            commands.run(*argv)
    assert not (tmp_path / "out").exists()


def test_removal_without_gates_advises_flags(bert, tmp_path):
    with pytest.raises(
        ArgumentError, match=r"no gates that say which heads go: give --target_heads .* or --alive_heads"
    ):
        commands.run("prune", bert, "--output_dir", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ("x" * 300, "x" * 250, "."))
def test_a_folder_that_cannot_be_made_is_refused_before_the_work(name, bert, tmp_path, monkeypatch):
    """Also where only the names beside it, under which it is written, are too long."""
    monkeypatch.chdir(tmp_path)
    for command in (["fold", bert], ["compress", bert, "--data", __file__], ["analyze", bert, "--data", __file__]):
        with pytest.raises(OutputError, match=r"--output_dir (x{80} cannot be made: File name too long|. has no name)"):
            commands.parse(*command, "--output_dir", name)


def test_trim_writes_a_stock_checkpoint_with_its_tokenizer(bert, tmp_path, capsys):
    texts = translation_script.write_lines(tmp_path / "texts.txt", FEW)
    tokenizer, config = fast("WordPiece"), BertModel.from_pretrained(bert).config
    config.vocab_size, bert = len(tokenizer), tmp_path / "whole"
    BertModel(config).save_pretrained(bert)
    tokenizer.save_pretrained(bert)
    report = commands.run("trim", bert, "--data", texts, "--output_dir", tmp_path / "out")
    assert str(report) in capsys.readouterr().out
    tokenizer, model = (each.from_pretrained(tmp_path / "out") for each in (AutoTokenizer, BertModel))
    assert len(tokenizer) == model.config.vocab_size == report.tokens_after < report.tokens_before
    assert "## Vocabulary" in (tmp_path / "out" / "README.md").read_text()
    assert json.loads((tmp_path / "out" / "trim.json").read_text())["tokens_after"] == report.tokens_after
    with pytest.raises(ArgumentError, match="keep 2 is less than"):
        commands.run("trim", bert, "--data", texts, "--keep", 2, "--output_dir", tmp_path / "other")
    with pytest.raises(ArgumentError, match="--keep and --min_count exclude each other"):
        commands.parse("trim", "not_read", "--data", texts, "--keep", 99, "--min_count", 2, "--output_dir", "other")
    assert not (tmp_path / "other").exists()


def test_fold_needs_no_tokenizer_of_a_model_of_images(tmp_path):
    FAMILIES["bert"].build().save_pretrained(tmp_path / "bert")
    with pytest.raises(ArgumentError, match="has no tokenizer"):
        commands.run("fold", tmp_path / "bert", "--output_dir", tmp_path / "out")
    model = FAMILIES["vit"].build()
    prune_neurons(model, [FAMILIES["vit"].inputs()], keep=0.5)
    model.save_pretrained(tmp_path / "vit")
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "vit")
    commands.run("fold", tmp_path / "vit", "--output_dir", tmp_path / "out")
    folded = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert not hasattr(folded.config, "collab_heads")
    assert AutoImageProcessor.from_pretrained(tmp_path / "out").size == {"height": 16, "width": 16}
