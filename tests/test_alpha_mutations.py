"""Broken versions of alpha mixing that its contract must catch: each is put in place and seen to fail."""

import pytest
import test_alpha_contract as contract
import torch
import torch.nn.functional as F
from model_runs import sites
from test_head_contract import assert_folded_equals, assert_pruned_equals_gated

from collab_heads.layers import alphas, output
from collab_heads.model import apply_state
from collab_heads.saving import initialize
from families import FAMILIES, LAYOUTS

SOME = ("bert", "albert-groups", "marian-decoder", "t5")  # the output projection is the same class in every layout


def mixed_weight(weight, alpha):
    return torch.einsum("oid,ij->ojd", weight.unflatten(-1, (len(alpha), -1)), alpha).flatten(-2)


def transposed_alpha(monkeypatch):
    stock = alphas.HeadAlphas.combined
    monkeypatch.setattr(alphas.HeadAlphas, "combined", lambda self, matrix, each: stock(self, matrix.mT, each))


def alphas_before_gates(monkeypatch):
    def forward(self, concatenated):
        gates = self.gates().to(self.weight.dtype).repeat_interleave(self.in_features // self.gates.num_heads)
        return F.linear(concatenated, self.mixing(self.weight * gates), self.bias)

    monkeypatch.setattr(output.HeadOutputProjection, "forward", forward)


def alphas_ignored(monkeypatch):
    monkeypatch.setattr(alphas.HeadAlphas, "combined", lambda self, matrix, each: each)


def rows_and_columns_dropped(monkeypatch):
    """Removal takes heads out of alpha as it takes them out of everything else, and does not fold it first."""
    stock = output.keep_output_heads

    def keep_output_heads(projection, kept, num_heads):
        alpha = projection.mixing.alpha.data[kept][:, kept]
        stock(projection, kept, num_heads)
        if found := output.alphas_of(projection):
            found.alpha.data.copy_(alpha)

    monkeypatch.setattr(output, "fold_alphas", lambda projection: None)
    monkeypatch.setattr(apply_state, "keep_output_heads", keep_output_heads)


def alphas_dropped(monkeypatch):
    """Removal starts alphas again without folding them."""
    monkeypatch.setattr(output, "fold_alphas", lambda projection: None)


def alphas_folded_twice(monkeypatch):
    """They go into W_O with the gates, are left as they were, and go into W_O again."""
    stock = alphas.HeadAlphas.reset
    monkeypatch.setattr(alphas.HeadAlphas, "reset", lambda self, *size: stock(self, *size) if size else None)


def alphas_forgotten_in_folding(monkeypatch):
    def folded_weight(self):
        if self.gates is None:
            return self.weight.detach()
        return self.weight.detach() * self.gates.values().repeat_interleave(self.in_features // self.gates.num_heads)

    monkeypatch.setattr(output.HeadOutputProjection, "folded_weight", folded_weight)


def folded_the_wrong_way_round(monkeypatch):
    """Gates on the new heads."""

    def folded_weight(self):
        gates = 1.0 if self.gates is None else self.gates.values()
        weight = self.weight.detach().unflatten(-1, (self.mixing.num_heads, -1))
        return self.mixing((weight * torch.as_tensor(gates).view(-1, 1)).flatten(-2).to(weight.dtype)).detach()

    monkeypatch.setattr(output.HeadOutputProjection, "folded_weight", folded_weight)


def pruned(family):
    assert_pruned_equals_gated(family, None, empty=False, alphas=True)


def folded(family):
    assert_folded_equals(family, "gated", empty=False, alphas=True)


MUTATIONS = (  # and the check that catches it, site by site
    (transposed_alpha, contract.assert_mixed_equals_by_hand),
    (alphas_before_gates, contract.assert_mixed_equals_by_hand),
    (alphas_ignored, contract.assert_mixed_equals_by_hand),
    (rows_and_columns_dropped, contract.assert_removed_equals_closed),
    (alphas_dropped, contract.assert_removed_equals_closed),
    (alphas_folded_twice, pruned),
    (alphas_forgotten_in_folding, pruned),
    (alphas_forgotten_in_folding, folded),
    (folded_the_wrong_way_round, folded),
)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("mutation, check", MUTATIONS)
def test_the_contract_catches(mutation, check, name, monkeypatch):
    mutation(monkeypatch)
    with pytest.raises(AssertionError) as caught:
        check(FAMILIES[name])
    assert str(caught.value) in sites(FAMILIES[name].build())  # what it names, so that nothing else has failed


@pytest.fixture
def nan_where_nothing_is_written():
    """Memory that is taken and not set may hold what was freed there: an identity, too."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", SOME)
def test_missing_alphas_that_nobody_sets_are_caught(
    name, monkeypatch, tmp_path, warnings_logged, nan_where_nothing_is_written
):
    contract.test_missing_alphas_are_an_identity(FAMILIES[name], tmp_path, warnings_logged)
    monkeypatch.setattr(initialize, "initialize_part", lambda part: None)
    with pytest.raises(AssertionError, match="nan"):
        contract.test_missing_alphas_are_an_identity(FAMILIES[name], tmp_path, warnings_logged)


@pytest.mark.slow
def test_alphas_rounded_by_autocast_are_caught(monkeypatch):
    monkeypatch.setattr(alphas.HeadAlphas, "forward", lambda self, weight: mixed_weight(weight, self.alpha))
    for name in LAYOUTS:
        with pytest.raises(AssertionError, match="equal"):
            contract.assert_autocast_keeps_alphas(name)


@pytest.mark.parametrize("name", SOME)
def test_alphas_that_cannot_learn_are_caught(name, monkeypatch):
    stock = alphas.HeadAlphas.combined
    monkeypatch.setattr(alphas.HeadAlphas, "combined", lambda self, matrix, each: stock(self, matrix.detach(), each))
    with pytest.raises(AssertionError, match=r"grad"):
        contract.test_gradients(FAMILIES[name])
