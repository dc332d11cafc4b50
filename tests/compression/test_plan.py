"""A plan gets all that a budget or an error allows, to the last parameter."""

import itertools
import math
from dataclasses import replace

import pytest
from compressing import batches_of
from model_sizes import TEXT
from transformers import BertConfig, BertForSequenceClassification

from collab_heads import compress, plan
from collab_heads.base.option_values import MODEL_SHAPES
from collab_heads.compression.measures import COUNTED
from collab_heads.compression.plan import plan_of
from families import FAMILIES, make

BERT = FAMILIES["bert"]


@pytest.fixture(scope="module")
def measured():
    """Of a model whose heads have a few widths."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 16}
    model = make(BertForSequenceClassification, BertConfig(initializer_range=0.3, **sizes, **TEXT))
    return plan(model, batches_of(BERT), refine_steps=0).measured


def seconds(use, choice):
    """What no number of units divides."""
    return math.sqrt(COUNTED["parameters"](use, choice)) / 1e5


def is_even(choices):
    """Whether all blocks that keep neurons keep the same number; None where a block stays as it is."""
    return len({choice.get("neurons") for path, choice in choices.items() if path[-1].isdigit()} - {0}) <= 1


def is_uniform(choices):
    """Whether attention is as it was, and all blocks keep the same number of neurons."""
    blocks = {choice.get("neurons") for path, choice in choices.items() if path[-1].isdigit()}
    return (
        len(blocks) == 1
        and 0 not in blocks
        and all(set(dict(choice.sizes)) <= {"neurons"} for choice in choices.values())
    )


def is_for_ctranslate2(choices):
    """Whether sites have as many heads, or none, each with queries, keys and values of one width; here from 4 x 16."""
    counts = set()
    for path, choice in choices.items():
        heads, query_key, value = (choice.get(part) for part in ("heads", "query_key", "values"))
        if path[-1].isdigit() or heads == 0:
            continue
        counts.add(heads or 4)
        if (query_key or 16) != (value or 16):
            return False
    return len(counts) <= 1


def is_for_gguf(choices):
    """Whether all heads that are left keep their width."""
    return not any({"query_key", "values"} & dict(choice.sizes).keys() for choice in choices.values())


RULES = {"even": is_even, "free": lambda choices: True, "uniform": is_uniform}
RULES |= {"ctranslate2": is_for_ctranslate2, "gguf": is_for_gguf}


def unbeaten(made):
    """(share, predicted error) of all plans that no other one beats in both, by rising share."""
    plans = (dict(zip(made.by_path, each, strict=True)) for each in itertools.product(*(s.choices for s in made.sites)))
    kept = []
    allowed = filter(RULES[made.shape], plans)
    for share, error in sorted((made.share(choices), made.predicted(choices)) for choices in allowed):
        if not kept or error < kept[-1][1]:
            kept.append((share, error))
    return kept


def plan_for(measured, of, shape):
    options = replace(measured.options, of=of, shape=shape)
    return plan_of(replace(measured, options=options), COUNTED.get(of, seconds))


@pytest.mark.parametrize("shape", MODEL_SHAPES)
@pytest.mark.parametrize("of", [*COUNTED, "time"])
def test_every_budget_and_every_error_gets_the_best_that_it_allows(measured, of, shape):
    made = plan_for(measured, of, shape)
    plans = unbeaten(made)
    assert len(plans) > {"uniform": 0, "ctranslate2": 5, "gguf": 4}.get(shape, 10) and made.least == plans[0][0]
    for (share, error), (more, _) in itertools.pairwise([*plans[:-1], (1.0, 0.0)]):
        if not share:  # nothing is left: a budget is above 0
            continue
        for chosen in (made.choose(share), made.choose(math.nextafter(more, 0)), made.within(error)):
            assert (made.share(chosen), made.predicted(chosen)) == (share, error)


def test_a_plan_that_costs_exactly_the_budget_is_found(measured):
    made = plan_for(measured, "cache", "free")
    plans = unbeaten(made)
    share, best = plans[len(plans) // 2]
    report = compress(measured.model, made, share)
    assert report.costs["cache"].share == share
    assert report.predicted_error == best
