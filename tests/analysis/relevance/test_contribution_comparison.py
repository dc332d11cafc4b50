"""Models, checkpoints and prefixes side by side: what is measured, how far from the last, what is refused."""

import math

import pytest
import torch
from heads_by_hand import EOS, model_in
from relevance_by_hand import labelled

from collab_heads import prune_heads
from collab_heads.analysis import ContributionComparison, compare_contributions, token_contributions
from collab_heads.analysis.relevance.contribution_comparison import named_models
from collab_heads.errors import ArgumentError, DataError
from families import FAMILIES

KINDS = ("reference", "own", "random")
SEEN = 1e-3  # what differs on purpose differs by more


def other():
    """The same model, but for a head."""
    model = model_in("marian", dtype=torch.float32)
    prune_heads(model, heads={"dec-enc": [[0], []]})
    return model


@pytest.fixture(scope="module")
def batches():
    return [labelled("marian")]


@pytest.fixture(scope="module")
def models():
    return {"pruned": other(), "whole": model_in("marian", dtype=torch.float32)}


@pytest.fixture(scope="module")
def compared(models, batches):
    return compare_contributions(models, batches, prefixes=KINDS, exclude=[EOS])


def test_every_run_is_what_token_contributions_measures(compared, models, batches):
    assert [(name, run.prefixes) for name, run in compared.runs] == [(n, kind) for n in models for kind in KINDS]
    for name, run in compared.runs:
        assert run == token_contributions(models[name], batches, prefixes=run.prefixes, exclude=[EOS])
    assert len({run.mean for _, run in compared.runs}) == 6
    assert compared.over_models("source", "own") == [compared.runs[i][1].average("source") for i in (1, 4)]
    assert compared.over_models("target_entropy") == [compared.runs[i][1].average("target_entropy") for i in (0, 3)]
    with pytest.raises(ArgumentError, match="unknown prefixes 'given'"):
        compared.over_models("source", "given")


def test_the_divergence_is_from_the_last_model_by_hand(compared, models, batches):
    kept = compare_contributions(models, batches, exclude=[EOS], keep_relevance=True)
    total, tokens = 0.0, 0
    for one, two in zip(kept.runs[1][1].sentences, kept.runs[0][1].sentences, strict=True):
        pairs = zip(*(torch.cat(each.relevance.contributions(), 1).tolist() for each in (one, two)), strict=True)
        for last, mine in pairs:
            total += sum(p * math.log(p / q) for p, q in zip(last, mine, strict=True) if p)
            tokens += 1
    assert compared.divergence == kept.divergence == {"pruned": pytest.approx(total / tokens), "whole": 0.0}
    assert total / tokens > SEEN
    assert kept.runs[0][1].sentences[0].relevance is not None and compared.runs[0][1].sentences[0].relevance is None
    assert compare_contributions(models, batches, prefixes="own").divergence == {}
    assert compare_contributions({"alone": models["whole"]}, batches).divergence == {}


def test_differences_are_to_the_first(compared):
    mean, error = compared.difference(3)
    assert mean == pytest.approx(compared.runs[3][1].mean - compared.runs[0][1].mean) and error > 0
    lines = str(compared).split("\n")
    assert lines[0].split("  ")[0] == "model" and "divergence" in lines[0] and len(lines) == 2 + 6 + 1
    assert f"{mean:+.3f} \u00b1 {error:.3f}" in lines[5] and f"{compared.divergence['pruned']:.4f}" in lines[2]


def test_labels_say_what_differs(compared, models, batches):
    assert compared.labels()[:2] == ["pruned, reference prefixes", "pruned, own prefixes"]
    runs = compared.runs
    assert ContributionComparison(runs[:3]).labels() == [f"{kind} prefixes" for kind in KINDS]
    assert ContributionComparison((runs[0], runs[3])).labels() == ["pruned", "whole"]


@pytest.mark.slow
def test_checkpoints_are_loaded_in_turn_and_left_alone(models, batches, tmp_path):
    folders = [tmp_path / "step_20", tmp_path / "step_100"]
    for folder, model in zip(folders, models.values(), strict=True):
        model.save_pretrained(folder)
    found = compare_contributions(folders, batches, exclude=[EOS])
    given = compare_contributions(models, batches, exclude=[EOS])
    assert found.models() == ["step_20", "step_100"] and found.steps() == [20, 100]
    assert [run for _, run in found.runs] == [run for _, run in given.runs]
    assert given.steps() is None and compare_contributions(folders[::-1], batches).steps() is None  # which go down
    decoder = FAMILIES["qwen3"].build()
    decoder.save_pretrained(tmp_path / "decoder")
    ids = torch.arange(3, 9)[None]
    prompt = {"input_ids": ids, "labels": torch.where(ids < 6, -100, ids)}
    (run,) = compare_contributions([tmp_path / "decoder"], [prompt]).runs
    assert run == ("decoder", token_contributions(decoder, [prompt]))


def test_folders_of_one_name_are_told_apart(tmp_path):
    folders = [tmp_path / seed / "model" for seed in ("one", "two")]
    assert list(named_models(folders)) == ["one/model", "two/model"]
    assert list(named_models([folders[0], tmp_path / "other"])) == ["model", "other"]
    with pytest.raises(ArgumentError, match="two models are called 'one/model'"):
        named_models([folders[0], folders[0], folders[1]])


def test_it_is_stored_whole(compared, tmp_path):
    again = ContributionComparison.load(compared.save(tmp_path / "compared.json"))
    assert again.to_dict() == compared.to_dict() and str(again) == str(compared)
    (tmp_path / "compared.json").write_text('{"version": 1}')
    for name in ("compared.json", "missing.json"):
        with pytest.raises(DataError, match=r"not a comparison of contributions|No such file"):
            ContributionComparison.load(tmp_path / name)


def test_what_is_refused(models, batches):
    for given, options, words in (
        ({}, {}, "there are no models"),
        (models["whole"], {}, r"models must be a dict \(a text -> .* or a list \(a text or a path\), not Mar"),
        ("folder", {}, "models must be a dict .* not 'folder'"),
        ([models["whole"]], {}, "models must be a dict"),
        (models, {"prefixes": ()}, "prefixes is empty"),
        (models, {"prefixes": ("own", "given")}, "unknown prefixes 'given'"),
    ):
        with pytest.raises(ArgumentError, match=words):
            compare_contributions(given, batches, **options)
    with pytest.raises(ArgumentError, match="can be read only once"):
        compare_contributions(models, iter(batches))
