"""Weights that lie on grids of few bits are trained there."""

import copy

import pytest
import torch
from compressing import batches_of
from crashing import Died
from opening import layers_of
from torch import nn
from transformers.pytorch_utils import Conv1D
from unchanged import refused

from collab_heads import compress, distill
from collab_heads.distillation.distill import Distillation
from collab_heads.distillation.grids import TrainedGrid, trained_grids
from collab_heads.distillation.optimizer import SCALE_RATE, MasterWeights, trained_parameters
from collab_heads.distillation.processes import Processes
from collab_heads.errors import ArgumentError
from collab_heads.fitting.weight_grid import nearest_on_grid
from collab_heads.layers.weight_grid import BLOCK, WEIGHT_BITS, GridWeights, codes_of, on_grid
from families import FAMILIES

ALONE = Processes(1, 0, torch.device("cpu"), "no")
EXACT = 1e-5  # of float32 sums over 32 numbers


def compressed(name="bert", **options):
    """A model on grids, and its original."""
    model = FAMILIES[name].build().eval()
    original = copy.deepcopy(model)
    compress(model, batches_of(FAMILIES[name], 8), 0.15, **{"bits": (8, 4, 3), "refine_steps": 0, **options})
    return model, original


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "gpt2", "marian"])
def test_a_model_comes_nearer_to_its_original_on_its_grids(name, tmp_path):
    model, original = compressed(name)
    before = {each: (grid.bits, grid.codes) for each, _, grid in on_grid(model)}
    report = distill(model, original, batches_of(FAMILIES[name], 16), steps=100, learning_rate=0.005)
    assert report.after.total(1.0) < 0.95 * report.before.total(1.0)
    after = {each: (grid.bits, grid.codes) for each, _, grid in on_grid(model) if grid is not None}
    assert {each: bits for each, (bits, _) in after.items()} == {each: bits for each, (bits, _) in before.items()}
    assert any(not torch.equal(codes, before[each][1]) for each, (_, codes) in after.items())
    model.save_pretrained(tmp_path)
    weights = type(model).from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(weights[each], tensor) for each, tensor in model.state_dict().items())


def test_weights_on_grids_and_their_biases_are_trained_and_nothing_else():
    model, original = compressed(parts=())
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    report = distill(model, original, batches_of(FAMILIES["bert"], 16), steps=60, learning_rate=0.003)
    assert report.best_step
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    grids = {name for name, _, _ in on_grid(model)}
    assert "bert.embeddings.word_embeddings" in grids
    assert {name.rpartition(".")[0] for name in moved} <= grids
    assert {name for name in before if name.endswith("dense.bias") and name.rpartition(".")[0] in grids} & moved


@pytest.mark.slow
def test_the_same_is_trained_once_a_model_was_saved_and_loaded(tmp_path):
    model, _ = compressed()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    (names, grids), (others, found) = (
        (trained := trained_parameters(layers_of(each)), trained_grids(each, trained)) for each in (model, loaded)
    )
    assert list(names) == list(others) and grids and found.keys() == grids.keys()
    for name, grid in grids.items():
        assert torch.equal(found[name].codes, grid.codes) and torch.equal(found[name].scales, grid.scales)
        assert found[name].bits == grid.bits and torch.equal(found[name].shown(), names[name])


def straight_through(codes, scales, bits):
    """Rounded weights as autograd is to see them: of a code inside the range, rounding has the gradient 1."""
    least, most = codes_of(bits)[0], codes_of(bits)[-1]
    is_within = (codes >= least - 0.5) & (codes <= most + 0.5)
    straight = codes + (codes.round() - codes).detach()
    rounded = torch.where(is_within, straight, codes.detach().round()).clamp(least, most)
    size = BLOCK if scales.shape[1] > 1 else codes.shape[1]  # inputs of a scale
    return rounded * scales.repeat_interleave(size, dim=1)[:, : codes.shape[1]]


@pytest.mark.parametrize("bits", [8, 4, 3])
@pytest.mark.parametrize("stored", [False, True], ids=["linear", "conv1d"])
def test_gradients_are_those_of_a_straight_line_through_the_rounding(bits, stored):
    torch.manual_seed(0)
    grid = nearest_on_grid(torch.randn(5, 40), bits)
    codes = (1.3 * grid.codes + torch.rand(5, 40)).requires_grad_()  # some beyond the last one
    scales = grid.scales.float().requires_grad_()
    factors = torch.randn(5, 40)
    shown = straight_through(codes, scales, bits)
    (shown * factors).sum().backward()
    trained = TrainedGrid(codes.detach(), scales.detach(), bits, stored)
    trained.take(factors.mT if stored else factors)
    assert not (codes.grad != 0).all() and torch.equal(trained.codes.grad != 0, codes.grad != 0)
    torch.testing.assert_close(trained.codes.grad, codes.grad, atol=EXACT, rtol=EXACT)
    torch.testing.assert_close(trained.scales.grad, scales.grad, atol=EXACT * 2**bits, rtol=EXACT)
    assert torch.equal(trained.shown(), shown.mT if stored else shown)


def test_a_weight_that_does_not_move_stays_as_it_is():
    """Zero rows, negative scales, codes at both ends."""
    codes = torch.tensor([[0] * 40, [-4] * 40, [3] * 40, list(range(-4, 4)) * 5], dtype=torch.int8)
    scales = torch.tensor([[0.0, 0.0], [0.5, -0.5], [-0.25, 2**-20], [1.0, 0.1]]).half()
    weight = GridWeights(codes, scales, 3).weight()
    module = Conv1D(4, 40)
    module.weight = nn.Parameter(weight.mT.contiguous())
    setattr(module, WEIGHT_BITS, 3)
    found = trained_grids(nn.ModuleList([module]), {"w": module.weight})
    assert torch.equal(found["w"].shown(), module.weight)
    found["w"].take(torch.randn(40, 4))
    assert all(torch.isfinite(each.grad).all() for each in (found["w"].codes, found["w"].scales))


def test_scales_move_by_a_share_of_their_size_whatever_their_bits():
    sizes = {}
    for bits in (8, 3):
        torch.manual_seed(0)
        parameter = nn.Parameter((grid := nearest_on_grid(torch.randn(4, 32), bits)).weight())
        trained = TrainedGrid(grid.codes.float(), grid.scales.float(), bits, False)
        weights = MasterWeights({"w": parameter}, learning_rate=0.01, steps=1, grids={"w": trained})
        before, size = trained.scales.clone(), trained.scales.square().mean().sqrt()
        parameter.grad = torch.randn(4, 32)
        weights.take_step(0, ALONE)
        sizes[bits] = float((trained.scales - before).abs().mean() / size)
    assert sizes == pytest.approx(dict.fromkeys((8, 3), 0.01 * SCALE_RATE), rel=1e-3)


@pytest.mark.slow
def test_a_killed_run_goes_on(tmp_path, monkeypatch):
    def run(folder):
        model, original = compressed()
        options = {"steps": 6, "evaluate_every": 2, "checkpoint_every": 2, "learning_rate": 0.02}
        distill(model, original, batches_of(FAMILIES["bert"], 10), output_dir=folder, **options)
        return model.state_dict()

    expected, stock = run(None), Distillation.take_step

    def dying(self, progress):
        if progress.step == 5:
            raise Died
        stock(self, progress)

    monkeypatch.setattr(Distillation, "take_step", dying)
    with pytest.raises(Died):
        run(tmp_path)
    monkeypatch.setattr(Distillation, "take_step", stock)
    found = run(tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.slow
def test_in_half_precision_a_model_on_grids_is_refused():
    model, original = compressed()
    model, original = model.bfloat16(), original.bfloat16()
    with refused(model, ArgumentError, "weight has few bits", "is in torch.bfloat16: load the model in float32"):
        distill(model, original, batches_of(FAMILIES["bert"], 8), steps=2)


@pytest.mark.slow
def test_what_is_frozen_stays_on_its_grid_as_it_is():
    model, original = compressed(parts=())
    table = model.bert.embeddings.word_embeddings.weight
    before = table.detach().clone()
    table.requires_grad_(False)
    report = distill(model, original, batches_of(FAMILIES["bert"], 16), steps=60, learning_rate=0.003)
    assert report.best_step and torch.equal(table, before)
