"""Weights load with the record that they belong to, however they are loaded, and whoever wrote them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import accelerate
import commands
import pytest
import torch
from load_without_package import refusal
from model_runs import aligned, output, swap
from packaging.version import Version
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    BertConfig,
    BertForSequenceClassification,
    CLIPTextModel,
    CLIPVisionModel,
    EncoderDecoderModel,
)
from transformers.integrations.peft import MIN_PEFT_VERSION

from collab_heads import swap_to_gated
from collab_heads.errors import ConfigError
from collab_heads.saving.marks import FUSION, SENTENCE, WEIGHTS
from collab_heads.saving.ties import TIE, read_metadata
from families import FAMILIES

ROOT = Path(__file__).parents[2]
INPUTS = FAMILIES["bert"].inputs()
MASKS = ([[1, 0, 1, 0], [0, 0, 1, 1]], [[0, 1, 1, 1], [1, 1, 1, 1]])


def gated(mask=MASKS[0]):
    """A BERT whose gates are the only change: any weights of a BERT fit."""
    model = FAMILIES["bert"].build()
    swap_to_gated(model, alive_heads={"enc-self": mask})
    return aligned(model.eval())


def computed(folder, **how):
    return output(aligned(BertForSequenceClassification.from_pretrained(folder, **how).eval()), INPUTS)


@pytest.fixture
def model():
    return gated()


@pytest.fixture
def folder(model, tmp_path):
    """The weights of a changed model under the config of the stock one: all names and shapes of it are there."""
    model.save_pretrained(tmp_path)
    BertConfig.from_dict(FAMILIES["bert"].build().config.to_dict()).save_pretrained(tmp_path)
    return tmp_path


WAYS = {
    "plain": {},
    "device map": {"device_map": "cpu"},
    "little memory": {"low_cpu_mem_usage": True},
    "other shapes": {"ignore_mismatched_sizes": True},
    "eager": {"attn_implementation": "eager"},
    "bfloat16": {"dtype": torch.bfloat16},
    "trusted": {"trust_remote_code": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_config_that_is_not_that_of_the_weights(way, folder):
    for load in (AutoModel, BertForSequenceClassification):
        with pytest.raises(ConfigError) as caught:
            load.from_pretrained(folder, **WAYS[way])
        for said in (str(folder / "model.safetensors"), "does not belong to its config", "save the model again"):
            assert said in str(caught.value)


@pytest.fixture
def two(model, tmp_path):
    """A folder with the config of one changed model and the weights of another."""
    other = FAMILIES["bert"].build()
    swap(other, "shared", 20)
    for each, name in ((model, "one"), (other, "two")):
        each.save_pretrained(tmp_path / name)
    shutil.copy(tmp_path / "one" / "config.json", tmp_path / "two")
    return tmp_path / "two"


def test_one_config_copied_over_another(two):
    with pytest.raises(ConfigError, match="records another change of attention"):
        computed(two)


def test_a_subfolder_a_variant_and_a_config_that_is_given(model, tmp_path):
    model.save_pretrained(tmp_path / "inner", variant="half")
    assert torch.equal(computed(tmp_path, subfolder="inner", variant="half"), output(model, INPUTS))
    assert TIE in read_metadata(tmp_path / "inner" / "model.half.safetensors")
    with pytest.raises(ConfigError, match=r"model\.half\.safetensors does not belong"):
        computed(tmp_path, subfolder="inner", variant="half", config=FAMILIES["bert"].build().config)


def test_an_adapter_on_a_base(model, tmp_path, caplog):
    """Its weights are tied to nothing, and those of its base to their record."""
    peft = pytest.importorskip("peft")
    model.save_pretrained(tmp_path)
    adapted = peft.get_peft_model(gated(), peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"]))
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path)
    adapted.save_pretrained(tmp_path / "adapter")
    loaders = (peft.AutoPeftModelForSequenceClassification, BertForSequenceClassification)
    for load in loaders:
        again = load.from_pretrained(tmp_path / "adapter")
    assert "cannot be checked" not in caplog.text
    if Version(peft.__version__) >= Version(MIN_PEFT_VERSION):  # else transformers does not save it
        again.save_pretrained(tmp_path / "again")  # of transformers: the adapter alone
        assert TIE not in read_metadata(tmp_path / "again" / "adapter_model.safetensors")
    FAMILIES["bert"].build().config.save_pretrained(tmp_path)
    for load in loaders:
        with pytest.raises(ConfigError, match="does not belong to its config"):
            load.from_pretrained(tmp_path / "adapter")


@pytest.mark.slow
def test_trusted_without_an_import(two):
    load = f"from transformers import AutoModel; AutoModel.from_pretrained({str(two)!r}, trust_remote_code=True)"
    done = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, cwd=ROOT)
    assert "records another change of attention" in done.stderr.splitlines()[-1], done.stderr


@pytest.mark.parametrize("whose", ("stock", "another"))
def test_shards_of_two_models(whose, model, tmp_path):
    model.save_pretrained(tmp_path / "one", max_shard_size="20KB")
    other = FAMILIES["bert"].build() if whose == "stock" else gated(MASKS[1])
    other.save_pretrained(tmp_path / "two", max_shard_size="20KB")
    first = next(tmp_path.glob("two/model-00001-*"))
    shutil.copy(first, next(tmp_path.glob("one/model-00001-*")))
    if whose == "stock":
        with pytest.raises(ConfigError, match=r"model-00001.*does not belong to the files beside it"):
            computed(tmp_path / "one")
    else:  # gates are weights: the records agree
        assert torch.isfinite(computed(tmp_path / "one")).all()


@pytest.mark.parametrize("how", ("missing", "empty"))
def test_a_shard_that_did_not_come_along(how, model, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shard = next(tmp_path.glob("model-00002-*"))
    shard.unlink() if how == "missing" else shard.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"model-00002.* is missing or empty, .*: bring it again"):
        computed(tmp_path)


def test_parts_that_are_not_changed_load_alone(tmp_path):
    whole = FAMILIES["clip"].build()
    swap_to_gated(whole, sites="dec-self")
    whole.save_pretrained(tmp_path)
    for part in (CLIPTextModel, CLIPVisionModel):
        part.from_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["text_config"]["collab_heads"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    CLIPVisionModel.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="records no change"):
        CLIPTextModel.from_pretrained(tmp_path)


def test_a_model_made_of_two(model, tmp_path):
    model.bert.save_pretrained(tmp_path / "encoder")
    FAMILIES["bert"].build().bert.save_pretrained(tmp_path / "decoder")
    folders = (tmp_path / "encoder", tmp_path / "decoder")
    whole = EncoderDecoderModel.from_encoder_decoder_pretrained(*folders)
    whole.save_pretrained(tmp_path / "whole")
    EncoderDecoderModel.from_pretrained(tmp_path / "whole")
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    del config["encoder"]["collab_heads"]
    (tmp_path / "whole" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="records no change"):
        EncoderDecoderModel.from_pretrained(tmp_path / "whole")


def by_accelerate(model, folder):
    accelerate.Accelerator(cpu=True).save_model(model, folder)


def by_torch(model, folder):
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def by_hand(model, folder):
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")


@pytest.mark.parametrize("save", (by_accelerate, by_torch, by_hand))
def test_weights_that_others_wrote(save, model, tmp_path, caplog):
    """They say nothing of a record. They load with a warning, but not where what is changed is missing."""
    model.config.save_pretrained(tmp_path)
    save(model, tmp_path)
    assert torch.equal(computed(tmp_path), output(model, INPUTS))
    assert str(tmp_path) in caplog.text and "cannot be checked" in caplog.text
    save(FAMILIES["bert"].build(), tmp_path)
    for way in ({}, {"ignore_mismatched_sizes": True}):
        with pytest.raises(ConfigError, match=r"are not those of a model.*gates\.alive is missing"):
            computed(tmp_path, **way)


def test_weights_of_another_shape_that_others_wrote(tmp_path):
    model = FAMILIES["bert"].build()
    swap(model, "per_head", 16)
    model.config.save_pretrained(tmp_path)
    swap(wider := FAMILIES["bert"].build(), "per_head", 24)
    by_hand(wider, tmp_path)
    with pytest.raises(ConfigError, match="missing or has another shape"):
        computed(tmp_path, ignore_mismatched_sizes=True)


def test_weights_that_are_given(model, folder, caplog):
    state, stock = model.state_dict(), FAMILIES["bert"].build().state_dict()
    found = BertForSequenceClassification.from_pretrained(None, config=model.config, state_dict=state)
    assert torch.equal(output(aligned(found.eval()), INPUTS), output(model, INPUTS))
    assert caplog.text == ""
    with pytest.raises(ConfigError, match="the weights that were given are not those of a model"):
        BertForSequenceClassification.from_pretrained(None, config=model.config, state_dict=stock)
    BertForSequenceClassification.from_pretrained(None, config=model.config, state_dict={})  # as from_config


def test_what_save_pretrained_is_given_is_tied(model, tmp_path):
    state = {name: tensor + 1 for name, tensor in model.state_dict().items() if "classifier" in name}
    model.save_pretrained(tmp_path, state_dict=model.state_dict() | state, is_main_process=True)
    assert TIE in read_metadata(tmp_path / "model.safetensors")
    again = BertForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(again.classifier.bias, model.classifier.bias + 1)
    model.save_pretrained(tmp_path / "other", is_main_process=False)
    assert not list((tmp_path / "other").iterdir())


def test_a_config_that_is_saved_again_without_the_package(model, tmp_path, request):
    """It loses the mark that transformers drops, and keeps the one among the layers to fuse."""
    model.save_pretrained(tmp_path)
    model.bert.save_pretrained(tmp_path / "bert")
    with pytest.MonkeyPatch.context():
        request.getfixturevalue("without_hooks")
        for folder in (tmp_path, tmp_path / "bert"):
            AutoConfig.from_pretrained(folder).save_pretrained(folder)
            stored = json.loads((folder / "config.json").read_text())
            assert WEIGHTS not in stored and stored[FUSION] == {SENTENCE: True}
            for way in ({}, {"attn_implementation": "eager"}, {"ignore_mismatched_sizes": True}, {"device_map": "cpu"}):
                assert refusal(lambda f=folder, w=way: AutoModel.from_pretrained(f, **w)).endswith(SENTENCE)
            given = {"config": AutoConfig.from_pretrained(folder), "state_dict": model.state_dict()}
            assert refusal(lambda g=given: type(model).from_pretrained(None, **g)).endswith(SENTENCE)


def test_with_the_package_it_loads(model, tmp_path):
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config[WEIGHTS]
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = BertForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(output(aligned(again.eval()), INPUTS), output(model, INPUTS))
    assert not hasattr(again.config, FUSION)


def test_what_others_ask_to_be_fused_is_kept(model, tmp_path):
    model.config.fusion_config = {"patch_embeddings": False}
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())[FUSION] == {"patch_embeddings": False, SENTENCE: True}
    again = BertForSequenceClassification.from_pretrained(tmp_path)
    assert again.config.fusion_config == {"patch_embeddings": False}


def test_distributed_checkpoints_name_the_package(model, tmp_path, request):
    """Transformers finds them by a folder, whatever file a config names."""
    model.save_pretrained(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"")
    request.getfixturevalue("without_hooks")
    assert refusal(lambda: AutoModel.from_pretrained(tmp_path)).endswith(SENTENCE)


def test_inspect_says_so(model, folder):
    with pytest.raises(ConfigError, match="does not belong to its config"):
        commands.run("inspect", folder)


def test_files_that_are_no_weights_are_left_to_who_reads_them(tmp_path):
    for content in (
        b"",
        b"12345678",
        b"\xff" * 100,
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"null",
    ):
        (tmp_path / "model.safetensors").write_bytes(content)
        assert read_metadata(tmp_path / "model.safetensors") == {}
    assert read_metadata(tmp_path) == read_metadata(tmp_path / "none.safetensors") == {}


def test_stock_weights_say_nothing(tmp_path, caplog):
    model = FAMILIES["bert"].build()
    model.save_pretrained(tmp_path)
    assert read_metadata(tmp_path / "model.safetensors") == {"format": "pt"}
    assert torch.equal(computed(tmp_path), output(aligned(model.eval()), INPUTS)) and caplog.text == ""
    assert load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()
