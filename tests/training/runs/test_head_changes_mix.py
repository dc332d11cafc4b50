"""What the flags of alphas and disagreement do to a model, and what is refused before training."""

import pytest
from changed_heads import adapter_sites
from model_sizes import HEADS
from opening import alphas_in
from unchanged import assert_unchanged, snapshot

from collab_heads import CollabHeadsError, prune_heads, swap_to_alpha
from collab_heads.errors import ArgumentError
from collab_heads.training import HeadPenalty
from collab_heads.training.runs import head_changes
from families import FAMILIES


@pytest.mark.parametrize(
    "flags, message",
    (
        ("--alpha_mixing --alpha_sites dec-self", "the model has no dec-self attention"),
        ("--alpha_mixing --alpha_growth_weight dec-enc=1", "unknown role in --alpha_growth_weight 'dec-enc'"),
        ("--disagreement_weight dec-enc=1", "unknown role in --disagreement_weight 'dec-enc'"),
    ),
)
def test_models_that_do_not_fit(parse, flags, message):
    model = FAMILIES["bert"].build()
    before = snapshot(model)
    with pytest.raises(CollabHeadsError, match=message):
        head_changes.check_mixable(parse(flags), model)
    assert_unchanged(model, before)


def test_a_single_head_is_refused_before_training(parse):
    model = FAMILIES["bert"].build()
    path = adapter_sites(model)[1].path
    prune_heads(model, heads={path: [0, 1, 3]})
    with pytest.raises(ArgumentError, match=f"{path}: a single head cannot be mixed"):
        head_changes.check_mixable(parse("--alpha_mixing"), model)
    head_changes.check_mixable(parse(f"--alpha_mixing --alpha_sites {adapter_sites(model)[0].path}"), model)


def test_alphas_of_a_mixed_model(parse):
    model = FAMILIES["bert"].build()
    swap_to_alpha(model)
    with pytest.raises(ArgumentError, match="some has alphas already: fold_heads them first"):
        head_changes.check_mixable(parse("--alpha_mixing"), model)
    head_changes.check_mixable(parse(""), model)


def mixed(model) -> list[tuple[str, int]]:
    return [(site.role, mixing.num_heads) for site, mixing in alphas_in(model)]


def test_start_mixes_what_can_be_mixed(parse):
    """Heads may have been removed in the meantime: sites of one head, or none, are left alone."""
    model = FAMILIES["marian"].build()
    head_changes.put_alphas(parse("--alpha_mixing --alpha_sites dec-enc dec-self"), model)
    assert mixed(model) == [("dec-self", HEADS), ("dec-enc", HEADS)] * 2
    model = FAMILIES["marian"].build()
    prune_heads(model, heads={"enc-self": [[0, 1, 2], [0]], "dec-self": [[0, 1, 2, 3]] * 2})
    head_changes.put_alphas(parse("--alpha_mixing"), model)
    assert mixed(model) == [("enc-self", HEADS - 1), ("dec-enc", HEADS), ("dec-enc", HEADS)]
    args = parse("--alpha_mixing --alpha_growth_weight enc-self=2,dec-self=3 --alpha_start 0.25")
    options = head_changes.alpha_options(args, model, 10)
    assert options == {"disagreement": None, "growth": {"enc-self": 2.0}, "alpha_start": 3}
    penalty = HeadPenalty(model, **options)
    assert penalty.parts["alphas"].growth == {"enc-self": 2.0, "dec-enc": 0.0}


def test_nothing_left_to_mix(parse):
    model = FAMILIES["bert"].build()
    prune_heads(model, heads={"enc-self": [[0, 1, 2], [0, 1, 2]]})
    assert head_changes.put_alphas(parse("--alpha_mixing"), model) is None
    assert head_changes.alpha_options(parse("--alpha_mixing --disagreement_weight 2"), model, 5) == {
        "disagreement": 2.0
    }


def test_penalty_options(parse):
    model = FAMILIES["bert"].build()
    head_changes.put_alphas(parse("--alpha_mixing"), model)
    args = parse("--alpha_mixing --alpha_growth_weight 40 --alpha_growth_radius 1e-3 --alpha_start 0.31")
    options = {"disagreement": None, "growth": 40.0, "growth_radius": 1e-3, "alpha_start": 31}
    assert head_changes.alpha_options(args, model, 100) == options
    assert head_changes.alpha_options(parse("--alpha_mixing"), model, 100)["growth"] == 0.0
    args = parse("--alpha_mixing --alpha_growth_weight 40 --alpha_growth_beside sum")
    options = {"disagreement": None, "growth": 40.0, "growth_beside": "sum", "alpha_start": 0}
    assert head_changes.alpha_options(args, model, 100) == options
    assert HeadPenalty(model, **options).parts["alphas"].beside == "sum"
