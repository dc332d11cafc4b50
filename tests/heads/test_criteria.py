"""Criteria: what they need is asked for, and their arguments are checked, before anything is measured."""

import pytest
import torch
from compressing import batches_of
from model_runs import output
from model_sizes import FP32_NOISE, HEADS
from opening import layers_of

from collab_heads import get_adapter, prune_heads, swap_to_gated
from collab_heads.analysis import head_importance
from collab_heads.errors import ArgumentError
from collab_heads.heads.criteria import Random, Reconstruction
from collab_heads.layers.layout import weight_of
from families import FAMILIES


def test_random_scores_need_no_batches():
    model = FAMILIES["bert"].build()
    scores = head_importance(model, criterion=Random(seed=1))
    again = head_importance(model, criterion=Random(seed=1))
    other = head_importance(model, criterion="random")
    assert scores.keys() == {site.path for site in get_adapter(model).sites(model)}
    assert all(torch.equal(scores[path], again[path]) for path in scores)
    assert not any(torch.equal(scores[path], other[path]) for path in scores)


@pytest.mark.parametrize("criterion", ("gradient", "reconstruction"))
@pytest.mark.parametrize("call", (head_importance, lambda *args, **more: prune_heads(*args, keep=3, **more)))
def test_others_need_them(criterion, call):
    with pytest.raises(ArgumentError, match=f"criterion '{criterion}' ranks heads by what they do: pass batches"):
        call(FAMILIES["bert"].build(), criterion=criterion)


@pytest.mark.parametrize("name", ("bert", "gpt2", "llama"))
def test_a_layer_that_writes_little_loses_its_heads_first(name):
    """Each of its heads writes as large a share of its output, and as small a one of the stream."""
    model = FAMILIES[name].build().eval()
    batches, (first, second) = batches_of(FAMILIES[name], 4), layers_of(model).with_heads
    with torch.no_grad():
        weight_of(first.output).mul_(0.01)
    of_stream = head_importance(model, batches, criterion="reconstruction")
    of_layer = head_importance(model, batches, criterion=Reconstruction(normalize=True))
    assert of_stream[first.path].max() < of_stream[second.path].min()
    assert of_stream[first.path].max() < 0.2 * of_stream[second.path].max()
    assert of_layer[first.path].max() == of_layer[second.path].max() == 1
    for site in (first, second):  # within a layer both rank alike
        torch.testing.assert_close(of_stream[site.path] / of_stream[site.path].max(), of_layer[site.path])


def test_the_only_layer_has_a_stream_too():
    """Its heads cost the same share of the stream, whether other sites are measured or not."""
    model, batches = FAMILIES["bert"].build().eval(), batches_of(FAMILIES["bert"], 4)
    sites = layers_of(model).with_heads
    together = Reconstruction().scores(model, sites, batches)
    criterion = Reconstruction()
    alone = criterion.scores(model, sites[:1], batches)
    torch.testing.assert_close(alone[sites[0].path], together[sites[0].path])
    assert criterion.are_of_stream and float(alone[sites[0].path].max()) < 0.5


def test_heads_that_write_nothing_cost_nothing():
    """Also where costs are shares of the site's own output."""
    model, batches = FAMILIES["albert-groups"].build().eval(), batches_of(FAMILIES["albert-groups"], 4)
    closed, *others = (site.path for site in layers_of(model).with_heads)
    swap_to_gated(model, alive_heads={closed: [0] * HEADS, **{path: [1] * HEADS for path in others}})
    scores = head_importance(model, batches, criterion="reconstruction")
    assert scores[closed].tolist() == [0.0] * HEADS and all(float(scores[path].max()) == 1 for path in others)
    expected = output(model, batches[0])
    prune_heads(model, batches, keep=HEADS * len(others))
    assert [site.path for site in layers_of(model).with_heads] == others
    torch.testing.assert_close(output(model, batches[0]), expected, rtol=0, atol=FP32_NOISE)


def test_layers_that_share_a_module_are_ranked_by_their_own_output():
    family = FAMILIES["albert-groups"]
    model, batches = family.build().eval(), batches_of(family, 4)
    scores = head_importance(model, batches, criterion="reconstruction")
    assert len(scores) > 1 and all(float(each.max()) == 1 for each in scores.values())


@pytest.mark.parametrize("normalize", ("yes", 1, None))
def test_a_normalization_that_cannot_be(normalize):
    with pytest.raises(ArgumentError, match="normalize must be True or False"):
        Reconstruction(normalize=normalize)


@pytest.mark.parametrize("seed", ("a", -1, 1.5, None, True))
def test_a_seed_that_cannot_be(seed):
    with pytest.raises(ArgumentError, match="seed must be a whole number"):
        Random(seed=seed)
