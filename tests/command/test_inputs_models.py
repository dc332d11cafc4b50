"""The model of a command: its class, its dtype, what cannot be loaded."""

import json

import commands
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from collab_heads.command.inputs import load
from collab_heads.errors import ArgumentError


def loaded(folder):
    return load(commands.parse("analyze", folder, "--data", __file__, "--output_dir", "nowhere"))


def test_a_model_has_the_class_that_its_config_names_and_its_dtype_is_known(bert, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(bert, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path)
    found = loaded(tmp_path)
    assert type(found.model) is type(model) and found.model.dtype == torch.float32 and found.dtype == torch.bfloat16
    assert loaded(bert).dtype == torch.float32


def test_a_folder_of_sentence_transformers_with_its_model_inside_is_explained(tmp_path):
    (tmp_path / "0_Transformer").mkdir()
    (tmp_path / "modules.json").write_text(json.dumps([{"path": "0_Transformer"}]))
    with pytest.raises(ArgumentError, match=r"the model in it is .*0_Transformer, give that"):
        loaded(tmp_path)


@pytest.mark.skipif(torch.xpu.is_available(), reason="this machine has such a device")
def test_a_device_that_torch_was_built_without_is_refused(bert):
    flags = ("--data", __file__, "--output_dir", "nowhere", "--device", "xpu")
    with pytest.raises(ArgumentError, match="device 'xpu': "):
        load(commands.parse("analyze", bert, *flags))
