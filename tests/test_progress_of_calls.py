"""Every public call shows one bar, with its phases as text, or none where nobody wants one."""

import copy

import pytest
import torch
from compressing import batches_of
from slow_cases import slow
from terminals import shown
from tokenizers_made import TEXTS, fast
from transformers import BertConfig, BertForSequenceClassification, BertModel
from transformers.utils import logging

import collab_heads as ch
from collab_heads import analysis
from families import FAMILIES

LEARNED = {"input_ids": torch.arange(5, 45).view(4, 10), "labels": torch.arange(4) % 2}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}


def bert(cls=BertModel, **more):
    torch.manual_seed(0)
    return cls(BertConfig(**SIZES, **more)).eval()


def sources(family="marian"):
    """Batches of sources alone: the model translates them."""
    return [{name: each[name] for name in ("input_ids", "attention_mask")} for each in batches_of(FAMILIES[family])]


def given():
    return batches_of(FAMILIES["bert"])


def family(name="bert"):
    return FAMILIES[name].build().eval()


def compress(_):
    ch.compress(family(), given(), 0.5, refine_steps=2)


def compress_with_translations(_):
    ch.compress(family("marian"), sources(), 0.6, refine_steps=2)


def compress_to_an_error(_):
    ch.compress(family(), given(), max_error=0.5, refine_steps=2)


def compress_to_a_time(_):
    ch.compress(family(), given(), 0.9, of="time", refine_steps=2)


def compress_by_a_plan(_):
    with_plan = family()
    made = ch.plan(with_plan, given(), refine_steps=2)
    yield
    ch.compress(with_plan, made, 0.5)


def measure_a_plan(_):
    made = ch.plan(family(), given(), refine_steps=2)
    yield
    made.measure([0.5, 0.7])


def plan(_):
    ch.plan(family(), given(), refine_steps=2)


def swap(_):
    ch.swap_to_collaborative(family(), dim_shared_query_key=16, batches=given(), refine_steps=2)


def swap_balanced(_):
    ch.swap_to_collaborative(family(), dim_shared_query_key=16, batches=given(), refine_steps=2, allocation="balanced")


def distill(_):
    model = family("marian")
    original = copy.deepcopy(model)
    ch.prune_heads(model, heads={"enc-self": [[0], [1]]})
    yield
    ch.distill(model, original, sources(), steps=5)


def prune(_):
    ch.prune_heads(family(), given(), keep=5)


def prune_by_gradient(_):
    ch.prune_heads(bert(BertForSequenceClassification), [LEARNED], keep=5, criterion="gradient")


def prune_some(_):
    ch.prune_heads(family(), given(), heads={"enc-self": [[0], [1]]})


def prune_neurons(_):
    ch.prune_neurons(family(), given(), keep=0.5)


def analyze(_):
    ch.analyze_heads(bert(BertForSequenceClassification), [LEARNED], exclude=[], parts=["statistics", "gradient"])


def analyze_all(_):
    model = bert(BertForSequenceClassification)
    ch.analyze_heads(model, [LEARNED], exclude=[], evaluate=lambda model: analysis.mean_loss(model, [LEARNED]))


def find_roles(_):
    analysis.head_roles(bert(BertForSequenceClassification), [LEARNED], exclude=[])


def find_worth(_):
    analysis.head_worth(bert(BertForSequenceClassification), [LEARNED], exclude=[])


def contributions(_):
    batches = batches_of(FAMILIES["marian"])
    for each in batches:
        each["labels"] = each.pop("decoder_input_ids")
        each.pop("decoder_attention_mask", None)
    ch.analyze_heads(family("marian"), batches, exclude=[], parts=["contributions"])


def export(place):
    ch.export(bert(), place / "out", to="transformers")


def trim(_):
    tokenizer = fast("WordPiece")
    ch.trim_vocabulary(bert(vocab_size=len(tokenizer)), tokenizer, TEXTS[:40])


SITES = ["measuring sites"]
BEGIN, END = ["counting", "calibrating", "measuring"], ["fitting sites", "measuring"]
CALLS = {
    compress: ("compress", [*BEGIN, *SITES, "fitting sites"]),
    compress_with_translations: ("compress", ["translating", *BEGIN, *SITES, "fitting sites"]),
    compress_to_an_error: ("compress", [*BEGIN, *SITES, "fitting"]),
    compress_to_a_time: ("compress", [*BEGIN, *SITES, "timing sites", "fitting sites", "timing what was chosen"]),
    compress_by_a_plan: ("compress", END),
    measure_a_plan: ("measuring budgets", None),
    plan: ("plan", [*BEGIN, *SITES]),
    swap: ("swap_to_collaborative", ["calibrating", "decomposing"]),
    swap_balanced: ("swap_to_collaborative", ["calibrating", "measuring widths", "decomposing"]),
    distill: ("distill", ["translating", "distilling"]),
    prune: ("prune_heads", ["measuring heads", "finding readers", "measuring the stream", "refitting outputs"]),
    prune_by_gradient: ("prune_heads", ["measuring heads", "refitting outputs"]),
    prune_some: ("prune_heads", ["refitting outputs"]),
    prune_neurons: ("prune_neurons", ["calibrating", "choosing neurons"]),
    analyze: ("analyze_heads", ["looking at heads", "measuring heads"]),
    analyze_all: (
        "analyze_heads",
        [
            "looking at heads",
            "finding readers",
            "measuring vectors",
            "propagating relevance",
            "measuring heads",
            "measuring the stream",
            "leaving heads out",
            "removing heads",
        ],
    ),
    find_worth: ("head_worth", ["finding readers", "measuring vectors"]),
    find_roles: ("head_roles", ["finding roles"]),
    contributions: ("analyze_heads", ["measuring contributions"]),
    export: ("export", ["checking", "writing", "comparing", "timing"]),
    trim: ("counting tokens", None),
}


LONG = (compress_with_translations, compress_to_a_time, distill)


@pytest.mark.parametrize(
    "call", [*(call for call in CALLS if call not in LONG), *slow(*LONG)], ids=lambda call: call.__name__
)
def test_a_call_shows_one_bar(call, tmp_path):
    name, phases = CALLS[call]
    with shown() as terminal:
        if (steps := call(tmp_path)) is not None:
            logging.disable_progress_bar()
            next(steps)
            logging.enable_progress_bar()
            assert next(steps, None) is None
    assert terminal.names == [name], terminal.names
    assert phases is None or terminal.phases == phases
    assert "\n" not in terminal.getvalue() and terminal.getvalue().endswith("\r")  # one line, removed in the end
    assert terminal.percentages == sorted(terminal.percentages) and terminal.percentages[-1] == 100


@pytest.mark.parametrize("call", (swap, prune, analyze_all, export, trim, *slow(compress_with_translations)))
def test_a_call_shows_nothing_when_it_is_asked_to_be_quiet(call, tmp_path, capfd):
    with shown() as terminal:
        logging.disable_progress_bar()
        call(tmp_path)
    assert not terminal.getvalue() and not capfd.readouterr().err
