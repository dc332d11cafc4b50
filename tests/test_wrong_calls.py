"""Whatever a public function is given, it answers, or says in an error of ours what is wrong and changes nothing."""

import functools
import inspect
import itertools
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from changed_heads import gate, mix
from model_inputs import batch
from model_runs import swap
from public_names import functions, objects
from safetensors.torch import save_file
from tokenizers_made import FEW, fast
from transformers import BertConfig, BertModel, PreTrainedModel, PreTrainedTokenizerFast
from unchanged import assert_unchanged, snapshot

import collab_heads
from collab_heads import CollabHeadsError
from collab_heads.contract import registry
from collab_heads.errors import LONGEST
from collab_heads.trainer.heads_file import FILE, head_tensors
from families import FAMILIES

RAW = 3
LONG = 30.0  # seconds of a call; the slowest takes three
SITE = "encoder.layer.0.attention.self"
WRONG: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "zero": lambda: 0,
    "negative": lambda: -1,
    "fraction": lambda: 1.5,
    "NaN": lambda: math.nan,
    "huge": lambda: 2**70,
    "empty text": lambda: "",
    "text": lambda: "x",
    "long text": lambda: "x" * 300,
    "no path": lambda: "/nowhere/at/all",
    "bytes": lambda: b"x",
    "empty list": lambda: [],
    "list of None": lambda: [None],
    "list of huge": lambda: [2**70],
    "list of texts": lambda: ["x", "y"],
    "empty dict": lambda: {},
    "dict": lambda: {"x": 1},
    "dict of None": lambda: {None: None},
    "role of None": lambda: {"enc-self": None},
    "object": object,
    "class": lambda: int,
    "function": lambda: lambda *anything: None,
    "module": lambda: torch.nn.Linear(2, 2),
    "tensor": lambda: torch.ones(3),
    "meta tensor": lambda: torch.ones(3, device="meta"),
    "meta batch": lambda: [{"input_ids": torch.ones(2, 3, dtype=torch.long, device="meta")}],
    "odd batch": lambda: [{1: None}],
    "inf": lambda: math.inf,
    "list of lists": lambda: [[]],
    "surrogate": lambda: "\udcff",
    "name of a tensor": lambda: [torch.tensor(3)],
    "0-d tensor": lambda: torch.tensor(3),
    "0-d NaN": lambda: torch.tensor(math.nan),
    "0-d array": lambda: np.array(3),
    "role of a 0-d tensor": lambda: {"enc-self": torch.tensor(3)},
    "role of NaN": lambda: {"enc-self": math.nan},
    "long list": lambda: list(range(5000)),
    "long list of texts": lambda: [f"x{i}" for i in range(5000)],
    "long dict": lambda: {f"x{i}": i for i in range(5000)},
    "role of a long list": lambda: {"enc-self": list(range(5000))},
    "role of long lists": lambda: {"enc-self": [list(range(5000))] * 2},
    "site of a long list": lambda: {SITE: list(range(5000))},
    "site of a long tensor": lambda: {SITE: torch.arange(5000.0)},
    "site of NaN": lambda: {SITE: [math.nan, 1, 1, 1]},
}
SAMPLE = ("bytes", "dict of None", "meta batch", "0-d tensor")
# Batches of which something is wrong, made of one that is right.
ODD: dict[str, Callable[[dict], Any]] = {
    "no batch": lambda right: [],
    "none": lambda right: None,
    "an empty dict": lambda right: [{}],
    "no ids": lambda right: [{"attention_mask": right["attention_mask"]}],
    "ids of floats": lambda right: [right | {"input_ids": right["input_ids"].float()}],
    "ids of bools": lambda right: [right | {"input_ids": right["input_ids"].bool()}],
    "ids out of range": lambda right: [right | {"input_ids": right["input_ids"] + 10**6}],
    "negative ids": lambda right: [right | {"input_ids": right["input_ids"] - 10**6}],
    "ids as a list": lambda right: [right | {"input_ids": right["input_ids"].tolist()}],
    "ids as an array": lambda right: [right | {"input_ids": right["input_ids"].numpy()}],
    "one row": lambda right: [right | {"input_ids": right["input_ids"][0]}],
    "a rank too many": lambda right: [right | {"input_ids": right["input_ids"][None, None]}],
    "a 0-d tensor": lambda right: [right | {"input_ids": torch.tensor(3)}],
    "no rows": lambda right: [{name: value[:0] for name, value in right.items()}],
    "no tokens": lambda right: [{name: value[:, :0] for name, value in right.items() if value.ndim > 1}],
    "ragged": lambda right: [right | {"attention_mask": right["attention_mask"][:, :-1]}],
    "fewer masks": lambda right: [right | {"attention_mask": right["attention_mask"][:-1]}],
    "a mask of NaN": lambda right: [right | {"attention_mask": right["attention_mask"] * math.nan}],
    "a mask of zeros": lambda right: [right | {"attention_mask": right["attention_mask"] * 0}],
    "a mask of text": lambda right: [right | {"attention_mask": "all"}],
    "a number": lambda right: [right | {"input_ids": 3}],
    "an unknown input": lambda right: [right | {"nonsense": torch.ones(2)}],
    "the second is a list": lambda right: [right, [right]],
    "a tuple": lambda right: [tuple(right.items())],
    "fails when read": lambda right: (1 / 0 for _ in range(3)),
}
TAKING_BATCHES = (
    "analyze_heads",
    "compress",
    "distill",
    "head_importance",
    "head_relevance",
    "head_roles",
    "head_statistics",
    "head_worth",
    "mean_loss",
    "plan",
    "prune_heads",
    "prune_neurons",
    "swap_to_collaborative",
)
# What is right, and takes long, or is a function of a user's that fails by itself.
RIGHT = {
    "huge": {"steps", "refine_steps", "num_examples", "contribution_sentences", "patience"},
    "class": {"evaluate", "target", "task"},
    "module": {"evaluate", "target", "task"},
}


class Call(NamedTuple):
    """A call that works: of what, a model for it (None where it takes none), and its other arguments."""

    build: Callable[[], PreTrainedModel] | None
    arguments: Callable[[Path], dict[str, Any]]
    function: Callable | None = None  # where it is not the public name itself


def bert() -> PreTrainedModel:
    return FAMILIES["bert"].build()


def marian() -> PreTrainedModel:
    return FAMILIES["marian"].build()


def llama() -> PreTrainedModel:
    return FAMILIES["llama"].build()


def swapped() -> PreTrainedModel:
    model = bert()
    swap(model, "shared", 16)
    model(**batch(), output_hidden_states=True)  # from then on it has hooks of transformers, which stay
    return model


def gated() -> PreTrainedModel:
    model = bert()
    gate(model, empty=False)
    return model


def mixed() -> PreTrainedModel:
    model = gated()
    mix(model)
    return model


def scores() -> dict[str, torch.Tensor]:
    return {path: torch.arange(4.0) for path in (SITE, SITE.replace("0", "1"))}


def labelled(name: str = "bert") -> list[dict[str, torch.Tensor]]:
    inputs = batch(decoder=name == "marian")
    labels = torch.tensor([0, 1, 0]) if name == "bert" else inputs["decoder_input_ids"].clone()
    return [inputs | {"labels": labels}] * 2


def eight(model: str = "bert") -> list[dict[str, torch.Tensor]]:
    return [batch() for _ in range(8)]


def one(model: PreTrainedModel) -> float:
    return 1.0


def folder_of_heads(folder: Path) -> Path:
    save_file(head_tensors(gated().base_model), folder / FILE)
    return folder


@functools.cache
def words() -> PreTrainedTokenizerFast:
    return fast("WordPiece")


def of_words() -> PreTrainedModel:
    """A BERT for `words`."""
    torch.manual_seed(0)
    return BertModel(BertConfig(vocab_size=len(words()), hidden_size=32, num_hidden_layers=1, num_attention_heads=4))


def scored(folder: Path) -> dict[str, Any]:
    rows = [{"sentence1": text, "sentence2": other, "score": 1} for text, other in itertools.pairwise(FEW)]
    return {"original": of_words(), "changed": of_words(), "task": "similarity", "data": rows, "tokenizer": words()}


def exported(folder: Path) -> Path:
    """A folder for ONNX Runtime."""
    if not (folder / "served").exists():
        collab_heads.export(bert(), folder / "served")
    return folder / "served"


def within(model, heads):
    with collab_heads.analysis.without_heads(model, heads):
        pass


def rotated(model, **settings):
    rotation = collab_heads.training.HeadRotation(**settings)
    rotation.check(model, 4)
    rotation.apply(model, epoch=1, batches=labelled())


def trained(model, **settings):
    return collab_heads.training.HeadTraining(**settings)


class OfATest(collab_heads.get_adapter(bert()).__class__):
    """An adapter that may be registered."""

    model_types = ("of-a-test",)


CALLS = {
    "ablation_curve": Call(gated, lambda tmp: {"evaluate": one, "scores": scores()}),
    "analyze_heads": Call(bert, lambda tmp: {"batches": labelled(), "parts": ["statistics"], "num_examples": 1}),
    "collaborative_config": Call(None, lambda tmp: {"config": bert().config, "dim_shared_query_key": 16}),
    "compare_contributions": Call(None, lambda tmp: {"models": {"a": marian()}, "batches": labelled("marian")}),
    "compress": Call(bert, lambda tmp: {"batches": eight(), "budget": 0.5, "refine_steps": 0}),
    "distill": Call(swapped, lambda tmp: {"original": bert(), "batches": eight(), "steps": 1}),
    "evaluate": Call(None, scored),
    "export": Call(bert, lambda tmp: {"folder": tmp / "new", "to": "transformers"}),
    "fold_heads": Call(gated, lambda tmp: {}),
    "generate_batches": Call(llama, lambda tmp: {"count": 3, "length": 8}),
    "inspect": Call(mixed, lambda tmp: {}),
    "get_adapter": Call(bert, lambda tmp: {}),
    "head_importance": Call(bert, lambda tmp: {"batches": labelled()}),
    "head_relevance": Call(bert, lambda tmp: {"batches": labelled()}),
    "head_roles": Call(bert, lambda tmp: {"batches": labelled()}),
    "head_statistics": Call(bert, lambda tmp: {"batches": labelled()}),
    "head_worth": Call(bert, lambda tmp: {"batches": labelled()}),
    "leave_one_out": Call(bert, lambda tmp: {"evaluate": one}),
    "load_exported": Call(None, lambda tmp: {"folder": exported(tmp), "threads": 1}),
    "load_heads": Call(gated, lambda tmp: {"folder": folder_of_heads(tmp)}),
    "maps_in_place": Call(bert, lambda tmp: {"attentions": [torch.ones(1, 4, 3, 3)] * 2}),
    "mean_loss": Call(bert, lambda tmp: {"batches": labelled()}),
    "model_card": Call(gated, lambda tmp: {"metrics": {"loss": 1.0}}),
    "most_important": Call(bert, lambda tmp: {"scores": scores(), "target_heads": 4}),
    "peft_targets": Call(bert, lambda tmp: {}),
    "plan": Call(bert, lambda tmp: {"batches": eight(), "refine_steps": 0}),
    "prune_heads": Call(bert, lambda tmp: {"heads": {SITE: [0]}}),
    "prune_neurons": Call(bert, lambda tmp: {"batches": [batch()], "keep": 0.5}),
    "register": Call(None, lambda tmp: {"adapter": OfATest}),
    "save_heads": Call(gated, lambda tmp: {"folder": tmp}),
    "scorer": Call(None, lambda tmp: {name: scored(tmp)[name] for name in ("task", "data", "tokenizer")}),
    "supported_model_types": Call(None, lambda tmp: {}),
    "rotate_heads": Call(bert, lambda tmp: {"pairs": [((SITE, 0), (SITE, 1))]}),
    "swap_to_alpha": Call(bert, lambda tmp: {}),
    "swap_to_collaborative": Call(bert, lambda tmp: {"dim_shared_query_key": 16, "refine_steps": 1}),
    "swap_to_gated": Call(bert, lambda tmp: {}),
    "token_contributions": Call(marian, lambda tmp: {"batches": labelled("marian")}),
    "trim_vocabulary": Call(of_words, lambda tmp: {"tokenizer": words(), "texts": FEW}),
    "without_heads": Call(bert, lambda tmp: {"heads": {SITE: [0]}}, within),
    "HeadPenalty": Call(mixed, lambda tmp: {"target_heads": 4, "steps": 3, "growth": 0.1}),
    "HeadRotation": Call(bert, lambda tmp: {"policy": "random"}, rotated),
    "HeadTraining": Call(bert, lambda tmp: {"gate_weight": 0.1}, trained),
}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    """What a call writes to is there; what is registered is gone afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_ADAPTERS", dict(registry._ADAPTERS))


def parameters(public: str) -> list[str]:
    found = inspect.signature(objects()[public]).parameters.values()
    return [each.name for each in found if each.kind is not each.VAR_KEYWORD]


def raw_calls(public: str, folder: Path, wrong: tuple[str, ...]) -> tuple[int, list[str]]:
    """How many calls of a function with one wrong argument were made, and which of them ended as none should."""
    given = {
        f"{parameter}={kind}": lambda parameter=parameter, kind=kind: {parameter: WRONG[kind]()}
        for parameter in parameters(public)
        for kind in wrong
        if parameter not in RIGHT.get(kind, ())
    }
    return raw_answers(public, folder, given)


def odd_calls(public: str, folder: Path) -> tuple[int, list[str]]:
    """The same with one odd batch each."""
    right = {name: value for name, value in labelled()[0].items() if name != "labels"}
    given = {f"batches={kind}": lambda make=make: {"batches": make(dict(right))} for kind, make in ODD.items()}
    return raw_answers(public, folder, given)


def raw_answers(public: str, folder: Path, wrong: dict[str, Callable[[], dict]]) -> tuple[int, list[str]]:
    """Call a function with each of some wrong arguments."""
    call, made, found = CALLS[public], 0, []
    function = call.function or objects()[public]
    model = None if call.build is None else call.build()
    before = None if model is None else snapshot(model)
    for name, make in wrong.items():
        given = {} if model is None else {"model": model}
        given |= call.arguments(folder) | make()
        said, started, made = f"{public}({name})", time.monotonic(), made + 1
        answered = True
        try:
            function(**given)
        except CollabHeadsError as error:
            answered = False
            if not 20 <= len(str(error)) <= LONGEST:
                found.append(f"{said}: {type(error).__name__}: {len(str(error))} characters: {error!s:.100}")
        except ZeroDivisionError as error:  # of the caller's own generator
            answered = False
            if "fails when read" not in said:
                found.append(f"{said}: {type(error).__name__}: {error!s:.100}")
        except Exception as error:
            answered = False
            found.append(f"{said}: {type(error).__name__}: {error!s:.100}")
        if time.monotonic() - started > LONG:
            found.append(f"{said}: took {time.monotonic() - started:.0f} s")
        if model is None or before is None or call.build is None:
            continue
        if not answered:
            try:
                assert_unchanged(model, before)
                continue
            except AssertionError as error:
                found.append(f"{said}: changed the model: {error!s:.300}")
        model = call.build()
        before = snapshot(model)
    return made, found


def test_every_public_function_is_called():
    assert functions().keys() <= CALLS.keys()


WRITES_A_GRAPH = {"load_exported"}


@pytest.mark.parametrize(
    "public", [pytest.param(name, marks=[pytest.mark.slow] * (name in WRITES_A_GRAPH)) for name in CALLS]
)
def test_a_sample_of_wrong_calls(public, tmp_path):
    made, found = raw_calls(public, tmp_path, SAMPLE)
    assert made >= len(SAMPLE) * len(parameters(public)) and not found, "\n".join(found)


@pytest.mark.parametrize("public", ("head_statistics", "prune_neurons"))
def test_a_sample_of_odd_batches(public, tmp_path):
    made, found = odd_calls(public, tmp_path)
    assert made == len(ODD) and not found, "\n".join(found)


@pytest.mark.slow
def test_a_thousand_wrong_calls(tmp_path, caplog):
    caplog.set_level(logging.CRITICAL)
    counts = [raw_calls(public, tmp_path, tuple(WRONG)) for public in CALLS]
    counts += [odd_calls(public, tmp_path) for public in TAKING_BATCHES]
    raw = [said for _, found in counts for said in found]
    assert sum(made for made, _ in counts) > 3000
    assert len(raw) <= RAW, "\n".join([f"{len(raw)}:", *raw])
