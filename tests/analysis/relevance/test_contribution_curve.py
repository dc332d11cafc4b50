"""Pictures of contributions: lines and bands are the numbers that they were given; what is refused."""

import pytest
import torch

from collab_heads.analysis import ContributionComparison, TokenContributions
from collab_heads.analysis.relevance.sentence_contributions import of_sentence
from collab_heads.errors import ArgumentError

matplotlib = pytest.importorskip("matplotlib")
pytest.importorskip("matplotlib.backends.backend_agg")
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
    first, second = made(1), made(2)
    figure = ContributionComparison((("one", first), ("two", second))).plot(parts)
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


def test_a_legend_of_long_names_stays_on_the_picture():
    runs = [
        (f"a model of the {number}th training", made(number, kind)) for number in (1, 2) for kind in ("own", "random")
    ]
    figure = ContributionComparison(tuple(runs)).plot()
    matplotlib.backends.backend_agg.FigureCanvasAgg(figure).draw()
    box, width = figure.legends[0].get_window_extent(), figure.bbox.width
    assert 0 <= box.x0 and box.x1 <= width


def test_one_model_needs_no_legend_and_prompts_are_called_so():
    figure = made(1, names=("prompt", "continuation")).plot()
    assert not figure.legends and figure.axes[3].get_xlabel() == "position of the prompt token"
    assert figure.axes[2].get_title() == "entropy of the continuation, nats"


def test_a_history_has_a_point_per_checkpoint():
    runs = [(f"step_{step}", made(step, kind)) for step in (10, 40) for kind in ("reference", "own")]
    compared = ContributionComparison(tuple(runs), {"step_10": 0.25, "step_40": 0.0})
    figure = compared.plot_history()
    for axes, measure in zip(figure.axes[:3], MEASURES[:3], strict=True):
        for index, kind in enumerate(("reference", "own")):
            bars = axes.containers[index]
            assert list(bars[0].get_xdata()) == [10, 40]
            assert list(bars[0].get_ydata()) == [mean for mean, _ in compared.over_models(measure, kind)]
        assert axes.get_xlabel() == "step"
    assert line(figure.axes[3]) == ([10, 40], [0.25, 0.0])
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["reference", "own"]
    named = ContributionComparison((("a", made(1)), ("b", made(2))))
    axes = named.plot_history().axes[0]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["a", "b"] and axes.get_xlabel() == ""
    with pytest.raises(ArgumentError, match="two checkpoints or more; this compares 1"):
        ContributionComparison((("a", made(1)),)).plot_history()
