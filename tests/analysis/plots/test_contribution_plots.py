"""Pictures of contributions: lines, bands and cells are the numbers that they were given; what is refused."""

import pytest
import torch

from collab_heads import ContributionComparison, TokenContributions
from collab_heads.analysis import plots
from collab_heads.analysis.relevance.sentence_contributions import TokenRelevance, of_sentence
from collab_heads.errors import ArgumentError, ShapeError

pytest.importorskip("matplotlib")
MEASURES = ("source", "source_entropy", "target_entropy", "influence")


def made(seed: int, prefixes: str = "reference", names=("source", "target prefix")) -> TokenContributions:
    """Sentences of two to four tokens, from three source tokens."""
    generator, sentences = torch.Generator().manual_seed(seed), []
    for length in (2, 3, 4):
        relevance = torch.randn(length, 3 + length, generator=generator, dtype=torch.float64)
        sentences.append(of_sentence(relevance, torch.arange(3 + length) < 3))
    return TokenContributions(tuple(sentences), (), names, prefixes)


def line(axes, index: int = 0) -> tuple[list[float], list[float]]:
    drawn = axes.lines[index]
    return list(drawn.get_xdata()), list(drawn.get_ydata())


@pytest.mark.parametrize("parts", (None, 2))
def test_curves_are_means_by_position_with_their_intervals(parts):
    first, second = made(1), made(2, "own")
    figure = plots.contribution_curves({"one": first, "two": second}, parts=parts)
    assert [axes.get_title() for axes in figure.axes] == [
        "share of the source",
        "entropy of the source, nats",
        "entropy of the target prefix, nats",
        "influence of source tokens (mean 1)",
    ]
    for axes, measure in zip(figure.axes, MEASURES, strict=True):
        for index, each in enumerate((first, second)):
            curve = each.curve(measure, parts)
            at = curve.at if parts else curve.at + 1
            assert line(axes, index) == (at.tolist(), curve.mean.tolist())
            band = axes.collections[index].get_paths()[0].vertices
            low, high = (end[~end.isnan()] for end in curve.interval())
            assert (band[:, 1].min(), band[:, 1].max()) == pytest.approx((float(low.min()), float(high.max())))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["one", "two"]
    words = figure.axes[0].get_xlabel()
    assert words.startswith("position of the generated token") and ("from the first (0)" in words) == (parts == 2)


def test_one_model_needs_no_legend_and_prompts_are_called_so():
    figure = plots.contribution_curves(made(1, names=("prompt", "continuation")))
    assert not figure.legends and figure.axes[3].get_xlabel() == "position of the prompt token"
    assert figure.axes[2].get_title() == "entropy of the continuation, nats"
    with pytest.raises(ArgumentError, match="no contributions to show"):
        plots.contribution_curves({})


def test_a_history_has_a_point_per_checkpoint():
    runs = [(f"step_{step}", made(step, kind)) for step in (10, 40) for kind in ("reference", "own")]
    compared = ContributionComparison(tuple(runs), {"step_10": 0.25, "step_40": 0.0})
    figure = plots.contribution_history(compared)
    for axes, measure in zip(figure.axes[:3], MEASURES[:3], strict=True):
        for index, kind in enumerate(("reference", "own")):
            bars = axes.containers[index]
            assert list(bars[0].get_xdata()) == [10, 40]
            assert list(bars[0].get_ydata()) == [mean for mean, _ in compared.over_models(measure, kind)]
        assert axes.get_xlabel() == "step"
    assert line(figure.axes[3]) == ([10, 40], [0.25, 0.0])
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["reference", "own"]
    named = ContributionComparison((("a", made(1)), ("b", made(2))))
    assert plots.contribution_history(named).axes[0].get_xlabel() == "checkpoint"
    with pytest.raises(ArgumentError, match="two checkpoints or more; this compares 1"):
        plots.contribution_history(ContributionComparison((("a", made(1)),)))


def test_a_map_has_a_cell_per_pair_of_tokens():
    relevance = TokenRelevance(torch.tensor([[1.0, -1], [2, 0]]), torch.tensor([[2.0, 0, 0], [1, 1, 0]]))
    source, target = relevance.contributions()
    figure = plots.contribution_map(source, target, ["a", "b"], ["<s>", "x", "y"], ["x", "y"], title="one")
    left, right = figure.axes[:2]
    assert left.collections[0].get_array().tolist() == [[0.25, 0.25], [0.5, 0]]
    assert right.collections[0].get_array().tolist() == [[0.5, 0, 0], [0.25, 0.25, 0]]
    assert [each.get_text() for each in left.get_yticklabels()] == ["x", "y"]
    assert [each.get_text() for each in right.get_xticklabels()] == ["<s>", "x", "y"]
    assert left.collections[0].get_clim() == right.collections[0].get_clim() == (0, 0.5)


def test_a_long_sentence_is_cut_and_the_title_says_so():
    figure = plots.contribution_map(torch.ones(250, 201), torch.ones(250, 250), ["a"] * 201, ["b"] * 250, ["c"] * 250)
    assert figure.axes[0].images[0].get_array().shape == (200, 200)
    assert figure.get_suptitle().replace("\n", " ") == "the first 200 of 250 tokens \u2013 the first 200 of 201 tokens"
    whole = plots.contribution_map(torch.ones(50, 41), torch.ones(50, 50), ["a"] * 41, ["b"] * 50, ["c"] * 50)
    assert whole.axes[0].images[0].get_array().shape == (50, 41) and not whole.get_suptitle()
    assert len(whole.axes[0].get_yticklabels()) == 50


def test_what_does_not_fit_is_refused():
    with pytest.raises(ShapeError, match=r"contributions \(2, 2\) and \(2, 1\) for \(2, 3, 1\) tokens"):
        plots.contribution_map(torch.ones(2, 2), torch.ones(2, 1), ["a"] * 3, ["b"], ["c"] * 2)
    with pytest.raises(ArgumentError, match="nothing to show"):
        plots.contribution_map(torch.ones(0, 2), torch.ones(0, 1), ["a"] * 2, ["b"], [])
