"""Maps of contributions: cells are the numbers that they were given; what is refused."""

import pytest
import torch

from collab_heads import plots
from collab_heads.analysis.relevance.sentence_contributions import TokenRelevance
from collab_heads.errors import ArgumentError, ShapeError

pytest.importorskip("matplotlib")


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
