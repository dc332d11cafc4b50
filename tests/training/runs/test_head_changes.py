"""What the flags of gates and pruning do to a model, and what is refused before training."""

import json
from argparse import Namespace

import pytest
import torch
from accelerate import Accelerator
from model_sizes import HEADS
from opening import gates_in
from unchanged import assert_unchanged, refused, snapshot

from collab_heads import CollabHeadsError, get_adapter, inspect, prune_heads, swap_to_gated
from collab_heads.errors import ArgumentError, DataError
from collab_heads.training import HeadPenalty
from collab_heads.training.runs import head_changes
from families import FAMILIES


def check_refused(model, args, error, *fragments):
    with refused(model, error, *fragments):
        head_changes.check_gateable(args, model)


ALIVE = {"enc-self": [[1, 0, 1, 1], [0, 0, 0, 0]]}


def file(folder, content) -> str:
    path = folder / "alive.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    "content, error, message",
    (
        ("{", DataError, "alive.json: Expecting property name"),
        ("", DataError, "alive.json: Expecting value"),
        ("[" * 100_000, DataError, "alive.json: lists or objects are nested too deeply"),
        ("9" * 5000, DataError, "alive.json: a whole number has too many digits"),
        ([[1, 0, 1, 1]], ArgumentError, "must be a dict by role or path"),
        ({}, ArgumentError, "must be a dict by role or path"),
        ({"enc-sefl": [[1] * 4] * 2}, ArgumentError, "did you mean 'enc-self'"),
        ({"dec-enc": [[1] * 4] * 2}, ArgumentError, "the model has no dec-enc attention"),
        ({"enc-self": [[1] * 4]}, ArgumentError, "one list per site, 2 in all, not 1 entries"),
        ({"enc-self": [[1] * 4, [1] * 3]}, ArgumentError, "layer.1.attention.self has 4 heads, the list 3 values"),
        ({"enc-self": [[1] * 4, [1, 0, 2, 1]]}, ArgumentError, "layer.1.attention.self, head 2: 2 is neither 0 nor 1"),
        ({"enc-self": [[1] * 4, [1, 0, 0.5, 1]]}, ArgumentError, "head 2: 0.5 is neither"),
        ({"enc-self": [[1] * 4, [1, 0, "1", 1]]}, ArgumentError, "head 2: '1' is neither"),
        ({"enc-self": [[1] * 4, [1, 0, None, 1]]}, ArgumentError, "head 2: None is neither"),
        ({"enc-self": [1, 0, 1, 1]}, ArgumentError, "one list per site"),
        ({"enc-self": "1011"}, ArgumentError, "one list per site"),
    ),
)
def test_a_configuration_that_does_not_fit_is_refused(content, error, message, parse, tmp_path):
    model = FAMILIES["bert"].build()
    check_refused(model, parse(f"--alive_heads {file(tmp_path, content)}"), error, message)


def test_a_file_that_cannot_be_read_is_refused(parse, tmp_path):
    model = FAMILIES["bert"].build()
    (tmp_path / "latin").write_bytes(b'{"enc-self": "\xe9"}')
    for path in (tmp_path / "none.json", tmp_path, tmp_path / "latin"):
        check_refused(model, parse(f"--alive_heads {path}"), DataError, f"--alive_heads {path}: ")


@pytest.mark.parametrize(
    "flags, message",
    (
        ("--target_heads 9", "target_heads is 9, must be a whole number from 0 to the 8 heads"),
        ("--target_heads 0", "would empty a role"),
        ("--target_heads dec-enc=1", "the model has no dec-enc attention"),
        ("--target_heads 5 --gated_sites encoder.layer.0.attention.self", "the 4 heads that exist"),
        ("--target_heads 3 --gated_sites enc-sefl", "did you mean 'enc-self'"),
        ("--gate_weight 1 --gated_sites dec-self", "the model has no dec-self attention"),
    ),
)
def test_what_the_model_does_not_have_is_refused(flags, message, parse):
    check_refused(FAMILIES["bert"].build(), parse(flags), ArgumentError, message)


def test_a_number_per_role_gates_these_roles_only(parse):
    model, args = FAMILIES["marian"].build(), parse("--target_heads enc-self=2,dec-enc=3")
    head_changes.check_gateable(args, model)
    assert {site.role for site in head_changes.sites_to_gate(args, model)} == {"enc-self", "dec-enc"}


@pytest.mark.parametrize("flags", ("--target_heads 3", "--gate_weight 1", "--alive_heads {}"))
@pytest.mark.parametrize("fixed", (True, False))
def test_a_model_with_gates_is_refused(fixed, flags, parse, tmp_path):
    """At once, not when training is to begin."""
    model = FAMILIES["bert"].build()
    swap_to_gated(model, alive_heads=ALIVE if fixed else None)
    args = parse(flags.format(file(tmp_path, ALIVE)))
    check_refused(model, args, ArgumentError, "has gates already: prune_heads or fold_heads")
    head_changes.check_gateable(parse(""), model)  # to train it on is fine


def test_checking_changes_nothing(parse, tmp_path):
    model = FAMILIES["bert"].build()
    before = snapshot(model)
    for flags in ("", "--target_heads 3", "--gate_weight 1", f"--alive_heads {file(tmp_path, ALIVE)}"):
        head_changes.check_gateable(parse(flags), model)
    assert_unchanged(model, before)


def chosen(args: Namespace, model, batches=()):
    accelerator = Accelerator(cpu=True)
    return head_changes.choose_heads(accelerator, args, model, lambda count: batches)


def heads(model) -> list[int]:
    return [site.num_heads for site in get_adapter(model).sites(model)]


def test_a_file_is_followed(parse, tmp_path):
    model = FAMILIES["bert"].build()
    report = chosen(parse(f"--alive_heads {file(tmp_path, ALIVE)}"), model)
    assert [site.kept for site in report.sites] == [(0, 2, 3), ()]
    assert heads(model) == [3, 0] and not gates_in(model)
    # then in the numbers of what is left, for the sites that are left
    report = chosen(parse(f"--alive_heads {file(tmp_path, {'enc-self': [[1, 0, 1]]})}"), model)
    assert [site.kept for site in report.sites] == [(0, 3)]


@pytest.mark.parametrize("flags", ("--target_heads 3", "--gate_weight 0.1", "--target_heads dec-self=2"))
def test_a_file_says_it_of_some_roles_and_gates_learn_on_the_others(flags, parse, tmp_path):
    model = FAMILIES["marian"].build()
    args = parse(f"{flags} --alive_heads {file(tmp_path, ALIVE)}")
    head_changes.check_gateable(args, model)
    report = chosen(args, model)
    assert [site.kept for site in report.sites] == [(0, 2, 3), ()]
    gated = inspect(model).gates
    assert {site.role for site in gated.sites} == {"dec-self", "dec-enc"} - ({"dec-enc"} if "=" in flags else set())
    assert gated.open == gated.heads


@pytest.mark.parametrize(
    "flags", ("--target_heads enc-self=3", "--gate_weight 1 --gated_sites enc-self dec-self", "--target_heads 3")
)
def test_no_site_has_both(flags, parse, tmp_path):
    content = (
        ALIVE if "enc-self" in flags else {role: [[1] * HEADS] * 2 for role in ("enc-self", "dec-self", "dec-enc")}
    )
    args = parse(f"{flags} --alive_heads {file(tmp_path, content)}")
    check_refused(
        FAMILIES["marian"].build(), args, ArgumentError, "encoder.layers.0.self_attn stay", "no gates to learn"
    )


def test_random_heads_follow_the_seed(parse):
    kept = []
    for seed in (1, 1, 2, 3):
        model = FAMILIES["marian"].build()
        torch.manual_seed(len(kept))  # nothing global
        report = chosen(parse(f"--target_heads 9 --head_selection random --seed {seed}"), model)
        kept.append([site.kept for site in report.sites])
        assert sum(heads(model)) == 9
    assert kept[0] == kept[1]
    assert kept[1] != kept[2] != kept[3]


def test_important_heads_are_measured_on_examples(parse):
    model = FAMILIES["bert"].build()
    batch = {**FAMILIES["bert"].inputs(), "labels": torch.tensor([0, 1, 1])}
    with torch.no_grad():
        get_adapter(model).output_projection(model, get_adapter(model).sites(model)[0]).weight[:, 8:] = 0.0
    args = parse("--target_heads 5 --head_selection gradient")
    report = chosen(args, model, [batch])
    assert [site.kept for site in report.sites] == [(0,), (0, 1, 2, 3)]  # of a site, useless heads go first
    assert heads(model) == [1, 4]


def test_gates_are_put_where_they_are_asked_for(parse):
    model = FAMILIES["marian"].build()
    assert chosen(parse("--target_heads 3 --gated_sites enc-self"), model) is None
    assert {site.role for site in inspect(model).gates.sites} == {"enc-self"}
    model = FAMILIES["marian"].build()
    chosen(parse("--gate_weight 0.1"), model)
    assert inspect(model).gates.heads == inspect(model).gates.open == 6 * HEADS


def test_the_schedule_ends_within_the_training(parse):
    for total, share, steps in ((100, 0.5, 50), (7, 0.5, 4), (3, 0.1, 1), (10, 1.0, 10)):
        model = FAMILIES["bert"].build()
        swap_to_gated(model)
        args = parse(f"--target_heads 3 --selection_share {share}")
        found = HeadPenalty(model, **head_changes.gate_options(args, total, None)).parts["gates"]
        assert (found.steps, found.target, found.gate_weight) == (steps, 3, 0.0)
        assert 1 <= found.steps <= total
    weighted = HeadPenalty(model, **head_changes.gate_options(parse("--gate_weight 0.5"), 10, None)).parts["gates"]
    assert (weighted.target, weighted.gate_weight) == (None, 0.5)


def test_what_training_closed_is_removed(parse):
    model = FAMILIES["bert"].build()
    swap_to_gated(model)
    gates_in(model)[0][1].log_alpha.data[1:] = -1.0
    gates, report = head_changes.remove_closed_heads(model)
    assert (gates["heads"], gates["open"]) == (8, 5)
    assert report.removed == 3 and heads(model) == [1, 4]
    json.dumps([gates, report.to_dict()])
    with pytest.raises(CollabHeadsError, match="no gates"):
        prune_heads(model)
