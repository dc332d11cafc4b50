"""Image classifiers from scratch: sizes, classes, collaborative attention."""

import pytest
import torch
from later import Later, run_image_classification
from model_runs import sites, swapped
from transformers import AutoConfig

from collab_heads.contract.registry import image_blueprints
from collab_heads.data.glue_tasks import Task
from collab_heads.errors import ArgumentError

classifier = Later("collab_heads.training.runs.classifier")

TASK = Task(None, ("file",), ("cat", "dog", "owl"), "classification")
SMALL = "--d_model 32 --num_layers 2 --num_heads 4 --d_ff 64 --image_size 16 --patch_size 8".split()
TYPES = pytest.mark.parametrize("model_type", image_blueprints())


def make(*flags):
    args = run_image_classification.parse(["--train_dir", "a", "--validation_dir", "b", *map(str, flags)])
    torch.manual_seed(0)
    return classifier.untrained(args, TASK)


@TYPES
def test_sizes_and_classes_land_in_the_config(model_type):
    model, processor, labels = make("--model_type", model_type, *SMALL, "--dropout", 0.25)
    names = image_blueprints()[model_type].sizes
    wanted = {"d_model": 32, "num_layers": 2, "num_heads": 4, "d_ff": 64, "d_ff_ratio": 2, "dropout": 0.25}
    wanted |= {"image_size": 16, "patch_size": 8}
    assert {name: {getattr(model.config, own) for own in owns} for name, owns in names.items()} == {
        name: {wanted[name]} for name in names
    }
    assert len(names) == 7
    assert model.config.id2label == {0: "cat", 1: "dog", 2: "owl"}
    assert labels.order == (0, 1, 2)
    assert (processor.size["height"], processor.size["width"]) == (16, 16)
    assert model(pixel_values=torch.zeros(2, 3, 16, 16)).logits.shape == (2, 3)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@TYPES
@pytest.mark.parametrize("kind, init", (("shared", "ones"), ("per_head", "concatenate")))
def test_collaborative_from_the_start(model_type, kind, init):
    born = ("--collaborative", "--dim_shared_query_key", 8, "--kind", kind, "--mixing_init", init)
    model, _, _ = make("--model_type", model_type, *SMALL, *born)
    stock, _, _ = make("--model_type", model_type, *SMALL)
    assert all(swapped(model))
    assert len(sites(model)) == 2
    assert model.num_parameters() < stock.num_parameters()
    if kind == "shared":
        mixing = [parameter for name, parameter in model.named_parameters() if name.endswith("mixing")]
        assert [tuple(each.shape) for each in mixing] == [(4, 8)] * 2
        assert all((each == 1).all() for each in mixing)


def test_a_named_config_keeps_its_sizes_but_not_its_classes(tmp_path):
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    AutoConfig.for_model(
        "deit", **small, image_size=[8, 16], architectures=["DeiTForImageClassificationWithTeacher"], num_labels=9
    ).save_pretrained(tmp_path)
    model, processor, _ = make("--config_name", tmp_path)
    assert type(model).__name__ == "DeiTForImageClassification"
    assert (model.config.hidden_size, model.num_labels) == (32, 3)
    assert (processor.size["height"], processor.size["width"]) == (8, 16)


@pytest.mark.parametrize(
    "flags, message",
    (
        ("--num_heads 5", "--d_model 192 is not a multiple of --num_heads 5"),
        ("--patch_size 7", "--image_size 32 is not a multiple of --patch_size 7"),
        ("--d_ff 100 --model_type dinov2", "--d_ff 100 is not a multiple of --d_model 192, as dinov2 needs it"),
    ),
)
def test_sizes_that_cannot_be_are_refused(flags, message):
    with pytest.raises(ArgumentError, match=message):
        make("--model_type", "vit", *flags.split())


def test_configs_of_no_image_classifier_are_refused(tmp_path):
    AutoConfig.for_model("bert", hidden_size=32, num_hidden_layers=1, num_attention_heads=2).save_pretrained(tmp_path)
    with pytest.raises(ArgumentError, match=r"unknown model type \(of .*\) 'bert'; known: vit, deit, dinov2"):
        make("--config_name", tmp_path)
