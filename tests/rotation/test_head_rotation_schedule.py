"""Rotation by a schedule: how it is written, when heads change places, how it resumes, what it refuses."""

import copy
import json

import pytest
import torch
from model_configs import bert_config
from model_runs import sites
from unchanged import assert_unchanged, refused, snapshot

from collab_heads import CollabHeadsError, prune_heads, rotate_heads, swap_to_collaborative
from collab_heads.errors import ArgumentError, DataError, ModelStateError, UnsupportedModelError
from collab_heads.rotation.exchange import Slot
from collab_heads.training import HeadRotation
from families import FAMILIES, make

CROSS, SELF = "decoder.layers.{}.encoder_attn", "decoder.layers.{}.self_attn"


def source(layers, heads, modules=("encoder_attn", "encoder_attn"), stacks=("decoder", "decoder")):
    """An exchange as the source's files have it: layers are strings, heads are numbers."""
    found = {}
    for index, side in enumerate("sd"):
        found[f"{side}_layer"], found[f"{side}_head"] = str(layers[index]), heads[index]
        found[f"{side}_layer_module"], found[f"{side}_transformer_module"] = modules[index], stacks[index]
    return found


def clean(role="dec-enc", layers=(0, 1), heads=(0, 0)):
    return {"role": role, "layers": list(layers), "heads": list(heads)}


def slots(*pairs):
    return [tuple(Slot(*end) for end in pair) for pair in pairs]


def marian():
    return FAMILIES["marian"].build()


def weights(model) -> dict:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(first: dict, second: dict) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture
def written(tmp_path):
    def write(content) -> str:
        path = tmp_path / "rotation.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return path

    return write


def test_the_source_file_is_read_as_it_is(written):
    """The shape of the shipped file: decoder cross-attention of two layers, all heads, at several epochs."""
    exchanges = [source((1, 0), (head, head)) for head in range(4)]
    rotation, model = HeadRotation.from_json(written({"3": exchanges, "7": exchanges})), marian()
    expected = slots(*(((CROSS.format(1), head), (CROSS.format(0), head)) for head in range(4)))
    assert [rotation.plan(model, epoch) for epoch in range(1, 9)] == [[], [], expected, [], [], [], expected, []]
    rotation.check(model, 7)


@pytest.mark.parametrize(
    "stack, module, path",
    (
        ("encoder", "self_attn", "encoder.layers.{}.self_attn"),
        ("decoder", "self_attn", SELF),
        ("decoder", "encoder_attn", CROSS),
        ("decoder", "enc_attn", CROSS),
    ),
)
def test_modules_of_the_source(stack, module, path):
    exchange = source((1, 0), (2, 3), (module, module), (stack, stack))
    for given in (exchange, {**exchange, "s_layer": 1, "d_layer": 0, "s_head": "2"}):
        plan = HeadRotation({1: [given]}).plan(marian(), 1)
        assert plan == slots(((path.format(1), 2), (path.format(0), 3)))


def test_the_clean_forms_mean_the_same(written):
    """Keys are strings in files; in Python they may be numbers."""
    expected = slots(((CROSS.format(1), 0), (CROSS.format(0), 3)))
    for exchange in (
        source((1, 0), (0, 3)),
        clean(layers=(1, 0), heads=(0, 3)),
        {"paths": [CROSS.format(1), CROSS.format(0)], "heads": [0, 3]},
    ):
        assert HeadRotation.from_json(written({"3": [exchange]})).plan(marian(), 3) == expected
        assert HeadRotation({3: [exchange]}).plan(marian(), 3) == expected


def test_layer_1_is_not_layer_10():
    model = make(FAMILIES["bert"].base, bert_config(num_hidden_layers=12))
    before = weights(model)
    rotation = HeadRotation({1: [source((1, 10), (2, 3), ("self_attn",) * 2, ("encoder",) * 2)]})
    path = "encoder.layer.{}.attention.self"
    assert rotation.apply(model, epoch=1) == slots(((path.format(1), 2), (path.format(10), 3)))
    changed = {name.split(".attention.self")[0] for name, t in model.state_dict().items() if not t.equal(before[name])}
    assert changed == {"encoder.layer.1", "encoder.layer.10"}


def test_exchanges_happen_before_their_epochs():
    """A timeline: what is swapped a second time is back, what other epochs do is their own."""
    first, second = clean(heads=(0, 1)), clean("enc-self", (1, 1), (2, 3))
    model, rotation = marian(), HeadRotation({"5": [first, second], "3": [first]})
    states, done = [weights(model)], []
    for epoch in range(1, 7):
        done.append(rotation.apply(model, epoch=epoch))
        states.append(weights(model))
    one = ((CROSS.format(0), 0), (CROSS.format(1), 1))
    two = (("encoder.layers.1.self_attn", 2), ("encoder.layers.1.self_attn", 3))
    assert done == [[], [], slots(one), [], slots(one, two), []]
    by_hand = marian()
    assert same(states[2], weights(by_hand))
    rotate_heads(by_hand, [one])
    assert same(states[3], weights(by_hand)) and same(states[4], weights(by_hand))
    rotate_heads(by_hand, [one])
    rotate_heads(by_hand, [two])
    assert same(states[5], weights(by_hand)) and same(states[6], weights(by_hand))
    assert not same(states[6], states[0])
    entries = [{"epoch": 3, "kind": "swap", "pairs": [one]}, {"epoch": 5, "kind": "swap", "pairs": [one, two]}]
    assert rotation.history == json.loads(json.dumps(entries))


def test_moments_follow():
    model, rotation = marian(), HeadRotation({1: [clean(heads=(0, 1))]})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    modules = [sites(model)[CROSS.format(layer)] for layer in (0, 1)]
    for index, module in enumerate(modules):
        for p in module.parameters():
            optimizer.state[p]["momentum_buffer"] = torch.full_like(p, float(index))
    rotation.apply(model, epoch=1, optimizer=optimizer)
    rows = [optimizer.state[module.q_proj.weight]["momentum_buffer"][:, 0].tolist() for module in modules]
    assert rows == [[1.0] * 8 + [0.0] * 24, [1.0] * 8 + [0.0] * 8 + [1.0] * 16]


def test_the_plan_of_another_rank():
    model, expected = marian(), marian()
    rotation, other = HeadRotation({2: [clean()]}), HeadRotation({2: [clean()]})
    pairs = other.plan(expected, 2)
    assert rotation.apply(model, epoch=2, pairs=pairs) == pairs
    other.apply(expected, epoch=2)
    assert same(weights(model), weights(expected))
    assert rotation.state_dict() == other.state_dict()
    assert HeadRotation({2: [clean()]}).apply(marian(), epoch=1, pairs=[]) == []
    own = slots(((SELF.format(0), 1), (SELF.format(1), 1)))
    rotation.apply(model, epoch=3, pairs=own)
    rotate_heads(expected, own)
    assert same(weights(model), weights(expected))


def test_it_resumes_where_it_was():
    """At an epoch's end, and in its middle, where the epoch's exchange is not made again."""
    schedule = {3: [clean(heads=(0, 1))], 4: [clean(heads=(1, 2))]}
    unbroken, model = marian(), marian()
    rotations = HeadRotation(schedule), HeadRotation(schedule)
    for epoch in range(1, 4):
        for rotation, made in zip(rotations, (unbroken, model), strict=True):
            rotation.apply(made, epoch=epoch)
    state = json.loads(json.dumps(rotations[1].state_dict()))
    resumed = HeadRotation(schedule)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    kept = copy.deepcopy(state)
    before = weights(model)
    assert resumed.apply(model, epoch=3) == [] == resumed.plan(model, 3)
    assert same(weights(model), before)
    resumed.apply(model, epoch=4)
    rotations[0].apply(unbroken, epoch=4)
    assert same(weights(model), weights(unbroken))
    assert resumed.history == rotations[0].history and len(resumed.history) == 2
    assert state == kept  # the saved state is no longer its own


def test_a_state_of_something_else():
    rotation = HeadRotation({3: [clean()]})
    rotation.apply(model := marian(), epoch=3)
    good = rotation.state_dict()
    for state, message in (
        (HeadRotation({4: [clean()]}).state_dict(), "not the state of this rotation: schedule"),
        ({}, "not the state of a rotation"),
        (None, "not the state of a rotation"),
        ({**good, "epoch": True}, "not the state of a rotation"),
        ({**good, "history": [{"epoch": 3, "kind": "jump", "pairs": []}]}, "not an exchange of heads"),
        ({**good, "history": [{"epoch": 3, "kind": "swap", "pairs": [[["a", 0]]]}]}, "pairs must be pairs"),
    ):
        with refused(model, ArgumentError, message):
            rotation.load_state_dict(state)
        assert rotation.state_dict() == good


def test_epochs_go_forward():
    rotation, model = HeadRotation({3: [clean()]}), marian()
    rotation.apply(model, epoch=3)
    for epoch, message in ((2, "epoch 2 comes after epoch 3"), (0, "counted from 1"), (True, "True"), (4.0, "4.0")):
        with refused(model, ArgumentError, message):
            rotation.apply(model, epoch=epoch)
        with refused(model, ArgumentError, message):
            rotation.plan(model, epoch)
    assert rotation.history[-1]["epoch"] == 3


@pytest.mark.parametrize(
    "exchange, fragments",
    (
        (clean(layers=(0, 5)), ("no dec-enc layer 5", "0, 1")),
        (clean(heads=(0, 4)), ("head 4 of", "does not exist")),
        (clean(heads=(1, 1), layers=(1, 1)), ("with itself",)),
        ({"paths": ["decoder.layers.0.attn", CROSS.format(1)], "heads": [0, 0]}, ("not the path", "did you mean")),
        ({"paths": [SELF.format(0), CROSS.format(1)], "heads": [0, 0]}, ("across roles or stacks",)),
        (source((0, 1), (0, 0), ("self_attn", "encoder_attn")), ("across roles or stacks",)),
        (source((0, 1), (0, 0), ("self_attn", "self_attn"), ("encoder", "decoder")), ("across roles or stacks",)),
    ),
)
def test_a_schedule_that_the_model_cannot_do(exchange, fragments):
    """Known before training; and the exchange itself refuses it too, whole: the good one before it is not made."""
    model, rotation = marian(), HeadRotation({2: [clean()], 6: [clean(), exchange]})
    with refused(model, ArgumentError, "epoch 6", *fragments):
        rotation.check(model)
    with refused(model, ArgumentError, *fragments):
        rotation.apply(model, epoch=6)
    assert rotation.history == [] and rotation.state_dict()["epoch"] == 0


def test_other_models():
    rotation, bert = HeadRotation({1: [clean()]}), FAMILIES["bert"].build()
    with refused(bert, ArgumentError, "epoch 1", "no dec-enc attention", "enc-self"):
        rotation.check(bert)
    model = marian()
    swap_to_collaborative(model, sites=CROSS.format(1))
    with refused(model, ModelStateError, "epoch 1", CROSS.format(1), "collaborative"):
        rotation.check(model)
    pruned = marian()
    prune_heads(pruned, heads={CROSS.format(1): [0]})
    with refused(pruned, ArgumentError, "epoch 1", "was removed", "1, 2, 3"):
        rotation.check(pruned)
    wrapped = torch.nn.DataParallel(marian())
    for call in (rotation.check, lambda model: rotation.apply(model, epoch=1)):
        with refused(wrapped, UnsupportedModelError, "pass .module"):
            call(wrapped)


def test_albert_has_one_place_for_all_layers():
    model = FAMILIES["albert"].build()
    HeadRotation({1: [clean("enc-self", (0, 0), (0, 3))]}).check(model)
    with refused(model, ArgumentError, "no enc-self layer 2; it has 0"):
        HeadRotation({1: [clean("enc-self", (0, 2), (0, 3))]}).check(model)


def test_beyond_the_last_epoch():
    rotation, model = HeadRotation({3: [clean()], 9: [clean()]}), marian()
    before = snapshot(model)
    rotation.check(model, 9)
    rotation.check(model)
    assert_unchanged(model, before)
    with refused(model, ArgumentError, "epoch 9", "the training 8"):
        rotation.check(model, 8)
    with refused(model, ArgumentError, "epochs must be a whole number", "True"):
        rotation.check(model, True)


@pytest.mark.parametrize(
    "schedule, fragments",
    (
        ({}, ("a schedule must be a dict",)),
        ([clean()], ("a schedule must be a dict",)),
        ({"0": [clean()]}, ("epoch '0' must be 1 or more",)),
        ({"-1": [clean()]}, ("an epoch must be a whole number", "'-1'")),
        ({"x": [clean()]}, ("an epoch must be a whole number", "'x'")),
        ({"3": [clean()], "03": [clean()]}, ("epoch '03' is there twice",)),
        ({"3": []}, ("epoch 3 must have a list of exchanges",)),
        ({"3": clean()}, ("epoch 3 must have a list of exchanges",)),
        ({"3": [clean(), 7]}, ("epoch 3, exchange 1", "must have 'role'", "7")),
        ({"3": [{**clean(), "paths": ["a", "b"]}]}, ("epoch 3, exchange 0", "must have 'role'")),
        ({"3": [clean("dec-cross")]}, ("unknown role 'dec-cross'", "dec-enc")),
        ({"3": [clean(layers=(0, 1, 2))]}, ("layers must be a list of two",)),
        ({"3": [clean(heads=(0, 1.0))]}, ("a head must be a whole number", "1.0")),
        ({"3": [clean(heads=(0, True))]}, ("a head must be a whole number", "True")),
        ({"3": [clean(heads=(0, -1))]}, ("a head must be a whole number", "-1")),
        ({"3": [clean(layers=(None, 0))]}, ("a layer must be a whole number", "None")),
        ({"3": [{"paths": [1, "b"], "heads": [0, 0]}]}, ("paths must be strings",)),
        ({"3": [source((0, 1), (0, 0), ("attn", "self_attn"))]}, ("no attention 'attn' in a stack 'decoder'",)),
        (
            {"3": [source((0, 1), (0, 0), stacks=("encoder",) * 2)]},
            ("no attention 'encoder_attn' in a stack 'encoder'",),
        ),
        ({"3": [{k: v for k, v in source((0, 1), (0, 0)).items() if k != "d_head"}]}, ("eight keys",)),
    ),
)
def test_schedules_that_make_no_sense(schedule, fragments, written):
    with pytest.raises(ArgumentError) as caught:
        HeadRotation(schedule)
    path = written(schedule)
    with pytest.raises(DataError) as from_file:
        HeadRotation.from_json(path)
    for fragment in fragments:
        assert fragment in str(caught.value) and fragment in str(from_file.value)
    assert str(path) in str(from_file.value)


@pytest.mark.parametrize(
    "content, fragment",
    (
        ("{", "Expecting"),
        ("[" * 100_000, "nested too deeply"),
        ('{"3": [], "3": []}', "'3' is there twice"),
        ("\ud83d".encode("utf-8", "surrogatepass"), "not UTF-8"),
        (None, "No such file"),
    ),
)
def test_files_that_are_no_schedule(content, fragment, tmp_path):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as caught:
        HeadRotation.from_json(path)
    assert str(path) in str(caught.value) and fragment in str(caught.value)
    assert isinstance(caught.value, CollabHeadsError)


@pytest.mark.parametrize("options", ({"metric": "l2"}, {"count": 2}, {"roles": "enc-self"}, {"end": 3}))
def test_settings_of_a_policy_beside_a_schedule(options):
    with pytest.raises(ArgumentError, match="a schedule names its heads"):
        HeadRotation({3: [clean()]}, **options)
