"""The hooks in transformers: changed models load like any other, stock models do not notice."""

import copy
import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
import transformers
from model_configs import bert_config
from model_inputs import cast
from model_runs import aligned, output, sites, swap, swapped
from packaging.requirements import Requirement
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    MarianForCausalLM,
    MarianModel,
    PreTrainedModel,
    T5EncoderModel,
    T5ForConditionalGeneration,
)

from collab_heads import collaborative_config, install_hooks
from collab_heads.errors import UnsupportedModelError, UnsupportedVersionError
from collab_heads.layers.shared_query_key import block_mixing
from collab_heads.model import apply_state as apply_state_module
from collab_heads.saving import transformers_hooks
from collab_heads.saving.rebuild import rebuild
from collab_heads.saving.ties import read_metadata
from collab_heads.saving.transformers_hooks import supported_versions
from families import FAMILIES

ROOT = Path(__file__).parents[2]
NARROW = {"shared": 20, "per_head": 16}


def saved(name, kind, folder):
    model = FAMILIES[name].build()
    swap(model, kind, NARROW[kind])
    model.save_pretrained(folder)
    return model


def assert_same(ours, theirs):
    ours, theirs = ours.state_dict(), theirs.state_dict()
    assert ours.keys() == theirs.keys()
    assert any("query_key" in name for name in ours)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_t5_encoder_from_the_whole_model_and_back(kind, tmp_path):
    whole = saved("t5", kind, tmp_path)
    encoder = aligned(T5EncoderModel.from_pretrained(tmp_path).eval())
    assert_same(encoder.encoder, whole.encoder)
    assert all(swapped(encoder))
    assert set(encoder.config.collab_heads["sites"]) == set(whole.config.collab_heads["sites"])
    inputs = FAMILIES["t5-encoder"].inputs()
    with torch.no_grad():
        assert torch.equal(output(encoder, inputs), whole.encoder(**inputs).last_hidden_state)
    encoder.save_pretrained(tmp_path / "encoder")
    again = T5ForConditionalGeneration.from_pretrained(tmp_path / "encoder")
    assert_same(again.encoder, whole.encoder)
    assert all(swapped(again))
    assert all(torch.isfinite(tensor).all() for tensor in again.state_dict().values())


def test_whole_t5_from_a_swapped_encoder(kind, tmp_path):
    """The record names encoder sites only: the decoder is a stock one."""
    encoder = saved("t5-encoder", kind, tmp_path)
    whole = T5ForConditionalGeneration.from_pretrained(tmp_path)
    assert_same(whole.encoder, encoder.encoder)
    assert [path for path, changed in zip(sites(whole), swapped(whole), strict=True) if changed] == list(sites(encoder))


def test_marian_decoder_from_the_whole_model(kind, tmp_path):
    whole = saved("marian", kind, tmp_path)
    decoder = MarianForCausalLM.from_pretrained(tmp_path)
    assert_same(decoder.model.decoder.layers, whole.model.decoder.layers)
    assert all(swapped(decoder))
    assert {path.split(".")[0] for path in sites(decoder)} == {"decoder"}
    decoder.save_pretrained(tmp_path / "decoder")
    again = MarianModel.from_pretrained(tmp_path / "decoder")
    assert_same(again.decoder.layers, whole.model.decoder.layers)


@pytest.mark.parametrize(
    "name, kind, part",
    (
        ("bert", "shared", "mixing"),
        ("bert", "shared", "content_bias.weight"),
        ("bert", "shared", "shared_query.weight"),
        ("bert", "per_head", "shared_query.bias"),
        ("bert", "per_head", "shared_key.weight"),
        ("marian", "shared", "mixing"),
        ("marian", "shared", "content_bias.weight"),
        ("marian", "per_head", "shared_query.bias"),
        ("t5", "shared", "mixing"),
        ("t5", "shared", "shared_key.weight"),
        ("t5", "per_head", "shared_query.weight"),
    ),
)
def test_a_missing_tensor_gets_a_start_value_and_a_warning(name, kind, part, tmp_path, warnings_logged):
    model = saved(name, kind, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    deleted = next(key for key in tensors if key.endswith(f".query_key.{part}"))
    del tensors[deleted]
    save_file(tensors, file, metadata=read_metadata(file))
    torch.manual_seed(0)
    loaded = type(model).from_pretrained(tmp_path)
    assert deleted in warnings_logged.text
    assert "missing" in warnings_logged.text.lower()
    state = loaded.state_dict()
    assert [key for key, tensor in model.state_dict().items() if not torch.equal(state[key], tensor)] == [deleted]
    assert torch.isfinite(state[deleted]).all()
    if part == "mixing":
        assert torch.equal(state[deleted], block_mixing(*state[deleted].shape).float())
    elif part.endswith("weight") and part.startswith("shared"):
        assert 0.01 < state[deleted].std() < 1
    else:
        assert state[deleted].abs().max() == 0  # no query bias: what a stock initialisation starts with
    assert torch.isfinite(output(loaded.eval(), FAMILIES[name].inputs())).all()


def test_a_whole_checkpoint_logs_nothing(kind, tmp_path, warnings_logged):
    saved("marian", kind, tmp_path)
    type(FAMILIES["marian"].build()).from_pretrained(tmp_path)
    assert "query_key" not in warnings_logged.text


def test_stock_models_do_not_notice(family, monkeypatch, tmp_path):
    """Initialised and loaded with and without our hooks: the same bits."""
    model = family.build()
    model.save_pretrained(tmp_path)

    def build():
        torch.manual_seed(7)
        return type(model)(model.config).state_dict(), type(model).from_pretrained(tmp_path).state_dict()

    hooked = build()
    for name in ("post_init", "_initialize_weights"):
        wrapped = getattr(PreTrainedModel, name)
        assert wrapped.collab_heads
        monkeypatch.setattr(PreTrainedModel, name, wrapped.__wrapped__)
    for ours, stock in zip(hooked, build(), strict=True):
        assert ours.keys() == stock.keys()
        assert [name for name in ours if not torch.equal(ours[name], stock[name])] == []
        assert not any("query_key" in name for name in ours)


def test_without_hooks_a_checkpoint_does_not_load_silently(monkeypatch, tmp_path, warnings_logged):
    """What these tests would see if the hooks did nothing."""
    saved("bert", "shared", tmp_path)
    monkeypatch.setattr(PreTrainedModel, "post_init", PreTrainedModel.post_init.__wrapped__)
    loaded = BertForSequenceClassification.from_pretrained(tmp_path)
    assert not any(swapped(loaded))
    assert "query_key" in warnings_logged.text


def test_installing_twice_is_harmless(kind):
    before = PreTrainedModel.post_init, PreTrainedModel._initialize_weights
    install_hooks()
    assert before == (PreTrainedModel.post_init, PreTrainedModel._initialize_weights)


def test_rebuilding_twice_is_harmless(family, kind):
    model = family.build()
    swap(model, kind, NARROW[kind])
    before, parameters = output(model, family.inputs()), [id(parameter) for parameter in model.parameters()]
    rebuild(model)
    assert [id(parameter) for parameter in model.parameters()] == parameters
    assert torch.equal(output(model, family.inputs()), before)


@pytest.mark.parametrize("name", ("bert", "marian", "t5"))
def test_meta_device(name, kind, tmp_path):
    model = saved(name, kind, tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        empty = AutoModel.from_config(config)
    assert all(parameter.is_meta for parameter in empty.parameters())
    shapes = {key: tensor.shape for key, tensor in model.base_model.state_dict().items()}
    found = {key: tensor.shape for key, tensor in empty.state_dict().items()}
    assert found.items() <= shapes.items()
    assert {key for key in shapes if "query_key" in key} <= found.keys()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float64))
def test_dtype_on_loading(kind, dtype, tmp_path):
    saved("bert", kind, tmp_path)
    model = BertForSequenceClassification.from_pretrained(tmp_path, dtype=dtype).eval()
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    fresh = AutoModel.from_config(AutoConfig.from_pretrained(tmp_path), dtype=dtype)
    assert {parameter.dtype for parameter in fresh.parameters()} == {dtype}
    assert torch.isfinite(output(model, cast(FAMILIES["bert"].inputs(), dtype))).all()


@pytest.fixture
def unregistered():
    """A model type of the user's own that no adapter of ours serves."""

    class OwnConfig(BertConfig):
        model_type = "own-bert"

    class OwnModel(BertModel):
        config_class = OwnConfig

    AutoModel.register(OwnConfig, OwnModel)
    yield OwnConfig
    AutoModel._model_mapping._extra_content.pop(OwnConfig)


def test_a_model_type_without_an_adapter(unregistered):
    record = collaborative_config(bert_config(), 16).collab_heads
    config = unregistered(**{name: value for name, value in bert_config().to_dict().items() if name != "model_type"})
    AutoModel.from_config(config)
    config.collab_heads = record
    with pytest.raises(UnsupportedModelError, match="'own-bert' is not supported"):
        AutoModel.from_config(config)


@pytest.mark.parametrize("name", ("marian", "t5"))
def test_inner_stacks_leave_nothing_uninitialised(name, kind, monkeypatch):
    """A stack initialises its stock attention before the whole model changes it: what is new must get its start too."""
    model = FAMILIES[name].build()
    swap(model, kind, 16)
    build = apply_state_module.build_query_key

    def poisoned(*arguments, **options):
        made = build(*arguments, **options)
        for parameter in made.parameters():
            parameter.data.fill_(torch.nan)  # memory that nobody has set may hold anything
        return made

    monkeypatch.setattr(apply_state_module, "build_query_key", poisoned)
    fresh = type(model)(copy.deepcopy(model.config))
    assert [name for name, parameter in fresh.named_parameters() if not torch.isfinite(parameter).all()] == []


def stand_in(**methods):
    """A class with the methods that are wrapped, but for those given; None takes one away."""
    usual = {"post_init": lambda self: None, "_initialize_weights": lambda self, module, is_custom_code=False: None}
    return type("OtherModel", (), {name: method for name, method in {**usual, **methods}.items() if method is not None})


def test_any_class_with_the_methods_is_wrapped_once():
    model_class = stand_in()
    install_hooks(model_class)
    wrapped = model_class.post_init, model_class._initialize_weights
    install_hooks(model_class)
    assert (model_class.post_init, model_class._initialize_weights) == wrapped
    assert all(method.__wrapped__ for method in wrapped)


@pytest.mark.parametrize(
    "methods, reason",
    (
        ({"post_init": None}, "OtherModel has no method post_init"),
        ({"_initialize_weights": None}, "OtherModel has no method _initialize_weights"),
        ({"_initialize_weights": True}, "OtherModel has no method _initialize_weights"),
        ({"post_init": lambda self, config: None}, r"OtherModel.post_init takes (self, config), not (self)"),
        (
            {"_initialize_weights": lambda self, name, module: None},
            "OtherModel._initialize_weights takes (self, name, module), not (self, module)",
        ),
        ({"_initialize_weights": lambda self: None}, "takes (self), not (self, module)"),
    ),
)
def test_another_transformers_is_refused_before_anything_is_wrapped(methods, reason):
    model_class = stand_in(**methods)
    before = dict(vars(model_class))
    with pytest.raises(UnsupportedVersionError, match=re.escape(reason)) as caught:
        install_hooks(model_class)
    assert isinstance(caught.value, ImportError)
    assert f"transformers {transformers.__version__} cannot" in str(caught.value)
    assert dict(vars(model_class)) == before


@pytest.mark.parametrize("taken", ("to_json_file", "repo_id"))
def test_a_transformers_that_saves_otherwise_is_refused(taken, monkeypatch):
    if taken == "repo_id":  # an argument
        monkeypatch.setattr(PreTrainedModel, "_upload_modified_files", lambda self, working_dir: None)
    else:
        monkeypatch.delattr(transformers.PretrainedConfig, taken)
    model_class = stand_in()
    before = dict(vars(model_class))
    with pytest.raises(UnsupportedVersionError, match=r"has no \w+\(\.\.\., (self|repo_id|json_file_path)\)"):
        install_hooks(model_class)
    assert dict(vars(model_class)) == before


def test_the_versions_that_do_are_those_of_the_package(monkeypatch):
    tomllib = pytest.importorskip("tomllib", reason="comes with Python 3.11")
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    wanted = next(Requirement(line) for line in lines if Requirement(line).name == "transformers")
    assert repr(str(wanted)) == supported_versions()
    assert re.fullmatch(r"'transformers<6,>=5\.\d+'", supported_versions())

    def not_installed(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(transformers_hooks, "requires", not_installed)
    assert supported_versions() == "a version that pyproject.toml allows"
