"""A record that was damaged or edited is refused in words of ours, or says the same: none loads as another model."""

import copy
import json
import os
import random
import resource
from collections import Counter

import pytest
import torch
from changed_heads import changed
from compressing import batches_of
from model_runs import aligned, output, swap
from transformers import AutoConfig

from collab_heads import prune_heads, prune_neurons, swap_to_collaborative, swap_to_gated
from collab_heads.errors import ConfigError
from collab_heads.sites.record import FIELD
from families import FAMILIES

GIGABYTE = 1 << 30
VALUES = (0, 1, -1, 2, 3, 8, 16, 10**8, 10**30, 10**400, True, False, None, "", "4", "shared", 0.5, 1.0, float("nan"))
VALUES = (*VALUES, [], {}, [0], [[0]], {"dim": 4}, float("inf"), -0.0, 1e300)


def narrow_llama():
    """Groups, removed heads, pairs and narrower values."""
    model = FAMILIES["llama"].build()
    swap_to_collaborative(model, dim_shared_query_key=0.5, dim_value=0.5, kind="per_head")
    prune_heads(model, heads={"dec-self": [[1], [2]]})
    return model


def pruned_bert():
    model = FAMILIES["bert"].build()
    prune_heads(model, heads={"enc-self": [[1], [0, 2]]})
    return model


def gated_bert():
    model = FAMILIES["bert"].build()
    swap_to_gated(model, alive_heads={"enc-self": [[1, 0, 1, 0], [0, 0, 1, 1]]})
    return model


def bert_with_fewer_neurons():
    """Removed neurons beside removed heads."""
    model = pruned_bert()
    prune_neurons(model, batches_of(FAMILIES["bert"], 4), keep=0.5)
    return model


def narrow_marian():
    model = FAMILIES["marian"].build()
    swap(model, "shared+values", 20)
    return model


MODELS = {
    "llama-narrow": narrow_llama,
    "bert-pruned": pruned_bert,
    "bert-gated": gated_bert,
    "bert-all": lambda: changed(FAMILIES["bert"], "shared", "both", alphas=True, dtype=torch.float32),
    "bert-neurons": bert_with_fewer_neurons,
    "marian-narrow": narrow_marian,
    "clip-gated": lambda: changed(FAMILIES["clip"], None, "both", dtype=torch.float32),
}


class Stored:
    """The files of a model, and what it computes."""

    def __init__(self, name, folder):
        model = MODELS[name]()
        model.save_pretrained(folder)
        self.folder, self.load, self.inputs = folder, type(model).from_pretrained, FAMILIES[name.split("-")[0]].inputs()
        self.config = json.loads((folder / "config.json").read_text())
        self.expected = self.computed()

    def computed(self):
        return output(aligned(self.load(self.folder).eval()), self.inputs)

    def with_config(self, config):
        """What the weights do under another config: load as the model that was saved, or how they refuse."""
        (self.folder / "config.json").write_text(json.dumps(config))
        try:
            found = self.computed()
        except ConfigError as error:
            assert len(str(error)) < 5000
            return "refused"
        assert torch.equal(found, self.expected), "it loads, and is another model"
        return "the same"


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    return {name: Stored(name, tmp_path_factory.mktemp(name)) for name in MODELS}


def places(part, path=()):
    """Every place in a record."""
    yield path
    for key in part if isinstance(part, dict) else range(len(part)) if isinstance(part, list) else ():
        yield from places(part[key], (*path, key))


def at(part, path):
    for key in path:
        part = part[key]
    return part


def mutant(record, chance, others):
    """A record in which one to three things are another."""
    record = copy.deepcopy(record)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        found = [path for path in places(record) if path]
        if not found:
            return record
        *above, key = chance.choice(found)
        inside, value = at(record, above), at(record, (*above, key))
        what = chance.choice(("delete", "value", "value", "near", "shorten", "swap", "rename", "other"))
        if what == "delete":
            del inside[key]
        elif what == "near" and type(value) in (int, float):
            inside[key] = value + chance.choice((-2, -1, 1, 2))
        elif what == "shorten" and isinstance(value, list) and value:
            value.pop(chance.randrange(len(value)))
        elif what == "swap":
            other = chance.choice(list(inside) if isinstance(inside, dict) else range(len(inside)))
            inside[key], inside[other] = inside[other], inside[key]
        elif what == "rename" and isinstance(inside, dict):
            inside[chance.choice(("kept", "dim", "values", f"{key}.0", key.replace("0", "1")))] = inside.pop(key)
        elif what == "other":
            other = chance.choice(others)
            inside[key] = copy.deepcopy(at(other, chance.choice(list(places(other)))))
        else:
            inside[key] = copy.deepcopy(chance.choice(VALUES))
    return record


def check_mutants(stored, count, seed):
    """Load so many, of all models in turn; how many were refused, and how many said the same."""
    chance, told, before = random.Random(seed), Counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    records = [each.config[FIELD] for each in stored.values()]
    for number in range(count):
        name, each = list(stored.items())[number % len(stored)]
        changed_record = mutant(each.config[FIELD], chance, records)
        try:
            what = each.with_config(each.config | {FIELD: changed_record})
        except Exception as error:
            raise AssertionError(f"mutant {number} of {name}: {json.dumps(changed_record)[:1000]}") from error
        told[what] += 1
        used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        assert used < GIGABYTE, f"mutant {number} of {name} takes {used:,} bytes: {json.dumps(changed_record)[:1000]}"
    return told


@pytest.mark.slow
def test_a_hundred_mutants(stored):
    assert check_mutants(stored, 100, seed=0)["refused"] > 80


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="it has no such count of memory")
def test_three_thousand_mutants(stored):
    assert check_mutants(stored, 3000, seed=28)["refused"] > 2500


def without_a_site(record):
    record["sites"].popitem()


def without_values(record):
    for site in record["sites"].values():
        del site["values"]


def other_heads(record):
    """As many: the shapes are the same."""
    first = next(iter(record["sites"].values()))
    assert first["kept"] == [0, 2, 3]
    first["kept"] = [1, 2, 3]


def without_alphas(record):
    for site in record["sites"].values():
        site.pop("alphas", None)


EDITS = {
    "llama-narrow": without_values,
    "bert-pruned": other_heads,
    "bert-gated": without_a_site,
    "bert-all": without_alphas,
    "bert-neurons": without_a_site,
    "marian-narrow": without_values,
    "clip-gated": without_a_site,
}


def edited(each, name):
    record = copy.deepcopy(each.config[FIELD])
    EDITS[name](record)
    return each.config | {FIELD: record}


@pytest.mark.parametrize("name", EDITS)
def test_edits_that_may_fit_the_weights(name, stored):
    assert stored[name].with_config(edited(stored[name], name)) == "refused"


def test_without_the_tie_some_are_silent(stored, monkeypatch):
    """What these tests would see."""
    monkeypatch.setattr("collab_heads.saving.ties.check_tie", lambda config, files: True)
    with pytest.raises(AssertionError, match="another model"):
        stored["bert-gated"].with_config(edited(stored["bert-gated"], "bert-gated"))


@pytest.mark.parametrize("name", MODELS)
def test_a_config_without_its_record(name, stored):
    each = stored[name]
    config = {key: value for key, value in each.config.items() if key != FIELD}
    for stack in ("text_config", "vision_config"):
        if stack in config:
            config[stack] = {key: value for key, value in config[stack].items() if key != FIELD}
    (each.folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"model\.safetensors does not belong to its config.*records no change"):
        each.load(each.folder)
    assert not hasattr(AutoConfig.from_pretrained(each.folder), FIELD)


def test_the_order_of_a_record_says_nothing(stored):
    each = stored["bert-all"]
    text = json.dumps(each.config | {FIELD: each.config[FIELD]}, sort_keys=True)
    assert each.with_config(json.loads(text)) == "the same"
