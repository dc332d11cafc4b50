"""Scores from whole attention maps: the source's formulas on small maps, padding, real models, what is refused."""

import pytest
import torch
from heads_by_hand import LENGTHS, STEPS, ended, maps_by_hand, model_in, single, sites_with_heads
from model_inputs import cast
from model_sizes import EXACT64, HEADS
from scipy.stats import wasserstein_distance
from unchanged import assert_unchanged, refused, snapshot

from collab_heads import prune_heads
from collab_heads.analysis import head_statistics
from collab_heads.analysis.measures.head_scores import OF_MAPS, Maps, head_scores
from collab_heads.errors import ArgumentError, CalibrationError, NonFiniteError
from families import FAMILIES

MEASURES = tuple(OF_MAPS)


def theirs(weights: torch.Tensor, measure: str) -> torch.Tensor:
    """What Azov and Landau's code computes for a sentence, [H, T, S] -> [H]; "pairwise" over the other heads."""
    heads, rows, keys = weights.shape
    if measure == "wasserstein":
        uniform = [1 / keys] * (keys - 1) + [0.0]
        own = [[wasserstein_distance(head[row].tolist(), uniform) for row in range(rows - 1)] for head in weights]
        return torch.tensor(own, dtype=torch.float64).mean(1)
    maps = weights.clone()
    maps[:, -1, -1] = 0.0
    if measure == "base":
        return maps.max(-1)[0].max(-1)[0]
    flat = maps.reshape(heads, rows * keys)
    return torch.stack([sum((one - other).square().sum().sqrt() for other in flat) for one in flat]) / (heads - 1)


def scored(weights: torch.Tensor, measure: str) -> torch.Tensor:
    """Ours, of one sentence."""
    everything = [torch.ones(1, size, dtype=torch.bool) for size in weights.shape[1:]]
    values, counted = OF_MAPS[measure](Maps(weights[None], *everything))
    assert counted.tolist() == [True]
    return values[0].sum(-1) / (len(weights) - 1) if measure == "map_distance" else values[0]


def test_numbers_by_hand():
    """Two heads that see two keys from two queries: the corner is bottom right."""
    weights = torch.tensor([[[0.75, 0.25], [0.0, 1.0]], [[0.5, 0.5], [0.6, 0.4]]], dtype=torch.float64)
    expected = {
        "base": [0.75, 0.6],
        "map_distance": [(2 * 0.25**2 + 0.6**2) ** 0.5] * 2,
        "wasserstein": [(0.25 + 0.25) / 2, (0.5 + 0.0) / 2],  # sorted beside 0 and 1/2
    }
    for measure, values in expected.items():
        assert scored(weights, measure).tolist() == pytest.approx(values, abs=EXACT64)
        assert theirs(weights, measure).tolist() == pytest.approx(values, abs=EXACT64)


@pytest.mark.parametrize("shape", ((2, 3, 4), (3, 5, 2), (4, 2, 7), (2, 4, 1)))
@pytest.mark.parametrize("measure", MEASURES)
def test_a_sentence_scores_as_in_the_source(measure, shape):
    generator = torch.Generator().manual_seed(sum(shape))
    weights = (4 * torch.randn(shape, generator=generator, dtype=torch.float64)).softmax(-1)
    if shape[1] == shape[2]:
        weights = weights.tril() / weights.tril().sum(-1, keepdim=True)
    torch.testing.assert_close(scored(weights, measure), theirs(weights, measure), rtol=0, atol=EXACT64)


def test_wasserstein_from_its_least_to_its_most():
    """All keys alike but the last: 0. One key of S: nearly 2 / S."""
    size = 8
    alike = torch.tensor([[1 / (size - 1)] * (size - 1) + [0.0]] * 3, dtype=torch.float64)
    one = torch.eye(size, dtype=torch.float64)[:3]
    found = scored(torch.stack([alike, one, one.roll(2, -1)]), "wasserstein")
    assert found[0] < found[1] == found[2] <= 2 / size
    assert found.tolist() == pytest.approx(
        [(1 / 7 - 1 / 8) * 7 / 8, (7 / 8 + 6 / 8) / 8, (7 / 8 + 6 / 8) / 8], abs=EXACT64
    )


@pytest.mark.parametrize(
    "name, change", (("bert", "stock"), ("marian", "stock"), ("t5", "pruned"), ("albert", "mixed"))
)
@pytest.mark.parametrize("measure", MEASURES)
def test_real_maps_sentence_by_sentence(measure, name, change):
    """Padded batches of unequal size: the mean over sentences without their padding, layers that share a module too."""
    model, inputs = model_in(name, change), ended(name)[0]
    before = snapshot(model)
    parts = [{key: value[part] for key, value in inputs.items()} for part in (slice(0, 2), slice(2, 3))]
    found = head_scores(model, [cast(each, model.dtype) for each in parts], [measure])[measure]
    assert_unchanged(model, before)
    assert found.keys() == {site.path for site in sites_with_heads(model)}
    expected = {path: [] for path in found}
    for row in range(3):
        alone = single(inputs, row, LENGTHS[row], tokens_of(inputs, row))
        for path, layers in maps_by_hand(model, alone).items():
            expected[path] += [theirs(layer[0], measure) for layer in layers if layer.shape[1] > 1]
    for path, scores in expected.items():
        torch.testing.assert_close(found[path], torch.stack(scores).mean(0).double(), rtol=0, atol=EXACT64)
        assert bool(found[path].isfinite().all()) and float(found[path].min()) > 0


def tokens_of(inputs, row: int) -> int:
    """Decoder tokens of a sentence, the end of it included."""
    return min(STEPS[row] + 1, inputs["decoder_input_ids"].shape[1]) if "decoder_input_ids" in inputs else 0


def test_labels_say_where_a_decoder_is_padded():
    """Positions without a label are not queries and no keys, as the decoder has no mask of its own."""
    model = model_in("marian")
    inputs = cast({name: FAMILIES["marian"].inputs()[name] for name in ("input_ids", "attention_mask")}, model.dtype)
    labels = torch.arange(5, 17).view(3, 4)
    padded = torch.cat([labels, torch.full((3, 3), -100)], 1)
    for measure in MEASURES:
        found, alone = (head_scores(model, [{**inputs, "labels": one}], [measure])[measure] for one in (padded, labels))
        for path, scores in alone.items():
            torch.testing.assert_close(found[path], scores, rtol=0, atol=EXACT64)


def test_base_says_nothing_about_causal_heads():
    """The first query sees one key: the largest weight of the map is 1, of every head, as the docs warn."""
    model, inputs = model_in("marian"), ended("marian")[0]
    found = head_scores(model, [cast(inputs, model.dtype)], ["base"])["base"]
    for site in sites_with_heads(model):
        assert (len(set(found[site.path].tolist())) == 1) == (site.role == "dec-self")


def test_distance_of_maps_is_not_that_of_outputs():
    """They rank heads differently; a lone head is at no distance."""
    model, inputs = model_in("bert"), ended("bert")[0]
    maps = head_scores(model, [cast(inputs, model.dtype)], ["map_distance"])["map_distance"]
    outputs = head_statistics(model, [cast(inputs, model.dtype)], measures="l2", exclude=())
    orders = [
        torch.cat([scores[s.path] for s in outputs.sites]).argsort().tolist() for scores in (maps, distances(outputs))
    ]
    assert orders[0] != orders[1]
    prune_heads(model, heads={"enc-self": [[0, 1, 2], []]})
    maps = head_scores(model, [cast(inputs, model.dtype)], ["map_distance"])["map_distance"]
    assert [len(scores) for scores in maps.values()] == [1, HEADS] and maps[outputs.sites[0].path].tolist() == [0.0]


def distances(statistics) -> dict[str, torch.Tensor]:
    return {site.path: statistics.distance(site.path) for site in statistics.sites}


def test_refused():
    model, inputs = model_in("bert"), ended("bert")[0]
    path = sites_with_heads(model)[0].path
    with refused(model, ArgumentError, "unknown metric 'bass'", "did you mean 'base'"):
        head_scores(model, [inputs], ["bass"])
    with refused(model, CalibrationError, "empty"):
        head_scores(model, [], ["base"])
    single_token = {"input_ids": torch.tensor([[5]])}
    with refused(model, CalibrationError, path, "'wasserstein'", "a single token"):
        head_scores(model, [single_token], ["wasserstein"])
    assert head_scores(model, [single_token], ["base"])["base"][path].tolist() == [0.0] * HEADS
    with refused(model, CalibrationError, path, "(9, 9)", "(1, 9)"):
        masks = {"input_ids": inputs["input_ids"][:1], "attention_mask": torch.ones(1, 1, 9, 9).long()}
        head_scores(model, [masks], ["base"])
    model.base_model.get_submodule(path).query.weight.data[0] = float("nan")
    with refused(model, NonFiniteError, path, "the base of its heads"):
        head_scores(model, [cast(inputs, model.dtype)], ["base"])
