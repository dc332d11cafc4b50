"""analyze_heads: its parts are what the functions beside it measure; what it leaves out is said; what is refused."""

import json

import pytest
import torch
from changed_heads import change_heads
from heads_by_hand import CHANGES, EOS, STEPS, ended, model_in
from known_heads import TREEBANK, word_pieces
from model_inputs import cast
from model_sizes import HEADS
from transformers import BertConfig, BertForQuestionAnswering, BertModel, ViTConfig, ViTModel
from unchanged import assert_unchanged, refused, snapshot

import collab_heads
from collab_heads import analyze_heads
from collab_heads.analysis import ablation_curve, analyze, leave_one_out, mean_loss
from collab_heads.analysis.measures.worth import OF_REPORT
from collab_heads.analysis.report.head_report import side_tables
from collab_heads.analysis.report.measurements import text_of
from collab_heads.analysis.report.pictures import pictures_in
from collab_heads.analysis.report.savings import cheap_html
from collab_heads.errors import ArgumentError, CalibrationError, ModelStateError
from collab_heads.heads.comparison import rank_correlation
from collab_heads.heads.criteria import Gradient


def test_work_that_several_threads_slow_down_is_left_to_one(two_threads, monkeypatch):
    model, observe, seen = model_in("bert"), analyze.observe, []
    batches = split(labelled("bert", model))
    monkeypatch.setattr(analyze, "choose_threads", lambda *given: seen.append(given) or torch.set_num_threads(1))
    monkeypatch.setattr(analyze, "observe", lambda *a, **k: seen.append(torch.get_num_threads()) or observe(*a, **k))
    analyze_heads(model, batches, parts="statistics")
    (of, batch), threads = seen
    assert of is model and batch is batches[0] and threads == 1 and torch.get_num_threads() == 2


def labelled(name, model):
    inputs, _ = ended(name)
    if "decoder_input_ids" in inputs:
        labels = inputs["decoder_input_ids"].roll(-1, 1)
        for row, length in enumerate(STEPS):
            labels[row, length:] = -100
        inputs["labels"] = labels
    else:
        inputs["labels"] = torch.tensor([0, 1, 1])
    return cast(inputs, model.dtype)


def split(inputs):
    return [{key: value[part] for key, value in inputs.items()} for part in (slice(0, 2), slice(2, 3))]


@pytest.mark.parametrize("name", ("bert", "marian", "t5"))
def test_every_part_is_what_its_function_measures(name):
    model = model_in(name)
    batches = split(labelled(name, model))
    mean_loss(model, batches)  # transformers sets config.problem_type
    before = snapshot(model)
    report = analyze_heads(model, batches, exclude=[EOS])
    assert_unchanged(model, before)
    assert report.statistics == collab_heads.analysis.head_statistics(model, batches, exclude=[EOS])
    worth = collab_heads.analysis.head_worth(model, batches, measures=OF_REPORT, exclude=[EOS])
    assert report.worth.to_dict() == worth.to_dict()
    assert report.relevance == collab_heads.analysis.head_relevance(model, batches, exclude=[EOS])
    roles = collab_heads.analysis.head_roles(model, batches, exclude=[EOS])
    assert report.roles.to_dict() == roles.to_dict()
    gradient = collab_heads.analysis.head_importance(model, batches, criterion=Gradient(normalize=False))
    assert all(torch.equal(report.gradient[path], values.double()) for path, values in gradient.items())
    joint = collab_heads.analysis.head_importance(model, batches, criterion="reconstruction")
    assert all(torch.equal(report.reconstruction[path], values.double()) for path, values in joint.items())
    if name == "bert":
        assert report.contributions is None
    else:
        assert report.contributions == collab_heads.analysis.token_contributions(model, batches, exclude=[EOS])
    assert report.ablation is None and report.correlations() == {}
    assert any("heads were not left out" in note for note in report.notes)
    assert any("eager backend; the model itself uses sdpa" in note for note in report.notes)
    assert report.data["sentences"] == 3 and len(report.examples) == 3
    assert report.data["query_tokens"]["enc-self"] == report.statistics.tokens[report.sites[0].path]


def test_scores_and_the_table_of_heads():
    model = model_in("marian")
    report = analyze_heads(model, split(labelled("marian", model)), exclude=[EOS])
    scores = report.scores()
    assert list(scores) == [
        "confidence",
        "entropy",
        "attention_distance",
        "first_token",
        "l2_distance",
        "value_norm",
        "value_zeroing",
        "contribution",
        "relevance",
        "absolute_relevance",
        "gradient",
        "reconstruction",
    ]
    header, rows = report.rows()
    assert len(rows) == 6 * HEADS and header[:3] == ["role", "layer", "head"] and header[-1] == "what it does"
    site = report.sites[-1]
    row = rows[-1]
    assert row[:3] == [site.role, site.layer, HEADS - 1]
    assert row[3] == float(report.statistics.confidence[site.path][-1])
    assert row[6] is None and site.role == "dec-enc"  # attention to the first token is of self-attention
    assert row[9] == float(report.worth.values["value_zeroing"][site.path][-1])
    assert row[11] == float(report.relevance.relevance[site.path][-1])
    assert row[12] == abs(float(report.relevance.signed[site.path][-1]))
    assert [text_of(cell) for cell in row] == report.text_rows()[1][-1]
    assert len(row) == len(header) and all(len(each) == len(header) for each in rows)
    assert "MarianMTModel (marian): 24 heads" in str(report) and "3 sentences" in str(report)


def test_heads_that_share_keys():
    """Their key head stands beside them: after removal, the one that they have now."""
    model = model_in("qwen3")
    inputs = ended("qwen3")[0]
    report = analyze_heads(model, [inputs], exclude=[EOS], parts=("statistics", "relevance"))
    header, rows = report.rows()
    assert header[:4] == ["role", "layer", "head", "key head"] and all(len(row) == len(header) for row in rows)
    assert [row[:4] for row in rows[:HEADS]] == [["dec-self", 0, i, i // 2] for i in range(HEADS)]
    assert "8 heads, which share 4 key heads\n" in str(report)
    for measured in (report.statistics, report.relevance):
        assert str(measured).split("\n")[2].split()[2:5] == ["4", "on", "2"]
    assert json.loads(report.to_json())["sites"][0]["groups"] == [0, 0, 1, 1]
    collab_heads.prune_heads(model, heads={"dec-self": [[0, 1], [1, 2, 3]]})
    header, rows = analyze_heads(model, [inputs], exclude=[EOS], parts="statistics").rows()
    assert [row[1:4] for row in rows] == [[0, 2, 0], [0, 3, 0], [1, 0, 0]]
    other = model_in("bert")
    header, _ = analyze_heads(other, [labelled("bert", other)], exclude=[EOS], parts="statistics").rows()
    assert "key head" not in header


def test_the_ablation_its_curves_and_correlations():
    model = model_in("marian")
    batches = split(labelled("marian", model))
    report = analyze_heads(model, batches, parts=("relevance", "ablation"), data="pairs")
    found = leave_one_out(model, lambda m: mean_loss(m, batches))
    harm = torch.cat([*found.harm().values()])
    assert torch.allclose(torch.cat([*report.ablation.harm().values()]), harm, rtol=0, atol=1e-12)
    relevance = torch.cat([*report.relevance.relevance.values()])
    absolute = torch.cat([*report.relevance.signed.values()]).abs()
    assert report.correlations() == {
        "relevance": pytest.approx(rank_correlation(relevance, harm)),
        "absolute_relevance": pytest.approx(rank_correlation(absolute, harm)),
    }
    assert set(report.curves) == {"relevance", "absolute_relevance", "leave_one_out"}
    curve = ablation_curve(model, lambda m: mean_loss(m, batches), report.relevance.relevance)
    assert report.curves["relevance"] == curve
    assert report.statistics is report.roles is report.gradient is None and report.examples == ()
    assert "Rank correlation of relevance" in str(report) and "pairs" in str(report)
    higher = analyze_heads(
        model, batches, parts="ablation", evaluate=lambda m: -mean_loss(m, batches), metric="x", higher_is_better=True
    )
    assert torch.allclose(torch.cat([*higher.ablation.harm().values()]), harm, rtol=0, atol=1e-12)
    assert higher.ablation.metric == "x"


@pytest.mark.parametrize("name, both", [("bert", True), ("albert", False)])
def test_what_heads_write_orders_curves_where_every_site_has_it(name, both):
    """The one module of ALBERT runs twice: there is no stream of its own behind it."""
    model = model_in(name)
    batches = split(labelled(name, model))
    report = analyze_heads(model, batches, exclude=[EOS], parts=("worth", "relevance", "ablation"))
    names = {"value_zeroing", "contribution"} if both else set()
    relevance = {"relevance", "absolute_relevance"}
    assert set(report.correlations()) == names | relevance
    assert set(report.curves) == names | relevance | {"leave_one_out"}
    assert "value_norm" in report.scores() and names == report.scores().keys() & {"value_zeroing", "contribution"}


@pytest.mark.parametrize(
    "name, said", [("bert", "a layer changes the residual stream"), ("albert", "the output of a layer changes")]
)
def test_what_the_cost_of_removal_is_a_share_of(name, said):
    model = model_in(name)
    report = analyze_heads(model, split(labelled(name, model)), exclude=[EOS], parts="reconstruction")
    assert f"W_O refitted, {said} by" in str(report) and f"of its variance {said}." in report.to_html()
    assert json.loads(report.to_json())["reconstruction_of_stream"] == (name == "bert")


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ("bert", "marian"))
def test_changed_models_and_json(name, change):
    model = model_in(name, change)
    report = analyze_heads(model, split(labelled(name, model)), exclude=[EOS])
    found = json.loads(report.to_json())
    assert found["model_type"] == name and len(found["sites"]) == len(report.sites)
    assert found["statistics"]["confidence"] == report.statistics.to_dict()["confidence"]
    assert found["relevance"]["relevance"] == {p: v.tolist() for p, v in report.relevance.relevance.items()}
    heads = sum(site.num_heads for site in report.sites)
    assert len(report.rows()[1]) == heads
    total = 24 if name == "marian" else 8
    assert sum(report.totals.values()) == total
    if change.startswith("pruned"):
        assert heads < total and f"{heads} heads of {total}" in str(report)
        assert any(numbers != tuple(range(len(numbers))) for numbers in report.heads.values())
    else:
        assert f"{heads} heads\n" in str(report)
    gated = change in ("gated", "pruned shared")
    assert bool(report.gates) == gated == ("gate" in report.scores())
    assert bool(report.statistics.alphas) == (change == "mixed")


def test_without_labels_the_loss_is_left_out_and_that_is_said():
    model = model_in("marian")
    inputs, _ = ended("marian")
    report = analyze_heads(model, [inputs], exclude=[EOS])
    assert report.gradient is None and report.relevance is not None and report.contributions is not None
    assert any("gradient importance was not measured: the batches have no labels" in note for note in report.notes)
    with refused(model, ArgumentError, "part 'gradient' is of the loss, and the batches have no labels"):
        analyze_heads(model, [inputs], parts=("statistics", "gradient"))


def test_places_of_answers_are_labels():
    model = BertForQuestionAnswering(model_in("bert").config)
    inputs = {name: value for name, value in labelled("bert", model).items() if name != "labels"}
    ends = dict.fromkeys(("start_positions", "end_positions"), torch.ones(len(inputs["input_ids"]), dtype=torch.long))
    assert analyze_heads(model, [inputs | ends], exclude=[EOS], parts="gradient").gradient
    assert analyze_heads(model, [inputs | ends], exclude=[EOS]).gradient


def test_a_model_that_cannot_lose_heads_gets_a_note_unless_the_cost_was_requested(monkeypatch):
    def refuses(*_, criterion, **__):
        raise ModelStateError("it is quantised")

    model = model_in("bert")
    inputs = {name: value for name, value in labelled("bert", model).items() if name != "labels"}
    monkeypatch.setattr("collab_heads.analysis.analyze.head_importance", refuses)
    report = analyze_heads(model, [inputs], exclude=[EOS])
    assert report.reconstruction is None and "What can go" not in str(report)
    assert "the cost of removal was not measured: it is quantised" in report.notes
    with refused(model, ModelStateError, "it is quantised"):
        analyze_heads(model, [inputs], exclude=[EOS], parts="reconstruction")


def test_a_report_names_the_model_and_not_where_it_lies():
    model = model_in("bert")
    for path in ("/home" + "/me/models/tiny", "models/tiny"):
        model.config._name_or_path = path
        report = analyze_heads(model, [labelled("bert", model)], parts="statistics", exclude=[EOS])
        assert report.model == "BertForSequenceClassification of models/tiny"


def test_a_report_says_what_was_looked_at():
    """Images, and sentences where there is nothing to see."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    images = ViTModel(ViTConfig(**sizes, image_size=8, patch_size=4)).eval()
    batch = {"pixel_values": torch.randn(3, 3, 8, 8)}
    said = str(analyze_heads(images, [batch], parts="reconstruction", data="dots"))
    assert "Data: dots, 3 images" in said and "on 3 images." in cheap_html(analyze_heads(images, [batch]))
    texts = BertModel(BertConfig(**sizes, vocab_size=9)).eval()
    assert "Data: dots, 1 sentence\n" in str(
        analyze_heads(texts, [{"input_ids": torch.ones(1, 3).long()}], data="dots", parts="reconstruction")
    )


def test_what_is_refused():
    model = model_in("bert")
    batches = [labelled("bert", model)]
    with refused(model, ArgumentError, "'relevanc'", "did you mean 'relevance'"):
        analyze_heads(model, batches, parts=("relevanc",))
    with refused(model, ArgumentError, "parts is empty"):
        analyze_heads(model, batches, parts=())
    with refused(model, ArgumentError, "only encoder-decoders have a source"):
        analyze_heads(model, batches, parts=("contributions",))
    with refused(model, ArgumentError, "read only once"):
        analyze_heads(model, iter(batches))
    with refused(model, CalibrationError, "empty"):
        analyze_heads(model, [])
    with refused(model, ArgumentError, "a treebank needs the model's tokenizer"):
        analyze_heads(model, batches, treebank="missing.conllu")
    empty = model_in("bert")
    change_heads(empty, "pruned")
    paths = [site.path for site in collab_heads.get_adapter(empty).sites_with_heads(empty)]
    numbers = analyze_heads(empty, batches, parts="statistics", exclude=[EOS]).heads
    collab_heads.prune_heads(empty, heads={path: list(numbers[path]) for path in paths})
    with refused(empty, ModelStateError, "no heads left"):
        analyze_heads(empty, batches)


@pytest.mark.slow
def test_contributions_after_several_prefixes_and_beside_other_models(tmp_path):
    model = model_in("marian", dtype=torch.float32)
    batches = split(labelled("marian", model))
    model.save_pretrained(tmp_path / "step_7")
    more = {"parts": "contributions", "exclude": [EOS], "prefixes": ("own", "reference")}
    report = analyze_heads(model, batches, **more, compare_with=[tmp_path / "step_7"])
    own = collab_heads.analysis.token_contributions(model, batches, prefixes="own", exclude=[EOS])
    assert report.contributions == own and len(report.contribution_example.said) in map(len, own.rows("source"))
    compared = report.compared_contributions
    assert compared.models() == ["step_7", "this model"] and compared.divergence["step_7"] == 0
    assert str(compared) in str(report) and own.summary() in str(report)
    stored = json.loads(report.to_json())
    assert stored["compared_contributions"]["runs"][2]["contributions"] == stored["contributions"]
    names = {picture.name: picture.alt for picture in pictures_in(report)}
    assert {"source_share", "contributions", "contribution_map"} < names.keys()
    assert names["contribution_history"].startswith("Contributions by model: the share of the source is 0.")
    assert side_tables(report)["contributions"] == compared.table()
    alone = analyze_heads(model, batches, parts="contributions", exclude=[EOS])
    assert alone.compared_contributions is None and json.loads(alone.to_json())["compared_contributions"] is None
    for wrong, words in (({"prefixes": "owm"}, "'own'"), ({"compare_with": "step_7"}, "compare_with must be a dict")):
        with refused(model, ArgumentError, words):
            analyze_heads(model, batches, **wrong)


def test_contributions_are_of_sentences_spread_over_the_data_and_that_is_said():
    model = model_in("marian", dtype=torch.float32)
    batches = split(labelled("marian", model))
    report = analyze_heads(model, batches, parts="contributions", exclude=[EOS], contribution_sentences=1)
    last = collab_heads.analysis.token_contributions(model, batches[-1:], exclude=[EOS])
    assert report.contributions == last and f"of 1 of the 3 sentences: {last.summary()}" in str(report)
    assert "query tokens" not in str(report)


def test_what_is_compared_reads_the_same_ids(monkeypatch):
    model, other = model_in("marian"), model_in("marian")
    other.config.vocab_size += 1
    monkeypatch.setattr(analyze.Analysis, "observe", lambda *_: pytest.fail("measured before"))
    with refused(model, ArgumentError, "other has 62 tokens, and this model 61: models are compared on the same ids"):
        analyze_heads(model, [labelled("marian", model)], exclude=[EOS], compare_with={"other": other})


def test_how_much_of_a_treebank_was_read_is_said(tmp_path):
    model, path = model_in("bert"), tmp_path / "bank.conllu"
    path.write_text(TREEBANK, encoding="utf-8")
    tokenizer, batches = word_pieces(model_max_length=9), [labelled("bert", model)]
    report = analyze_heads(model, batches, parts=("roles",), exclude=[EOS], treebank=path, tokenizer=tokenizer)
    assert "Treebank: 1 sentences (at most 9 tokens); skipped: 2 too long, 0 not aligned" in str(report)
    header, rows = side_tables(report)["roles"]
    words = {" ".join(kind): str(baseline.queries) for kind, baseline in report.roles.baselines.items()}
    assert header[:2] == ["dependency", "words"] and dict(row[:2] for row in rows) == words
    assert set(words.values()) == {"1"}


def test_a_treebank_without_roles_is_noted():
    model = model_in("bert")
    for more, noted in (({"treebank": "some.conllu"}, True), ({}, False)):
        notes = analyze_heads(model, [labelled("bert", model)], parts="relevance", exclude=[EOS], **more).notes
        assert any("roles were not measured" in note for note in notes) == noted


@pytest.mark.parametrize(
    "cell, text",
    ((0.0, "0.000"), (0.25, "0.250"), (-13.0852, "-13.085"), (0.0999, "0.0999"), (0.000123456, "0.000123")),
)
def test_small_measures_keep_their_digits(cell, text):
    assert text_of(cell) == text and (text_of(7), text_of(None), text_of("dec-self")) == ("7", "", "dec-self")


def test_prefixes_without_contributions_are_noted():
    model = model_in("bert")
    for more, noted in (({"prefixes": "own"}, True), ({"compare_with": {"twin": model}}, True), ({}, False)):
        notes = analyze_heads(model, split(labelled("bert", model)), parts="relevance", exclude=[EOS], **more).notes
        assert any("contributions were not measured" in note for note in notes) == noted


@pytest.mark.slow
def test_a_page_shows_contributions(tmp_path):
    pytest.importorskip("matplotlib")
    model = model_in("marian", dtype=torch.float32)
    report = analyze_heads(
        model, [labelled("marian", model)], parts="contributions", exclude=[EOS], compare_with={"twin": model}
    )
    report.save(tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Contributions by model: the share of the source is" in page and "less the first" in page
    for name in ("source_share", "contributions", "contribution_history", "contribution_map"):
        assert (tmp_path / f"{name}.svg").is_file()
