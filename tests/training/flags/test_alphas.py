"""Alphas, disagreement and folding as the flags describe them."""

import json

import pytest
from closing import adapter_sites
from unchanged import assert_unchanged, snapshot

from collab_heads import HeadPenalty, prune_heads, swap_to_alpha
from collab_heads.errors import ArgumentError, CollabHeadsError
from collab_heads.heads.alpha import mixed_sites
from collab_heads.registry import get_adapter
from collab_heads.training.flags import alphas, arguments, pruning
from families import FAMILIES, HEADS


@pytest.fixture
def parse():
    def parse(flags: str):
        parser = arguments.Parser()
        arguments.add_model_arguments(parser)
        arguments.add_collaborative_arguments(parser)
        pruning.add_head_arguments(parser)
        alphas.add_mixing_arguments(parser)
        arguments.add_training_arguments(parser)
        arguments.add_output_arguments(parser)
        return parser.parse_args(["--model_name_or_path", "some", *flags.split()])

    return parse


def test_weights_per_role(parse):
    args = parse("--alpha_mixing --alpha_growth_weight enc-self=40,dec-enc=20.5 --disagreement_weight 0.1")
    assert args.alpha_growth_weight == {"enc-self": 40.0, "dec-enc": 20.5}
    assert args.disagreement_weight == 0.1
    assert json.loads(json.dumps(args.alpha_growth_weight)) == args.alpha_growth_weight  # as a checkpoint keeps it


@pytest.mark.parametrize(
    "flags, message",
    (
        ("--alpha_start 1", "1 is a share of the steps, below 1"),
        ("--alpha_start -0.1", "must be a finite number, 0 or more"),
        ("--alpha_growth_weight enc=1", "'enc=1' is not one role=number of enc-self, dec-self, dec-enc"),
        ("--alpha_growth_weight enc-self=1,enc-self=2", "'enc-self=2' is not one role=number"),
        ("--alpha_growth_weight enc-self=-1", "must be a finite number"),
        ("--alpha_growth_radius 0", "too small"),
        ("--disagreement_weight nan", "must be a finite number"),
    ),
)
def test_values_are_refused(parse, flags, message):
    with pytest.raises(ArgumentError, match=message):
        parse(flags)


@pytest.mark.parametrize(
    "flags, message",
    (
        ("--alpha_start 0.3 --alpha_sites enc-self", "--alpha_sites, --alpha_start need --alpha_mixing"),
        ("--alpha_growth_weight 40", "need --alpha_mixing"),
        ("--alpha_mixing --alpha_growth_radius 1e-3", "--alpha_growth_radius needs --alpha_growth_weight"),
        ("--alpha_mixing --alpha_growth_beside sum", "--alpha_growth_beside needs --alpha_growth_weight"),
        ("--alpha_mixing --alpha_growth_weight 40 --alpha_growth_beside tokens", "unknown --alpha_growth_beside 'tok"),
        ("--alpha_mixing --max_train_steps 0", "--alpha_mixing acts in training"),
        ("--disagreement_weight 1 --num_train_epochs 0", "--disagreement_weight acts in training"),
        ("--alpha_mixing --fold_heads --collaborative", "cannot be --collaborative"),
        ("--fold_heads", "--fold_heads needs --alpha_mixing, or"),
        ("--save_head_statistics", "--save_head_statistics needs --output_dir"),
    ),
)
def test_flags_that_do_not_go_together(parse, flags, message):
    with pytest.raises(ArgumentError, match=message):
        alphas.check_mixing(parse(flags))


@pytest.mark.parametrize("flags", ("", "--alpha_mixing --alpha_start 0", "--gate_weight 1 --fold_heads"))
def test_flags_that_go_together(parse, flags):
    alphas.check_mixing(parse(flags))


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
        alphas.check_model(parse(flags), model)
    assert_unchanged(model, before)


def test_a_single_head_is_refused_before_training(parse):
    model = FAMILIES["bert"].build()
    path = adapter_sites(model)[1].path
    prune_heads(model, {path: [0, 1, 3]})
    with pytest.raises(ArgumentError, match=f"{path}: a single head cannot be mixed"):
        alphas.check_model(parse("--alpha_mixing"), model)
    alphas.check_model(parse(f"--alpha_mixing --alpha_sites {adapter_sites(model)[0].path}"), model)


def test_alphas_of_a_mixed_model(parse):
    model = FAMILIES["bert"].build()
    swap_to_alpha(model)
    with pytest.raises(ArgumentError, match="some has alphas already: fold_heads them first"):
        alphas.check_model(parse("--alpha_mixing"), model)
    alphas.check_model(parse(""), model)


def mixed(model) -> list[tuple[str, int]]:
    return [(site.role, mixing.num_heads) for site, mixing in mixed_sites(model, get_adapter(model))]


def test_start_mixes_what_can_be_mixed(parse):
    """Heads may have been removed in the meantime: sites of one head, or none, are left alone."""
    model = FAMILIES["marian"].build()
    alphas.start(parse("--alpha_mixing --alpha_sites dec-enc dec-self"), model)
    assert mixed(model) == [("dec-self", HEADS), ("dec-enc", HEADS)] * 2
    model = FAMILIES["marian"].build()
    prune_heads(model, {"enc-self": [[0, 1, 2], [0]], "dec-self": [[0, 1, 2, 3]] * 2})
    alphas.start(parse("--alpha_mixing"), model)
    assert mixed(model) == [("enc-self", HEADS - 1), ("dec-enc", HEADS), ("dec-enc", HEADS)]
    args = parse("--alpha_mixing --alpha_growth_weight enc-self=2,dec-self=3 --alpha_start 0.25")
    options = alphas.penalty_options(args, model, 10)
    assert options == {"disagreement": None, "growth": {"enc-self": 2.0}, "alpha_start": 3}
    penalty = HeadPenalty(model, **options)
    assert penalty.parts["alphas"].growth == {"enc-self": 2.0, "dec-enc": 0.0}


def test_nothing_left_to_mix(parse):
    model = FAMILIES["bert"].build()
    prune_heads(model, {"enc-self": [[0, 1, 2], [0, 1, 2]]})
    assert alphas.start(parse("--alpha_mixing"), model) is None
    assert alphas.penalty_options(parse("--alpha_mixing --disagreement_weight 2"), model, 5) == {"disagreement": 2.0}


def test_penalty_options(parse):
    model = FAMILIES["bert"].build()
    alphas.start(parse("--alpha_mixing"), model)
    args = parse("--alpha_mixing --alpha_growth_weight 40 --alpha_growth_radius 1e-3 --alpha_start 0.31")
    options = {"disagreement": None, "growth": 40.0, "growth_radius": 1e-3, "alpha_start": 31}
    assert alphas.penalty_options(args, model, 100) == options
    assert alphas.penalty_options(parse("--alpha_mixing"), model, 100)["growth"] == 0.0
    args = parse("--alpha_mixing --alpha_growth_weight 40 --alpha_growth_beside sum")
    options = {"disagreement": None, "growth": 40.0, "growth_beside": "sum", "alpha_start": 0}
    assert alphas.penalty_options(args, model, 100) == options
    assert HeadPenalty(model, **options).parts["alphas"].beside == "sum"
