"""The record in model.config.collab_heads: it round-trips, and what does not fit is a clear error."""

import copy
import dataclasses
import json
import pickle
import tracemalloc

import pytest
from changed_heads import STATES, changed
from model_configs import bert_config
from model_runs import swap
from transformers import BertConfig, BertForSequenceClassification

from collab_heads import get_adapter, prune_heads, swap_to_alpha
from collab_heads.base.checks import MAX_SIZE
from collab_heads.errors import ConfigError
from collab_heads.fitting.kinds import kind_for
from collab_heads.sites.record import FIELD, VERSION, CollabConfig
from collab_heads.sites.state import GateState, QueryKeyState, SiteState, ValueState
from families import FAMILIES, LAYOUTS

PATH = "encoder.layer.1.attention.self"


def recorded() -> BertConfig:
    """The config of a swapped model."""
    model = FAMILIES["bert"].build()
    swap(model, "shared", 20)
    return model.config


def with_narrow_values() -> BertConfig:
    """The config of a model with narrower values."""
    model = FAMILIES["bert"].build()
    swap(model, "stock+values", 16)
    return model.config


def with_heads_removed() -> BertConfig:
    """The config of a pruned and gated model."""
    return changed(FAMILIES["bert"], state="both").config


def with_heads_mixed() -> BertConfig:
    """The config of a model with three mixed heads at one site, and four at another."""
    model = FAMILIES["bert"].build()
    prune_heads(model, heads={PATH: [1]})
    swap_to_alpha(model)
    return model.config


def test_round_trip(family, kind):
    model = family.build()
    swap(model, kind, 16)
    record = CollabConfig.of(model.config)
    assert len(record.sites) == family.num_sites
    assert {state.query_key.kind for state in record.sites.values()} == {kind_for(get_adapter(model), kind)}
    stored = json.loads(json.dumps(model.config.collab_heads))
    assert stored == record.to_dict() == model.config.collab_heads
    assert stored["version"] == VERSION
    config = bert_config()
    setattr(config, FIELD, stored)
    assert CollabConfig.of(config) == record


def test_a_stock_config_has_no_record():
    assert CollabConfig.of(bert_config()) == CollabConfig()
    assert not CollabConfig().sites


def test_sites_are_added_and_replaced():
    first, second = (SiteState("enc-self", 4, QueryKeyState("shared", dim, 8, 0.35, True)) for dim in (8, 12))
    record = CollabConfig({"a": first}).with_sites({"b": first}).with_sites({"a": second})
    assert record.sites == {"a": second, "b": first}


def shown(value):
    """Python writes no integer of more than 4,300 digits."""
    return "huge" if type(value) is int and value > 10**1000 else f"{value!r:.20}"


def set_in(*keys, to):
    def tamper(record):
        for key in keys[:-1]:
            record = record[key]
        record[keys[-1]] = to

    tamper.__name__ = f"{'.'.join(map(str, keys[-2:]))} = {shown(to)}"
    return tamper


def drop(*keys):
    def tamper(record):
        for key in keys[:-1]:
            record = record[key]
        del record[keys[-1]]

    tamper.__name__ = f"no {'.'.join(keys[-2:])}"
    return tamper


def query_key(name, to):
    return set_in("sites", PATH, "query_key", name, to=to)


QUERY_KEY = ("kind", "dim", "dim_head", "scale", "bias")  # without a mixing_init, which older records lack


def renamed(path):
    def tamper(record):
        record["sites"][path] = record["sites"].pop(PATH)

    tamper.__name__ = f"site {path!r}"
    return tamper


def replaced(**more):
    def tamper(record):
        record["sites"][PATH] = {"role": "enc-self", **more}

    tamper.__name__ = f"site {more}"
    return tamper


OF_THE_WHOLE = [
    (set_in("version", to=VERSION + 1), (f"version {VERSION + 1}", "upgrade collab_heads")),
    (set_in("version", to="1"), ("version", "'1'")),
    (set_in("version", to=True), ("version", "True")),
    (set_in("version", to=0), ("version", "0")),
    (set_in("version", to=10**400), ("version 1000", "upgrade collab_heads")),
    (set_in("version", to=1.0), ("version", "1.0")),
    (set_in("sites", 7, to={}), ("sites is 7", "a string")),
    (drop("version"), ("version", "None")),
    (drop("sites"), ("'version' and 'sites'",)),
    (set_in("sites", to=[]), ("'version' and 'sites'",)),
    (set_in("gates", to={}), ("unknown entries ['gates']", "known: ['sites', 'version']")),
]
OF_A_SITE = [
    (set_in("sites", PATH, to=None), ("must be a mapping", "None")),
    (set_in("sites", PATH, to=[1]), ("must be a mapping", "[1]")),
    (set_in("sites", PATH, "alpha", to=[0]), ("unknown entries ['alpha']",)),
    (set_in("sites", PATH, "role", to="encoder"), ("role is 'encoder'", "enc-self, dec-self, dec-enc")),
    (set_in("sites", PATH, "role", to=None), ("role is None",)),
    (set_in("sites", PATH, "num_heads", to=True), ("num_heads is True", "positive integer")),
    (set_in("sites", PATH, "num_heads", to="4"), ("num_heads is '4'", "positive integer")),
    (set_in("sites", PATH, "num_heads", to=0), ("num_heads is 0", "positive integer")),
    (set_in("sites", PATH, "query_key", to="shared"), ("query_key must be a mapping", "'shared'")),
    (query_key("width", 3), ("unknown entries ['width']",)),
    (query_key("kind", "cosine"), ("kind is 'cosine'", "shared, per_head")),
    (query_key("kind", ["shared"]), ("kind is ['shared']", "shared, per_head")),
    (query_key("dim", True), ("dim is True", "positive integer")),
    (query_key("dim", 20.0), ("dim is 20.0", "positive integer")),
    (query_key("dim", 0), ("dim is 0", "positive integer")),
    (query_key("dim", 33), ("dim is 33", "at most 32")),
    (query_key("dim_head", True), ("dim_head is True", "positive integer")),
    (query_key("dim_head", 2), ("dim is 20", "at most 8")),
    (query_key("scale", 0), ("scale is 0", "positive number")),
    (query_key("scale", "0.5"), ("scale is '0.5'", "positive number")),
    (query_key("scale", True), ("scale is True", "positive number")),
    (query_key("scale", float("nan")), ("scale is nan", "positive number")),
    (query_key("scale", 10**400), ("scale is 1000", "positive number")),
    (query_key("bias", 1), ("bias is 1", "true or false")),
    (query_key("mixing_init", "zeros"), ("mixing_init is 'zeros'", "concatenate, ones, normal")),
    (drop("sites", PATH, "role"), ("has no role",)),
    (drop("sites", PATH, "num_heads"), ("has no num_heads",)),
    (set_in("sites", PATH, "query_key", to=None), ("query_key must be a mapping", "None")),
    (set_in("sites", PATH, "gates", to=None), ("gates must be a mapping", "None")),
    (set_in("sites", PATH, "kept", to=None), ("kept is None",)),
    (set_in("sites", PATH, "num_heads", to=10**5000), ("integer",)),
    (set_in("sites", PATH, "num_heads", to=float("nan")), ("num_heads is nan",)),
    (set_in("sites", PATH, 7, to=1), ("unknown entries [7]",)),
    (query_key("dim", 10**400), ("dim is 1000",)),
    (query_key("scale", -(10**400)), ("scale is -1000",)),
    (drop("sites", PATH, "query_key"), ("query_key",)),
    *((drop("sites", PATH, "query_key", name), (f"query_key has no {name}",)) for name in QUERY_KEY),
]
OF_THE_VALUES = [  # of a record with narrower values
    (set_in("sites", PATH, "values", to=None), ("values must be a mapping", "None")),
    (set_in("sites", PATH, "values", to=16), ("values must be a mapping", "16")),
    (set_in("sites", PATH, "values", "kind", to="narrow"), ("values has unknown entries ['kind']",)),
    *(
        (set_in("sites", PATH, "values", "dim", to=dim), ("values.dim is", "a positive integer of at most 8"))
        for dim in (0, -4, 9, True, 4.0, "4", None, 10**400)
    ),
    *(
        (set_in("sites", PATH, "values", "dim_head", to=dim), ("values.dim_head is", "a positive integer"))
        for dim in (0, True, 8.0, "8", None)
    ),
    *((drop("sites", PATH, "values", name), (f"values has no {name}",)) for name in ("dim", "dim_head")),
    (drop("sites", PATH, "query_key"), ("values is ValueState", "none where there is no query_key")),
]
OF_THE_HEADS = [  # of a record with kept heads and gates
    *(
        (set_in("sites", PATH, "kept", to=kept), (f"kept is {kept!r}", "some of the heads 0 to 3, ascending"))
        for kept in ([2, 0], [0, 0], [0, 4], [-1, 2], [0, 1, 2, 3], [True, 2], [0, 1.0], ["0"], "01", 3, {"0": 1})
    ),
    (set_in("sites", PATH, "kept", to=[]), ("kept is ()", "at least one head where there are gates")),
    (set_in("sites", PATH, "gates", to="learned"), ("gates must be a mapping", "'learned'")),
    (set_in("sites", PATH, "gates", to=[1]), ("gates must be a mapping", "[1]")),
    (set_in("sites", PATH, "gates", "start", to=2.5), ("gates has unknown entries ['start']",)),
    (set_in("sites", PATH, "gates", "kind", to="soft"), ("gates.kind is 'soft'", "learned, subset, fixed")),
    (set_in("sites", PATH, "gates", "kind", to=["fixed"]), ("gates.kind is ['fixed']",)),
    *(
        (set_in("sites", PATH, "gates", "temperature", to=value), (f"gates.temperature is {value!r}", "above 0"))
        for value in (0, -0.5, True, "0.3", None, float("inf"), float("nan"), 10**400, 1e-300, 1e300)
    ),
    *(
        (set_in("sites", PATH, "gates", "stretch", to=value), (f"gates.stretch is {value!r}", "one below 0 and one"))
        for value in ([0, 1.1], [-0.1, 1], [1.1, -0.1], [-0.1], [-0.1, 1.1, 2], [-0.1, True], ["-0.1", 1.1], 1.1, "ab")
    ),
    *(
        (set_in("sites", PATH, "gates", "stretch", to=value), ("gates.stretch is", "one below 0 and one"))
        for value in (
            [-0.1, 1e300],
            [-1e300, 1.1],
            [-(10**400), 1.1],
            [-0.1, 10**400],
            [-5e-324, 1.1],
            [-0.1, 1 + 1e-9],
        )
    ),
    *((drop("sites", PATH, "gates", name), (f"gates has no {name}",)) for name in ("kind", "temperature", "stretch")),
]
OF_THE_ALPHAS = [  # of a record with kept heads and alphas
    *(
        (set_in("sites", PATH, "alphas", to=value), (f"alphas is {value!r}", "true or false"))
        for value in (1, 0, None, "true", [True], {}, 1.0)
    ),
    (set_in("sites", PATH, "kept", to=[2]), ("alphas is True", "1 heads cannot be mixed")),
    (set_in("sites", PATH, "kept", to=[]), ("alphas is True", "0 heads cannot be mixed")),
    (replaced(num_heads=1, alphas=True), ("alphas is True", "1 heads cannot be mixed")),
    (replaced(num_heads=4, alphas=False), ("expected one with a query_key, kept, gates or alphas",)),
]
OF_THE_FIT = [  # well formed, and not for this model
    (set_in("sites", PATH, "num_heads", to=8), ("recorded {'heads': 8,", "model's {'heads': 4,", PATH)),
    (query_key("dim_head", 16), ("recorded", "'head width': 16", "'head width': 8", PATH)),
    (query_key("bias", False), ("recorded", "'query bias': False", "'query bias': True", PATH)),
    (query_key("scale", 0.25), ("recorded", "'scale': 0.25}", "'scale': 0.35", PATH)),
    (
        renamed("encoder.layer.7.attention.self"),
        ("encoder.layer.7.attention.self", "does not have", PATH.replace("1", "0")),
    ),
    (renamed("encoder.layer.0.crossattention.self"), ("encoder.layer.0.crossattention.self", "does not have")),
    (renamed("encoder.layer.1.attention"), ("'encoder.layer.1.attention'", "not a site of attention in a bert")),
    (renamed("encoder.layers.1.self_attn"), ("'encoder.layers.1.self_attn'", "not a site of attention in a bert")),
    (renamed("pooler"), ("'pooler'", "not a site of attention in a bert")),
    (renamed(""), ("''", "not a site of attention in a bert")),
]


def ids(cases):
    return [tamper.__name__ for tamper, _ in cases]


def tampered(tamper, recorded=recorded):
    config = recorded()
    record = copy.deepcopy(config.collab_heads)
    tamper(record)
    assert pickle.dumps(record) != pickle.dumps(config.collab_heads)
    setattr(config, FIELD, record)
    return config


def assert_refused(config, fragments):
    for read in (lambda: CollabConfig.of(config), lambda: BertForSequenceClassification(config)):
        with pytest.raises(ConfigError) as caught:
            read()
        assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)


@pytest.mark.parametrize("tamper, fragments", OF_THE_WHOLE, ids=ids(OF_THE_WHOLE))
def test_records_that_make_no_sense(tamper, fragments):
    assert_refused(tampered(tamper), (FIELD, *fragments))


@pytest.mark.parametrize("tamper, fragments", OF_A_SITE, ids=ids(OF_A_SITE))
def test_sites_that_make_no_sense(tamper, fragments):
    assert_refused(tampered(tamper), (f"config.{FIELD}, site '{PATH}'", *fragments))


@pytest.mark.parametrize("tamper, fragments", OF_THE_VALUES, ids=ids(OF_THE_VALUES))
def test_values_that_make_no_sense(tamper, fragments):
    assert_refused(tampered(tamper, with_narrow_values), (f"config.{FIELD}, site '{PATH}'", *fragments))


def test_a_value_width_that_does_not_fit_the_model():
    config = tampered(set_in("sites", PATH, "values", "dim_head", to=16), with_narrow_values)
    with pytest.raises(ConfigError, match=r"'value head width': 16} do not fit the model's .*'value head width': 8}"):
        BertForSequenceClassification(config)


def test_a_record_without_values_is_written_as_ever():
    """So that packages from before read it; one with values they refuse: they know no such entry."""
    state = SiteState("enc-self", 4, QueryKeyState("shared", 12, 8, 0.35, True), kept=(1, 2), gates=GateState())
    assert json.dumps(CollabConfig({PATH: state}).to_dict()) == (
        '{"version": 1, "sites": {"encoder.layer.1.attention.self": {"role": "enc-self", "num_heads": 4, "query_key": '
        '{"kind": "shared", "dim": 12, "dim_head": 8, "scale": 0.35, "bias": true, "mixing_init": "concatenate"}, '
        '"kept": [1, 2], "gates": {"kind": "learned", "temperature": 0.33, "stretch": [-0.1, 1.1]}}}}'
    )
    record = json.loads(json.dumps(with_narrow_values().collab_heads))
    assert list(record["sites"][PATH]) == ["role", "num_heads", "query_key", "values"]
    assert record["version"] == 1
    assert CollabConfig.of(with_narrow_values()).to_dict() == record


@pytest.mark.parametrize("tamper, fragments", OF_THE_HEADS, ids=ids(OF_THE_HEADS))
def test_heads_that_make_no_sense(tamper, fragments):
    assert_refused(tampered(tamper, with_heads_removed), (f"config.{FIELD}, site '{PATH}'", *fragments))


@pytest.mark.parametrize("tamper, fragments", OF_THE_ALPHAS, ids=ids(OF_THE_ALPHAS))
def test_alphas_that_make_no_sense(tamper, fragments):
    assert_refused(tampered(tamper, with_heads_mixed), (f"config.{FIELD}, site '{PATH}'", *fragments))


def test_a_head_count_that_does_not_fit_the_model():
    """A site with removed heads, gates or alphas alone, without a query/key projection to compare."""
    cases = (("kept", with_heads_removed), ("gates", with_heads_removed), ("kept", with_heads_mixed))
    for name, made in cases:
        config = tampered(drop("sites", PATH, name), made)
        BertForSequenceClassification(config)
        config = tampered(set_in("sites", PATH, "num_heads", to=8), lambda config=config: config)
        CollabConfig.of(config)
        with pytest.raises(ConfigError, match=r"the recorded \{'heads': 8\} do not fit the model's \{'heads': 4\}"):
            BertForSequenceClassification(config)


@pytest.mark.parametrize("tamper, fragments", OF_THE_FIT, ids=ids(OF_THE_FIT))
def test_records_that_do_not_fit_the_model(tamper, fragments, tmp_path):
    config = tampered(tamper)
    CollabConfig.of(config)
    config.save_pretrained(tmp_path)
    for given in (config, BertConfig.from_pretrained(tmp_path)):
        with pytest.raises(ConfigError) as caught:
            BertForSequenceClassification(given)
        assert all(fragment in str(caught.value) for fragment in (FIELD, *fragments)), str(caught.value)


@pytest.mark.parametrize("record", ("shared", 1, [], {}), ids=repr)
def test_not_a_record_at_all(record):
    config = bert_config()
    setattr(config, FIELD, record)
    assert_refused(config, ("'version' and 'sites'",))


def test_per_head_width_must_fit_the_heads():
    with pytest.raises(ConfigError, match=r"dim 18 .* 4 heads"):
        SiteState("enc-self", 4, QueryKeyState("per_head", 18, 8, 0.35, True))


def test_per_head_width_must_fit_the_heads_that_are_left():
    state = QueryKeyState("per_head", 18, 8, 0.35, True)
    assert SiteState("enc-self", 4, state, kept=(0, 2, 3)).heads == 3
    with pytest.raises(ConfigError, match=r"dim 18 .* not a multiple of its 4 heads"):
        SiteState("enc-self", 5, state, kept=(0, 1, 2, 3))


@pytest.mark.parametrize("more", ({"gates": GateState()}, {"query_key": QueryKeyState("shared", 8, 8, 0.35, True)}))
def test_a_site_without_heads_has_nothing_else(more):
    assert SiteState("enc-self", 4, kept=()).heads == 0
    with pytest.raises(ConfigError, match="at least one head"):
        SiteState("enc-self", 4, kept=(), **more)


@pytest.mark.parametrize("more", ({"num_heads": 1}, {"num_heads": 4, "kept": (2,)}, {"num_heads": 4, "kept": ()}))
def test_alphas_need_two_heads(more):
    state = SiteState("enc-self", **more)
    with pytest.raises(ConfigError, match=rf"alphas is True, expected false: {state.heads} heads cannot be mixed"):
        dataclasses.replace(state, alphas=True)
    assert SiteState("enc-self", 2, alphas=True).heads == 2


def test_stock_sites_are_left_out():
    assert SiteState("enc-self", 4).is_stock
    changed_states = {
        "a": SiteState("enc-self", 4, kept=(1,)),
        "b": SiteState("enc-self", 4, kept=()),
        "c": SiteState("enc-self", 4, gates=GateState()),
        "d": SiteState("enc-self", 4, alphas=True),
    }
    assert not any(state.is_stock for state in changed_states.values())
    record = CollabConfig(changed_states)
    assert record.with_sites({"b": SiteState("enc-self", 4)}).sites.keys() == {"a", "c", "d"}
    assert record.with_sites({"a": SiteState("dec-self", 4, kept=(0,))}).sites["a"].role == "dec-self"


def test_entries_that_a_site_does_not_have_are_left_out():
    assert SiteState("enc-self", 4, kept=()).to_dict() == {"role": "enc-self", "num_heads": 4, "kept": ()}
    assert "kept" not in SiteState("enc-self", 4, gates=GateState()).to_dict()
    assert "alphas" not in SiteState("enc-self", 4, gates=GateState(), alphas=False).to_dict()
    mixed = {"role": "enc-self", "num_heads": 4, "alphas": True}
    assert SiteState("enc-self", 4, alphas=True).to_dict() == mixed
    assert SiteState(**mixed) == SiteState("enc-self", 4, alphas=True) != SiteState("enc-self", 4)
    assert SiteState("enc-self", 4, kept=[1, 2]) == SiteState("enc-self", 4, kept=(1, 2))
    assert hash(SiteState("enc-self", 4, kept=[1, 2], gates=GateState(stretch=[-0.1, 1.1])))


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("alphas", (False, True), ids=("plain", "mixed"))
@pytest.mark.parametrize("name", LAYOUTS)
def test_round_trip_of_heads(name, alphas, state):
    model = changed(FAMILIES[name], "per_head" if FAMILIES[name].narrows else None, state, alphas=alphas)
    record = CollabConfig.of(model.config)
    stored = json.loads(json.dumps(model.config.collab_heads))
    assert stored == record.to_dict() == model.config.collab_heads
    config = bert_config()
    setattr(config, FIELD, stored)
    assert CollabConfig.of(config) == record
    assert any(site.gates for site in record.sites.values()) == (state != "pruned")
    assert any(site.kept for site in record.sites.values()) == (state != "gated")
    assert [site.alphas for site in record.sites.values()] == [
        alphas and site.heads > 1 for site in record.sites.values()
    ]
    assert any(site.alphas for site in record.sites.values()) == alphas


def test_every_inner_stack_has_the_record_or_none():
    """T5 gives each stack a config of its own."""
    model = changed(FAMILIES["t5"], state="both", alphas=True)
    configs = [module.config for module in (model, model.encoder, model.decoder)]
    assert len({id(config) for config in configs}) == 3
    assert all(config.collab_heads == model.config.collab_heads for config in configs)
    CollabConfig().write(model)
    assert not any(hasattr(config, FIELD) for config in configs)


def test_states_are_frozen():
    state = QueryKeyState("shared", 8, 8, 0.35, True)
    with pytest.raises(AttributeError):
        state.dim = 9


def test_a_stack_says_itself_what_it_is():
    """Also that it is not changed, where the config around it says otherwise."""
    model = FAMILIES["clip"].build()
    prune_heads(model, heads={"enc-self": [[0], [1]], "dec-self": [[2], [3]]})
    whole = set(CollabConfig.of(model.config).sites)
    delattr(model.config.text_config, FIELD)
    left = set(CollabConfig.of(model.config).sites)
    assert left == {path for path in whole if not path.startswith("text_model.")} != whole


@pytest.mark.parametrize("groups", ([0, 0, 1, 10**8], [0, 0, 1, 10**30], [10**8], [-1, 0], [0, 2], [1], [0, 1, 0], []))
def test_groups_are_checked_before_anything_is_built_from_them(groups):
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=r"query_key\.groups is .*from 0 on, ascending, none left out"):
            QueryKeyState("rotary", 16, 8, 0.35, False, groups=groups)
        assert tracemalloc.get_traced_memory()[1] < 1e6  # bytes; 4 GB before, of 10**8
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", (MAX_SIZE + 1, 10**30, 10**400))
def test_no_size_is_larger_than_a_model_can_have(size):
    for make in (
        lambda: SiteState("enc-self", size, kept=(0,)),
        lambda: QueryKeyState("shared", size, 8, 0.35, True),
        lambda: QueryKeyState("shared", 8, size, 0.35, True),
        lambda: ValueState(8, size),
    ):
        with pytest.raises(ConfigError, match=f"a positive integer of at most {MAX_SIZE}"):
            make()
