"""`multiple_of`: the widths of all layers that become smaller, and what a plan says of widths that it cannot meet."""

import pytest
from compressing import batches_of
from model_sizes import HEADS, TEXT, WIDTH
from opening import layers_of
from torch import nn
from transformers import BertConfig, BertForSequenceClassification
from unchanged import refused

from collab_heads import compress, plan
from collab_heads.compression.parts.table import resized
from collab_heads.errors import ArgumentError
from collab_heads.layers.layout import widths
from families import FAMILIES, make

BERT = FAMILIES["bert"]
BUDGETS, MULTIPLE = (0.7, 0.3), 12


def layer_widths(model):
    """The widths, in and out, of all projections of attention and of feed-forward blocks, without the content bias."""
    found = [widths(module) for block in layers_of(model).feed_forwards for module in block.modules]
    for site in layers_of(model).attention:
        found.append(widths(site.output))
        if site.num_heads:
            made = [site.query_key.shared_query, site.query_key.shared_key] if site.query_key else site.projections
            found += [(part.in_features, part.out_features) for part in (site.value, *made)]
    return {width for pair in found for width in pair}


@pytest.mark.slow
def test_widths_that_change_are_multiples(family, kind):
    free = plan(family.build(), batches_of(family), kind=kind, refine_steps=0)
    every = [(use.shape, choice) for path, use in free.measured.uses.items() for choice in free.by_path[path].choices]
    assert any(width % MULTIPLE for shape, choice in every for width in resized(shape, choice).inner_widths)
    for budget in BUDGETS:
        model = family.build()
        stock = layer_widths(model)
        report = compress(model, batches_of(family), budget, kind=kind, multiple_of=MULTIPLE, refine_steps=0)
        assert report.costs["parameters"].share <= budget
        assert not [width for width in layer_widths(model) - stock if width % MULTIPLE]


@pytest.mark.slow
def test_64_of_a_model_of_usual_widths():
    """Heads of width 32. A quarter of the sizes is left, and still most of a budget is used."""
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 512, "num_hidden_layers": 2}
    model = make(BertForSequenceClassification, BertConfig(initializer_range=0.3, **sizes, **TEXT))
    made = plan(model, batches_of(BERT), multiple_of=64, refine_steps=0)
    shares = {budget: made.share(made.choose(budget)) for budget in (0.75, 0.5, 0.25)}
    assert all(0.8 * budget < share <= budget for budget, share in shares.items()), shares
    compress(model, made, 0.4)
    assert {width % 64 for width in layer_widths(model)} == {0} and 64 in layer_widths(model)


def test_a_width_that_no_multiple_fits_stays_or_goes_whole(caplog):
    """Heads of width 8, four of them: no smaller width is a multiple of 32."""
    model = BERT.build()
    made = plan(model, batches_of(BERT), multiple_of=WIDTH, refine_steps=0)
    assert "multiple_of=32: 2 of the 4 sites have other widths now" in caplog.text
    assert "encoder.layer.0 (37), encoder.layer.1 (37)" in caplog.text and "attention" not in caplog.text
    assert made.least < 0.1
    compress(model, made, 0.3)
    assert all(site.num_heads in (0, HEADS) for site in layers_of(model).with_heads)
    assert isinstance(model.base_model.encoder.layer[0].output.dense, nn.Linear)


@pytest.mark.parametrize("value", [0, -64, True, 64.0])
def test_what_is_no_multiple_is_refused(value):
    model = BERT.build()
    with refused(model, ArgumentError, "multiple_of"):
        plan(model, batches_of(BERT), multiple_of=value)
