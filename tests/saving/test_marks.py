"""The marks in a stored config: there while the attention is changed, gone afterwards, never in the way."""

import copy
import json

import pytest
import torch
import transformers
from known_heads import word_pieces
from load_without_package import refusal
from model_configs import bert_config
from model_runs import aligned, output
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    CLIPTextModel,
    EncoderDecoderConfig,
    PretrainedConfig,
)

from collab_heads import collaborative_config, fold_heads, swap_to_gated
from collab_heads.saving.marks import CODE, MODULE, SENTENCE, SOURCE, WEIGHTS, auto_map, choice, is_mark, marked
from families import FAMILIES

FILE = f"{MODULE}.py"


@pytest.fixture
def gated(tmp_path):
    model = FAMILIES["bert"].build()
    swap_to_gated(model)
    model.save_pretrained(tmp_path)
    return model


def stored(folder):
    return json.loads((folder / "config.json").read_text())


def test_what_is_stored(gated, tmp_path):
    config = stored(tmp_path)
    assert config[WEIGHTS] == SENTENCE
    assert config[CODE]["AutoModel"] == f"{MODULE}.BertModel"
    assert config[CODE]["AutoModelForSequenceClassification"] == f"{MODULE}.BertForSequenceClassification"
    assert (tmp_path / FILE).read_bytes() == SOURCE.read_bytes()
    assert {WEIGHTS, CODE} & vars(gated.config).keys() == set()  # the model in use is not marked


def test_a_loaded_model_has_no_marks_and_is_stored_with_them_again(gated, tmp_path):
    again = BertForSequenceClassification.from_pretrained(tmp_path)
    assert {WEIGHTS, CODE} & vars(again.config).keys() == set()
    assert again.config.collab_heads == gated.config.collab_heads
    assert WEIGHTS not in again.config.to_json_string() and WEIGHTS not in again.config.to_diff_dict()
    again.save_pretrained(tmp_path / "again")
    again.save_pretrained(tmp_path / "again")
    assert {**stored(tmp_path / "again")} == stored(tmp_path)
    assert (tmp_path / "again" / FILE).read_bytes() == SOURCE.read_bytes()


def test_a_folded_model_has_none(gated, tmp_path):
    again = BertForSequenceClassification.from_pretrained(tmp_path)
    fold_heads(again)
    again.save_pretrained(tmp_path)
    assert {WEIGHTS, CODE, "collab_heads"} & stored(tmp_path).keys() == set()
    assert not (tmp_path / FILE).exists()


def test_an_unchanged_model_has_none(tmp_path):
    FAMILIES["bert"].build().save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert {WEIGHTS, CODE} & stored(tmp_path).keys() == set()


def test_each_changed_stack_is_marked(tmp_path):
    """What loads alone from the files of the whole reads its own part of the config."""
    model = FAMILIES["clip"].build()
    swap_to_gated(model, sites="dec-self")
    model.save_pretrained(tmp_path)
    config = stored(tmp_path)
    assert (config[WEIGHTS], config["text_config"][WEIGHTS]) == (SENTENCE, SENTENCE)
    assert WEIGHTS not in config["vision_config"]
    text = CLIPTextModel.from_pretrained(tmp_path)
    assert hasattr(text.config, "collab_heads") and not hasattr(text.config, WEIGHTS)
    whole = type(model).from_pretrained(tmp_path)
    assert not hasattr(whole.config.text_config, WEIGHTS)
    fold_heads(whole)
    whole.save_pretrained(tmp_path)
    assert SENTENCE not in (tmp_path / "config.json").read_text()


def test_a_model_made_of_changed_ones_is_marked(tmp_path):
    encoder = BertModel(bert_config())
    swap_to_gated(encoder)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(encoder.config, bert_config(is_decoder=True))
    assert not hasattr(config, "collab_heads")
    config.save_pretrained(tmp_path)
    assert stored(tmp_path)[WEIGHTS] == stored(tmp_path)["encoder"][WEIGHTS] == SENTENCE


def test_older_checkpoints_load(gated, tmp_path):
    config = stored(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in (WEIGHTS, CODE)}))
    again = BertForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(
        output(aligned(again.eval()), FAMILIES["bert"].inputs()), output(gated, FAMILIES["bert"].inputs())
    )


def test_a_file_of_weights_that_a_config_names_is_read(tmp_path):
    model = FAMILIES["bert"].build()
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(stored(tmp_path) | {WEIGHTS: "other.safetensors"}))
    again = BertForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(again.classifier.weight, model.classifier.weight)
    assert not is_mark("other.safetensors") and not is_mark(None)


def test_a_config_that_was_read_before_the_import(gated, tmp_path):
    """It still holds the marks, and a model of it loads."""
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.transformers_weights == SENTENCE
    assert copy.deepcopy(config).to_dict() == config.to_dict()
    for model in (AutoModel.from_pretrained(tmp_path, config=config), AutoModel.from_config(config)):
        assert hasattr(model.config, "collab_heads") and not hasattr(model.config, WEIGHTS)


def test_shards_and_states_of_others(gated, tmp_path):
    state = {name: tensor + 1 for name, tensor in gated.state_dict().items()}
    gated.save_pretrained(tmp_path / "shards", state_dict=state, max_shard_size="20KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").is_file()
    again = BertForSequenceClassification.from_pretrained(tmp_path / "shards")
    assert torch.equal(again.classifier.weight, gated.classifier.weight + 1)


def test_only_trusted_code_runs(gated, tmp_path, monkeypatch):
    """Our own loading never runs what lies in a folder."""
    (tmp_path / FILE).write_text("raise SystemExit('the code of a folder ran')")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(model) is BertForSequenceClassification
    with pytest.raises(SystemExit):
        AutoModelForSequenceClassification.from_pretrained(tmp_path, trust_remote_code=True)


def test_trusted_models_are_those_of_transformers(gated, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(model) is BertForSequenceClassification and model._auto_class is None
    inputs = FAMILIES["bert"].inputs()
    assert torch.equal(output(aligned(model.eval()), inputs), output(gated, inputs))
    fresh = AutoModel.from_config(AutoConfig.from_pretrained(tmp_path), trust_remote_code=True)
    assert type(fresh) is BertModel and hasattr(fresh.config, "collab_heads")


def test_code_of_others_stays(tmp_path):
    """A model that comes with code of its own keeps it, and says what to import without it."""
    model = FAMILIES["bert"].build()
    swap_to_gated(model)
    model.config.auto_map = {"AutoModel": "modeling_other.OtherModel"}
    model.save_pretrained(tmp_path)
    assert stored(tmp_path)[CODE] == {"AutoModel": "modeling_other.OtherModel"}
    assert stored(tmp_path)[WEIGHTS] == SENTENCE and not (tmp_path / FILE).exists()
    assert model.config.auto_map == {"AutoModel": "modeling_other.OtherModel"}


def test_code_from_the_hub_is_ours():
    config = bert_config()
    swap_to_gated(BertModel(config))
    config.auto_map = {"AutoModel": f"me/small--{MODULE}.BertModel"}
    assert marked(config).auto_map == auto_map(config)


def test_a_model_that_transformers_lacks_has_no_code(tmp_path):
    """What its owner registered, or a table has for a part of a config only, no stranger could load by it."""

    class OwnConfig(BertConfig):
        model_type = "own-bert-of-marks"

    class OwnModel(BertModel):
        config_class = OwnConfig

    AutoModel.register(OwnConfig, OwnModel)
    try:
        assert auto_map(OwnConfig()) == {}
        config = OwnConfig()
        config.collab_heads = collaborative_config(bert_config(), 16).collab_heads
        assert getattr(marked(config), CODE, None) is None and marked(config).transformers_weights == SENTENCE
    finally:
        AutoModel._model_mapping._extra_content.pop(OwnConfig)
    other = {type(bert_config()): type("Other", (), {"config_class": OwnConfig, "__module__": "transformers.other"})}
    assert (
        choice(bert_config(), other) is None and choice(bert_config(), {type(bert_config()): BertModel}) == "BertModel"
    )


def test_a_tokenizer_of_its_owner_stays_beside_our_code(gated, tmp_path):
    """Only code of models stands in the way of ours."""
    gated.config.auto_map = {"AutoTokenizer": ["tokenization_own.Own", None]}
    gated.save_pretrained(tmp_path)
    assert stored(tmp_path)[CODE] == {"AutoTokenizer": ["tokenization_own.Own", None]} | auto_map(gated.config)
    assert (tmp_path / FILE).read_bytes() == SOURCE.read_bytes()
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, trust_remote_code=True)
    assert model.config.auto_map == gated.config.auto_map
    fold_heads(model)
    model.save_pretrained(tmp_path)
    assert stored(tmp_path)[CODE] == gated.config.auto_map and not (tmp_path / FILE).exists()


@pytest.mark.parametrize("theirs", ({"AutoModel": "modeling_other.Other"}, {"AutoConfig": "configuration_other.Other"}))
def test_models_of_others_are_theirs(theirs, gated):
    gated.config.auto_map = theirs
    assert marked(gated.config).auto_map == theirs


def test_a_file_of_the_owners_by_our_name_is_left(gated, tmp_path):
    """Our code takes another name beside it, and works; where that is taken, too, there is none."""
    (tmp_path / FILE).write_text("mine = 1")
    gated.save_pretrained(tmp_path)
    gated.save_pretrained(tmp_path)
    assert (tmp_path / FILE).read_text() == "mine = 1"
    assert (tmp_path / f"{MODULE}_2.py").read_bytes() == SOURCE.read_bytes()
    assert stored(tmp_path)[CODE]["AutoModel"] == f"{MODULE}_2.BertModel"
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(again) is BertForSequenceClassification and not hasattr(again.config, CODE)
    (tmp_path / f"{MODULE}_2.py").unlink()
    (tmp_path / f"{MODULE}_2.py").symlink_to(tmp_path / "not there")
    gated.save_pretrained(tmp_path)
    assert CODE not in stored(tmp_path) and stored(tmp_path)[WEIGHTS] == SENTENCE
    fold_heads(gated)
    gated.save_pretrained(tmp_path)
    assert (tmp_path / FILE).read_text() == "mine = 1" and (tmp_path / f"{MODULE}_2.py").is_symlink()


def test_our_code_of_another_version_is_replaced(gated, tmp_path):
    older = SOURCE.read_text() + "# of another version"
    (tmp_path / FILE).write_text(older)
    gated.save_pretrained(tmp_path)
    assert (tmp_path / FILE).read_bytes() == SOURCE.read_bytes()
    (tmp_path / FILE).write_text(older)
    fold_heads(gated)
    gated.save_pretrained(tmp_path)
    assert not (tmp_path / FILE).exists()


def test_tokenizers_and_configs_need_nothing(gated, tmp_path):
    word_pieces().save_pretrained(tmp_path)
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == len(word_pieces())
    assert AutoConfig.from_pretrained(tmp_path).model_type == "bert"


def test_weights_keep_their_names(gated, tmp_path):
    assert load_file(tmp_path / "model.safetensors").keys() == gated.state_dict().keys()


@pytest.mark.parametrize("method", ("bitnet", "unknown"))
def test_a_quantised_base(method, gated, tmp_path, request):
    """The settings of a quantisation are stored as they are; where they can be read, the mark beside them is met."""
    settings = {"quant_method": method, "modules_to_not_convert": ["classifier"]}
    gated.config.quantization_config = settings
    gated.save_pretrained(tmp_path)
    assert stored(tmp_path)["quantization_config"] == settings and stored(tmp_path)[WEIGHTS] == SENTENCE
    if method == "unknown":  # transformers warns of it and goes on
        assert hasattr(BertForSequenceClassification.from_pretrained(tmp_path).config, "collab_heads")
    request.getfixturevalue("without_hooks")
    assert refusal(lambda: AutoModel.from_pretrained(tmp_path)).endswith(SENTENCE)


def test_a_config_of_every_kind_can_be_marked(family):
    config = family.build().config
    assert marked(config).to_dict() == config.to_dict()
    models = auto_map(config)
    assert ("AutoModel" in models) == (type(config) in AutoModel._model_mapping)  # not of SigLIP's texts
    assert all(hasattr(transformers, model.removeprefix(f"{MODULE}.")) for model in models.values())
    assert PretrainedConfig().to_dict() == marked(PretrainedConfig()).to_dict()


@pytest.mark.parametrize("value", (["x"], "x", 5))
def test_a_field_that_is_no_dict_is_left_to_transformers(value, tmp_path):
    """It loads a model whose `auto_map` is anything, and refuses a `fusion_config` of another kind itself."""
    transformers.BertModel(bert_config()).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {CODE: value}))
    model = transformers.BertModel.from_pretrained(tmp_path)
    model.save_pretrained(tmp_path / "again")
    if value != 5:  # which AutoConfig does not take
        transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "alone")
    swap_to_gated(model)
    model.save_pretrained(tmp_path / "gated")
    assert json.loads((tmp_path / "gated/config.json").read_text())[CODE]["AutoModel"].startswith(MODULE)
