"""export: every engine runs what was written, and gives what PyTorch gives; what is refused leaves nothing behind."""

import copy
import errno
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from changed_heads import change_heads, mix
from compressing import batches_of
from model_runs import swap
from model_sizes import NARROW, VOCABULARY
from opening import layers_of
from served_outputs import ENGINE_NOISE, assert_same_outputs, assert_same_tokens, text_batch
from slow_cases import slow
from torch import nn
from transformers import T5ForConditionalGeneration

from collab_heads import CollabHeadsError, compress, export, load_exported, prune_heads, prune_neurons
from collab_heads.base.extras import MissingPackageError
from collab_heads.errors import (
    ArgumentError,
    CalibrationError,
    ModelStateError,
    NonFiniteError,
    OutputError,
    UnsupportedModelError,
)
from collab_heads.serving.comparison import Comparison
from collab_heads.serving.export import ROUNDINGS, TARGETS, ExportReport, check_difference
from families import FAMILIES

pytest.importorskip("transformers.exporters.runners", reason="exports of graphs need transformers 5.23")


def compressed(model, family):
    compress(model, batches_of(family, 4), 0.4, refine_steps=0)


def uniform(model, family):
    compress(model, batches_of(family, 4), 0.9, refine_steps=0, shape="uniform")


def one_layer_gone(model, family):
    """The attention and the feed-forward block of a layer; heads and neurons of the others."""
    prune_neurons(model, batches_of(family), keep=16)
    first = layers_of(model).feed_forwards[0].path
    prune_neurons(model, batches_of(family), keep={first: 0})
    change_heads(model, "pruned")


CHANGES = {
    "stock": lambda model, family: None,
    "per_head": lambda model, family: swap(model, "per_head", NARROW["per_head"]),
    "shared": lambda model, family: swap(model, "shared", NARROW["shared"]),
    "compressed": compressed,
    "uniform": uniform,
    "fewer heads": lambda model, family: change_heads(model, "pruned"),
    "fewer neurons": lambda model, family: prune_neurons(model, batches_of(family), keep=16),
    "a layer gone": one_layer_gone,
    "gated": lambda model, family: change_heads(model, "gated"),
    "mixed": lambda model, family: mix(model),
}
GRID = ("stock", "compressed", "a layer gone", "shared")  # of every family; one of each kind has all
GRAPHS = ("onnx", "openvino")


def cases(whole, names):
    """(engine, family, change): all changes of one family and some of others."""
    return [
        (to, name, change)
        for to in GRAPHS
        for name in (whole, *names)
        for change in (CHANGES if name == whole else GRID)
        if FAMILIES[name].shares or change != "shared"
    ]


def changed(name, change):
    model = FAMILIES[name].build()
    CHANGES[change](model, FAMILIES[name])
    return model.eval()


ENCODERS = (
    "distilbert",
    "albert-groups",
    "mpnet",
    "deberta-v2",
    "modernbert",
    "eurobert",
    "esm",
    "esm-rotary",
    "t5-encoder",
)


def assert_same_with_other_shapes(model, served, left=True):
    for shape in ((1, 4), (3, 17), *[(3, 17, True)] * left):
        assert_same_outputs(model, served, text_batch(*shape))


@pytest.mark.slow
def test_an_encoder_with_other_rows_and_lengths(folder):
    assert_same_with_other_shapes(FAMILIES["bert"].build().eval(), load_exported(folder, threads=1))


@pytest.mark.slow
@pytest.mark.parametrize("to, name, change", cases("bert", ENCODERS))
def test_encoders_with_other_rows_and_lengths(to, name, change, tmp_path):
    model = changed(name, change)
    report = export(model, tmp_path / "served", to)
    assert report.difference <= ENGINE_NOISE and report.agreeing is None and not report.int8
    size = sum(file.stat().st_size for file in (tmp_path / "served").iterdir() if file.suffix != ".md")  # the card
    assert report.megabytes <= size / 1e6 <= report.megabytes + 1e-3  # a manifest of the folder
    card = (tmp_path / "served/README.md").read_text()
    assert "MB in this folder" in card and str(tmp_path) not in card
    size = 1e6 * report.megabytes
    assert f"{to}: {size / 1e6:.1f} MB" in str(report)
    # modernbert pools the first token, whose window holds padding only: engines differ
    assert_same_with_other_shapes(model, load_exported(tmp_path / "served", threads=1), left=name != "modernbert")


# mistral, ministral and gemma3 have a window of 5 tokens, which the texts below outgrow
DECODERS = ("opt", "biogpt", "llama", "qwen2", "qwen3", "mistral", "ministral", "gemma", "gemma3", "granite")


@pytest.mark.slow
@pytest.mark.parametrize("to, name, change", cases("gpt2", DECODERS))
def test_decoders_generate_with_their_cache(to, name, change, tmp_path):
    model = changed(name, change)
    report = export(model, tmp_path / "served", to)
    assert report.difference <= ENGINE_NOISE and report.agreeing == 1
    served = load_exported(tmp_path / "served", threads=1)
    for rows, length in ((1, 3), (3, 9)):
        assert_same_tokens(model, served, text_batch(rows, length, left=True))
        assert_same_outputs(model, served, text_batch(rows, length))


@pytest.mark.slow
@pytest.mark.parametrize("window", (5, 512))
@pytest.mark.parametrize("name", ("mistral", "gemma3"))
@pytest.mark.parametrize("to", GRAPHS)
def test_a_sliding_window_hides_what_the_cache_keeps(to, name, window, tmp_path):
    """Prompts shorter and longer than the window; a cache that is cut to it fails in both engines."""
    model = FAMILIES[name].build().eval()
    model.config.sliding_window = window
    report = export(model, tmp_path / "served", to)
    assert report.difference <= ENGINE_NOISE and report.agreeing == 1
    served = load_exported(tmp_path / "served", threads=1)
    options = {"do_sample": False, "max_new_tokens": 20, "min_new_tokens": 20}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    for rows, length in ((1, 3), (3, 20)):
        batch = text_batch(rows, length, left=True)
        expected, found = (each.generate(**batch, **options) for each in (model, served))
        assert torch.equal(found.sequences, expected.sequences)
        a, b = (torch.stack(each.logits) for each in (expected, found))
        torch.testing.assert_close(b, a, rtol=0, atol=ENGINE_NOISE * float(a.abs().max()))
        assert_same_outputs(model, served, text_batch(rows, length))
    model.config.sliding_window = 10 if window == 5 else 5  # what a window hides counts in these models
    assert not torch.equal(model.generate(**batch, **options).logits[0], expected.logits[0])


@pytest.mark.slow
def test_a_decoder_after_a_recipe_for_executorch(tmp_path):
    """That registers caches in a form of its own, for the whole process."""
    FAMILIES["gpt2"].build().save_pretrained(tmp_path / "model")
    code = (
        "from transformers import GPT2LMHeadModel; from transformers.integrations import executorch; "
        "from collab_heads import export; executorch.register_dynamic_cache_export_support(); "
        f"model = GPT2LMHeadModel.from_pretrained({str(tmp_path / 'model')!r}).eval(); "
        f"[export(model, {str(tmp_path)!r} + '/' + to, to) for to in {GRAPHS}]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=120)


@pytest.mark.parametrize("name, call", [("bert", "__call__"), ("gpt2", "generate")])
def test_an_error_of_an_engine_names_it_and_the_model(name, call, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("GatherND: invalid index 13\nmore")

    model = FAMILIES[name].build().eval()
    monkeypatch.setattr(TARGETS["onnx"], "load", lambda model, folder: type("Served", (), {call: fail})())
    message = f"onnx fails on {type(model).__name__}, as transformers' exporter wrote it: GatherND: invalid index 13$"
    with pytest.raises(UnsupportedModelError, match=message):
        TARGETS["onnx"].compare(model, tmp_path, [text_batch(2, 6)], None)
    monkeypatch.setattr(model, "forward", fail)  # the original's own
    with pytest.raises(RuntimeError, match=r"^GatherND"):
        TARGETS["onnx"].compare(model, tmp_path, [text_batch(2, 6)], None)


@pytest.mark.slow
@pytest.mark.parametrize("to, name, change", cases("marian", ("bart", "t5")))
def test_encoder_decoders_generate_with_their_caches(to, name, change, tmp_path):
    """OpenVINO ends the process if the graph passes the keys and values of the source on."""
    model = changed(name, change)
    report = export(model, tmp_path / "served", to)
    assert report.difference <= ENGINE_NOISE and report.agreeing == 1
    served = load_exported(tmp_path / "served", threads=1)
    for rows, length in ((1, 4), (3, 9)):
        assert_same_tokens(model, served, text_batch(rows, length))
    batch = text_batch(3, 9) | {"decoder_input_ids": text_batch(3, 5, seed=4)["input_ids"]}  # the graph takes one token
    with torch.no_grad():
        expected, found = (each(**batch).logits for each in (model, served))
    torch.testing.assert_close(found, expected, rtol=0, atol=ENGINE_NOISE * float(expected.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("to, name, change", cases("vit", ("dinov2", "deit", "clip", "siglip", "wav2vec2", "whisper")))
def test_images_and_sound(to, name, change, tmp_path):
    report = export(changed(name, change), tmp_path / "served", to)
    assert report.difference <= ENGINE_NOISE and report.agreeing in (None, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("bert", "gpt2"))
def test_a_stock_checkpoint_loads_without_this_package(name, tmp_path):
    model = FAMILIES[name].build()
    prune_neurons(model, batches_of(FAMILIES[name]), keep=16)
    report = export(model, tmp_path / "stock", "transformers")
    assert report.difference <= ENGINE_NOISE and "have 16 neurons now" in str(report)
    batch = text_batch(2, 6)
    torch.save([batch, model(**batch)[0]], tmp_path / "expected.pt")
    code = (
        "import sys, torch, transformers; "
        f"model = transformers.{type(model).__name__}.from_pretrained({str(tmp_path / 'stock')!r}).eval(); "
        f"batch, expected = torch.load({str(tmp_path / 'expected.pt')!r}); "
        "torch.testing.assert_close(model(**batch)[0], expected, rtol=0, atol=1e-6); "
        "assert not [name for name in sys.modules if name.startswith('collab_heads')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=120)


IN_A_CONFIG = ("stock", "gated", "mixed", "uniform", "fewer heads", "fewer neurons", "a layer gone")
UNIFORM = ("distilbert", "albert-groups", "mpnet", "modernbert", "esm", "opt", "biogpt", "qwen3", "mistral", "gemma3")
UNIFORM += ("whisper", "clip", "wav2vec2", "ministral", "gemma", "granite", "eurobert")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, change",
    [
        *((name, change) for name in ("bert", "gpt2", "llama", "marian", "t5", "vit") for change in IN_A_CONFIG),
        *((name, "uniform") for name in UNIFORM),
    ],
)
def test_stock_checkpoints_of_each_family(name, change, tmp_path):
    """What a config cannot say comes back as zeros; all is compared when it is written."""
    model = changed(name, change)
    report = export(model, tmp_path / "stock", "transformers")
    assert report.difference <= ENGINE_NOISE and report.agreeing in (None, 1)
    assert "collab_heads" not in (tmp_path / "stock" / "config.json").read_text()


@pytest.mark.parametrize(
    "to, change", [("transformers", "uniform"), pytest.param("onnx", "compressed", marks=pytest.mark.slow)]
)
def test_the_model_stays_as_it_is(to, change, tmp_path):
    model = changed("bert", change).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    record = model.config.collab_heads
    export(model, tmp_path / "served", to)
    assert model.training and model.config.collab_heads == record
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.slow
def test_int8(tmp_path):
    report = export(changed("bert", "stock"), tmp_path / "served", int8=True)
    assert report.int8 and 0 < report.difference < 0.2 and "onnx, int8" in str(report)


def test_int8_where_a_target_takes_none(tmp_path):
    with pytest.raises(
        ArgumentError,
        match="int8=True: transformers takes no weights of eight bits here; all targets do but transformers",
    ):
        export(changed("bert", "stock"), tmp_path / "other", "transformers", int8=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("bert", "marian"))
def test_int8_in_openvino(name, tmp_path):
    model = changed(name, "compressed")
    whole, small = (export(model, tmp_path / str(int8), "openvino", int8=int8) for int8 in (False, True))
    sizes = [sum(file.stat().st_size for file in (tmp_path / str(int8)).glob("*.bin")) for int8 in (False, True)]
    assert sizes[1] < 0.6 * sizes[0] and whole.difference <= ENGINE_NOISE < small.difference < 0.2


@pytest.mark.parametrize("to", GRAPHS)
def test_an_older_transformers(to, tmp_path, monkeypatch):
    """Before 5.23 its exporters run nothing."""
    monkeypatch.setitem(sys.modules, "transformers.exporters.runners", None)
    with pytest.raises(MissingPackageError, match=rf"exports to {to} need transformers 5\.23 or later, not 5"):
        export(changed("bert", "stock"), tmp_path / "served", to)
    with pytest.raises(MissingPackageError, match=r"exported models need transformers 5\.23"):
        load_exported(tmp_path)


def test_what_differs_is_not_written(tmp_path, monkeypatch):
    model, other = changed("bert", "stock"), FAMILIES["bert"].build().eval()
    other.classifier.bias.data += 0.01
    monkeypatch.setattr(TARGETS["transformers"], "load", lambda model, folder: other)
    with pytest.raises(
        ModelStateError, match=r"the model in transformers differs from PyTorch by .* nothing was written"
    ):
        export(model, tmp_path / "served", "transformers")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_what_is_refused(tmp_path):
    model, full = changed("bert", "stock"), tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("text")
    with pytest.raises(OutputError, match="is not empty: choose a new folder"):
        export(model, full)
    for folder in ("", "."):
        with pytest.raises(OutputError, match="the folder is the current one"):
            export(model, folder, "transformers")
    for folder in ("x" * 300, "x\0", "x\udc80"):
        with pytest.raises(OutputError, match=r"x.* (too long|null byte|surrogates not allowed)"):
            export(model, tmp_path / folder, "transformers")
    with pytest.raises(ArgumentError, match="unknown target 'onx'"):
        export(model, tmp_path / "new", "onx")
    swap(model, "shared", NARROW["shared"])
    with pytest.raises(ModelStateError, match="share their queries and keys have no stock form"):
        export(model, tmp_path / "new", "transformers")
    assert [file.name for file in tmp_path.iterdir()] == ["full"] and [file.name for file in full.iterdir()] == [
        "mine.txt"
    ]


WRITERS = {
    "onnx": "onnx_ir.save",
    "openvino": "openvino.save_model",
    "ctranslate2": "ctranslate2.specs.ModelSpec.save",
    "transformers": "transformers.modeling_utils.safe_save_file",
}
STOPS = {
    "a full disk": (OSError(errno.ENOSPC, "No space left on device"), OutputError, "is full .* MB are needed"),
    "Ctrl-C": (KeyboardInterrupt("stopped"), KeyboardInterrupt, "stopped"),
}


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("to", [pytest.param(to, marks=pytest.mark.slow if to in GRAPHS else ()) for to in WRITERS])
def test_an_export_that_stops_leaves_nothing(to, stop, tmp_path, monkeypatch):
    model = FAMILIES["bert"].build().base_model.train()
    error, raised, message = STOPS[stop]

    def begin(first, place, *args, **kwargs):
        place = Path(place)
        (place / "model.bin" if place.is_dir() else place).write_bytes(b"a beginning")
        raise error

    if to == "onnx":
        importlib.import_module("onnxscript.ir")  # copies `save` on its first import: not the one below
    monkeypatch.setattr(WRITERS[to], begin)
    with pytest.raises(raised, match=message):
        export(model, tmp_path / "served", to)
    assert not list(tmp_path.iterdir()) and model.training


class Bessel(torch.nn.Module):
    def forward(self, states):
        return torch.special.bessel_j0(states)


@pytest.mark.slow
@pytest.mark.parametrize("to, operator", [("onnx", "prims.bessel_j0"), ("openvino", "aten.special_bessel_j0.default")])
def test_an_operator_that_the_engine_has_not(to, operator, tmp_path):
    model = FAMILIES["bert"].build().eval()
    model.bert.pooler = Bessel()
    with pytest.raises(UnsupportedModelError, match=f"exporter to {to} fails on Bert.*no operator {operator}$"):
        export(model, tmp_path / "served", to)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_batches_of_the_user_name_the_inputs(tmp_path):
    model = changed("bert", "stock")
    batch = {"input_ids": torch.arange(4, 10).view(1, 6), "labels": torch.tensor([0])}
    assert export(model, tmp_path / "served", batches=[batch]).difference <= ENGINE_NOISE
    served = load_exported(tmp_path / "served")
    assert set(served.names) == {"input_ids", "attention_mask"}  # a text has a mask


def test_heads_removed_in_all_layers_make_a_smaller_stock_llama(tmp_path):
    model = FAMILIES["llama"].build()
    before = model.num_parameters()
    groups = model.config.num_attention_heads // model.config.num_key_value_heads
    layers = model.config.num_hidden_layers
    prune_heads(model, heads={"dec-self": [list(range(groups))] * layers})
    export(model, tmp_path / "stock", "transformers")
    loaded = type(model).from_pretrained(tmp_path / "stock")
    assert loaded.num_parameters() == model.num_parameters() < before


def broken(model, number):
    """A copy whose first layer norm has a weight that is none of the model's."""
    copied = copy.deepcopy(model)
    weight = next(parameter for name, parameter in copied.named_parameters() if "norm" in name.lower() or "ln" in name)
    weight.data.fill_(number)
    return copied


# llama.cpp runs none of these models, see test_for_gguf.py; ExecuTorch is not installed, see test_for_executorch.py
OF_ANY = [to for to in TARGETS if to not in ("gguf", "executorch")]
TARGETS_OF = {"bert": OF_ANY, "gpt2": OF_ANY, "marian": ("onnx", "openvino", "ctranslate2")}


@pytest.mark.parametrize(
    "to, name, int8",
    [
        pytest.param(to, name, int8, marks=() if (to, int8) == ("transformers", False) else pytest.mark.slow)
        for name, targets in TARGETS_OF.items()
        for to in targets
        for int8 in (False, True)
        if to != "transformers" or not int8
    ],
)
def test_what_puts_out_no_numbers_is_not_written(to, name, int8, tmp_path, monkeypatch):
    """Written from a copy of the model with NaN in it: each engine computes them; in eight bits they may be zeros."""
    model = changed(name, "stock")
    model = model.base_model if name == "bert" else model  # which CTranslate2 runs
    write = TARGETS[to].write
    monkeypatch.setattr(TARGETS[to], "write", lambda model, *args, **kw: write(broken(model, torch.nan), *args, **kw))
    with pytest.raises(ModelStateError, match="nothing was written"):
        export(model, tmp_path / "served", to, int8=int8)
    assert not list(tmp_path.iterdir())


def test_a_model_of_nan_or_inf_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    model = FAMILIES["bert"].build().base_model.eval()
    for target in TARGETS.values():
        monkeypatch.setattr(target, "write", lambda *args, **kwargs: pytest.fail("it was written"))
    overflowing = copy.deepcopy(model)
    overflowing.encoder.layer[0].output.dense.weight.data.fill_(1e38)
    for to in OF_ANY:
        for number in (torch.nan, torch.inf):
            with pytest.raises(NonFiniteError, match=r"the weight embeddings\.LayerNorm\.weight contains NaN or inf"):
                export(broken(model, number), tmp_path / "served", to)
        with pytest.raises(NonFiniteError, match="the model itself puts out NaN or inf in last_hidden_state"):
            export(overflowing, tmp_path / "served", to)
    decoder = FAMILIES["gpt2"].build().eval()
    decoder.transformer.h[0].mlp.c_proj.weight.data.fill_(1e38)
    with pytest.raises(NonFiniteError, match="the model itself puts out NaN or inf in logits"):
        export(decoder, tmp_path / "served")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_eight_bits_of_another_model_are_not_written(tmp_path, monkeypatch):
    model, write = FAMILIES["bert"].build().base_model.eval(), TARGETS["onnx"].write
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    for parameter in other.parameters():
        parameter.data = torch.randn_like(parameter)
    monkeypatch.setattr(TARGETS["onnx"], "write", lambda model, *args, **kw: write(other, *args, **kw))
    with pytest.raises(ModelStateError, match=r"differs from PyTorch by .* more than 0\.9: nothing was written"):
        export(model, tmp_path / "served", int8=True)


@pytest.mark.parametrize(
    "to", [pytest.param(to, marks=() if to == "transformers" else pytest.mark.slow) for to in OF_ANY]
)
def test_what_a_config_says_of_outputs_and_caches_does_not_matter(to, tmp_path):
    """`return_dict` and `use_cache` stay as they are in the model, and in a stock checkpoint."""
    decoder = FAMILIES["gpt2"].build().eval()
    decoder.config.use_cache = decoder.generation_config.use_cache = False
    encoder = FAMILIES["distilbert"].build().base_model.eval()
    encoder.config.return_dict = False  # with which no decoder of transformers generates
    encoder.config.architectures = ["DistilBertForMaskedLM"]  # as a checkpoint with a head says
    for number, model in enumerate((encoder, decoder)[: 1 if to == "ctranslate2" else 2]):
        report = export(model, tmp_path / str(number), to)
        assert report.difference <= ENGINE_NOISE and report.agreeing in (None, 1)
        assert model.config.return_dict is (model is decoder) and decoder.config.use_cache is False
        if to in GRAPHS:
            served = load_exported(tmp_path / str(number))
            assert served(**text_batch(1, 4))[0].ndim == 3
            assert served.config.architectures == [type(model).__name__]
            if model is decoder:
                assert_same_tokens(model, served, text_batch(2, 5, left=True))
        if to == "transformers":
            stored = json.loads((tmp_path / str(number) / "config.json").read_text())
            assert stored.get("return_dict", True) is (model is decoder) and stored.get("use_cache", True) is (
                model is encoder
            )


@pytest.mark.slow
@pytest.mark.parametrize("to", (*GRAPHS, "ctranslate2"))
def test_stacks_of_unequal_depth(to, tmp_path):
    config = FAMILIES["t5"].build().config
    config.num_layers, config.num_decoder_layers = 3, 2
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(config).eval()
    report = export(model, tmp_path / "served", to)
    assert report.difference <= ENGINE_NOISE and report.agreeing == 1
    if to in GRAPHS:
        assert_same_tokens(model, load_exported(tmp_path / "served", threads=1), text_batch(3, 9))


def test_the_report_says_what_other_tokens_mean():
    numbers = {"folder": "x", "to": "onnx", "megabytes": 1.0, "difference": 1e-6, "seconds_before": 1.0}
    same, tied, rounded = (
        ExportReport(**numbers, seconds_after=1.0, int8=int8, agreeing=agreeing, margin=margin)
        for int8, agreeing, margin in ((False, 1.0, 0.0), (False, 0.5625, 1e-7), (True, 0.5625, 0.02))
    )
    assert "100.0% of greedy tokens are PyTorch's\n" in str(same) and "tie" not in str(same)
    assert "56.2% of greedy tokens are PyTorch's\n" in str(tied) and "ahead by 1e-07 of the largest" in str(tied)
    assert "a tie, which rounding decides, and no fault" in str(tied)
    assert "ahead by 0.02" in str(rounded) and "measure the quality on texts of your own" in str(rounded)


def test_tokens_that_the_logits_do_not_explain_are_refused():
    with pytest.raises(
        ModelStateError, match=r"chooses a token where PyTorch's own is ahead by 0\.3 .* more than 0\.002"
    ):
        check_difference(Comparison(1e-6, 0.5, 0.3, 1.0, 1.0), "onnx", TARGETS["onnx"].tolerance)
    check_difference(Comparison(0.1, 0.5, 0.3, 1.0, 1.0), "onnx", TARGETS["onnx"].int8_tolerance)
    with pytest.raises(ModelStateError, match="differs from PyTorch by nan"):
        check_difference(Comparison(float("nan"), 0.5, 0.0, 1.0, 1.0), "onnx", TARGETS["onnx"].int8_tolerance)


IDS, MASK = torch.arange(1, 13).view(2, 6), torch.ones(2, 6, dtype=torch.long)
ODD = {
    "nothing": {},
    "labels alone": {"labels": IDS},
    "one row without a batch": {"input_ids": IDS[0]},
    "a number": {"input_ids": torch.tensor(3)},
    "floats": {"input_ids": IDS.float()},
    "no rows": {"input_ids": IDS[:0]},
    "no tokens": {"input_ids": IDS[:, :0]},
    "ids too large": {"input_ids": IDS + 1000},
    "negative ids": {"input_ids": IDS - 50},
    "a shorter mask": {"input_ids": IDS, "attention_mask": MASK[:, :3]},
    "a mask of more rows": {"input_ids": IDS, "attention_mask": torch.ones(3, 6)},
    "a mask in words": {"input_ids": IDS, "attention_mask": "yes"},
    "nothing counts": {"input_ids": IDS, "attention_mask": 0 * MASK},
    "a list": {"input_ids": IDS.tolist()},
    "an array": {"input_ids": IDS.numpy()},
    "a text": {"input_ids": "a text"},
    "nonsense": {"input_ids": IDS, "nonsense": 1},
    "states of another width": {"inputs_embeds": torch.randn(2, 6, 31)},
    "states of NaN": {"inputs_embeds": torch.full((2, 6, 32), torch.nan)},
    "pixels": {"pixel_values": torch.randn(2, 3, 8, 8)},
    "too long": {"input_ids": torch.ones(1, 999, dtype=torch.long)},
    "on no device": {"input_ids": IDS.to("meta")},
    "sparse": {"input_ids": IDS.to_sparse()},
    "types too large": {"input_ids": IDS, "token_type_ids": 9 * MASK},
    "positions too large": {"input_ids": IDS, "position_ids": 1000 * MASK},
    "a cache that is none": {"input_ids": IDS, "past_key_values": 3},
    "complex": {"input_ids": IDS.to(torch.complex64)},
}


@pytest.mark.parametrize("name", ("bert", "gpt2", *slow("t5")))
def test_an_odd_batch_is_taken_or_named_before_anything_is_written(name, tmp_path, monkeypatch):
    """By the check that `compress` has."""
    model, wrong = FAMILIES[name].build().eval(), []
    monkeypatch.setattr(TARGETS["onnx"], "write", lambda *args, **kwargs: ())
    monkeypatch.setattr(TARGETS["onnx"], "compare", lambda *args: Comparison(0.0, None, 0.0, 1.0, 1.0))
    for what, batch in ODD.items():
        try:
            export(model, tmp_path / what, batches=[{"input_ids": IDS}, batch])
        except CollabHeadsError as error:
            if not re.search(r"batch 1\b|the model itself puts out NaN|batches is empty", str(error)):
                wrong.append((what, str(error)))
        except Exception as error:
            wrong.append((what, error))
    assert not wrong and len(list(tmp_path.iterdir())) < len(ODD) / 2


def on_no_device(model):
    model.pooler.to("meta")


def in_eight_bits(model):
    pytest.importorskip("torchao.quantization")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())


def in_float8(model):
    model.pooler.dense.weight = nn.Parameter(model.pooler.dense.weight.to(torch.float8_e4m3fn), requires_grad=False)


def tied(model):
    model.encoder.layer[1].output.dense.weight = model.encoder.layer[0].output.dense.weight


def tied_modules(model):
    model.encoder.layer[1].output = model.encoder.layer[0].output


def mixed(model):
    model.pooler.double()


CANNOT = {
    on_no_device: (UnsupportedModelError, r"the weight pooler\.dense\.weight is on the meta device: load the model"),
    in_eight_bits: (UnsupportedModelError, r"weight encoder.* is \w+, not floating point of 16 bits or more: take the"),
    in_float8: (UnsupportedModelError, r"pooler\.dense\.weight is torch\.float8_e4m3fn, not floating point of 16 bits"),
    tied: (
        ModelStateError,
        r"encoder\.layer\.1\.output\.dense\.weight is encoder\.layer\.0\.output\.dense\.weight, too",
    ),
    tied_modules: (
        ModelStateError,
        r"encoder\.layer\.1\.output\.dense\.weight is encoder\.layer\.0\.output\.dense\.weight",
    ),
    mixed: (CalibrationError, "BertModel cannot take batch 0 with .* must have the same dtype"),
}


@pytest.mark.parametrize("change", CANNOT)
def test_models_that_cannot_be_written_are_refused_before(change, tmp_path):
    model = FAMILIES["bert"].build().base_model.eval()
    change(model)
    error, message = CANNOT[change]
    with pytest.raises(error, match=message):
        export(model, tmp_path / "stock", "transformers")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float64))
def test_stock_checkpoints_of_other_types(dtype, tmp_path):
    model = FAMILIES["bert"].build().base_model.to(dtype)
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    for number in range(2):
        noise = max(ENGINE_NOISE, ROUNDINGS * torch.finfo(dtype).eps)  # loaded weights lie at other addresses
        assert export(model, tmp_path / str(number), "transformers").difference <= noise
        for norm in norms if dtype == torch.bfloat16 else ():
            norm.float()  # mixed


@pytest.mark.parametrize(
    "family, dtype", (("bert", torch.bfloat16), ("bert", torch.float64), ("gpt2", torch.float16), ("t5", torch.float16))
)
def test_types_that_onnx_runtime_does_not_compute_are_refused_before(family, dtype, tmp_path):
    model = FAMILIES[family].build().to(dtype)
    for to in ("onnx", "transformers.js"):
        said = rf"to='{to}': the model has weights in {dtype}; load it with dtype=torch\.float32"
        with pytest.raises(ArgumentError, match=said):
            export(model, tmp_path / "served", to)
    assert not list(tmp_path.iterdir())


NEIGHBOURS = 1e-5  # of the largest value: products of other shapes are summed in another order; seen: 1.3e-6


def mean_of(states, mask):
    return (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def embedder(to, model, folder):
    """A function of lists of ids: their embeddings, as the pages of the documentation compute them."""
    if to == "ctranslate2":
        import ctranslate2

        engine = ctranslate2.Encoder(str(folder), intra_threads=1)

        def states_of(ids, mask):
            rows = [row[: int(count)].tolist() for row, count in zip(ids, mask.sum(1), strict=True)]
            return torch.from_numpy(np.array(engine.forward_batch(rows).last_hidden_state))
    else:
        served = model if to == "PyTorch" else load_exported(folder, threads=1)

        def states_of(ids, mask):
            return served(input_ids=ids, attention_mask=mask).last_hidden_state

    @torch.no_grad()
    def embed(texts):
        ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
        return mean_of(states_of(ids, mask), mask)

    return embed


@pytest.mark.slow
@pytest.mark.parametrize("to", ["PyTorch", *GRAPHS, "ctranslate2"])
def test_an_embedding_does_not_depend_on_its_neighbours(to, tmp_path):
    model = changed("bert", "compressed").base_model
    if to != "PyTorch":
        export(model, tmp_path / "served", to, batches=[text_batch(2, 8)])
    embed, generator = embedder(to, model, tmp_path / "served"), torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 16, (150,), generator=generator).tolist()
    texts = [torch.randint(4, VOCABULARY, (length,), generator=generator) for length in lengths]
    alone = torch.cat([embed([text]) for text in texts])
    together = torch.cat([embed(texts[start : start + 25]) for start in range(0, 150, 25)])
    torch.testing.assert_close(together, alone, rtol=0, atol=NEIGHBOURS * float(alone.abs().max()))
