"""A model is saved as what it is, whoever else shares its config, and wherever its layers come from."""

import copy
import json

import pytest
import torch
from model_configs import bert_config
from model_runs import aligned, output, sites
from opening import layers_of, record_of
from transformers import (
    BertForSequenceClassification,
    BertModel,
    CLIPVisionConfig,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.bert.modeling_bert import BertPreTrainedModel

from collab_heads import fold_heads, model_card, prune_heads, swap_to_alpha, swap_to_collaborative, swap_to_gated
from collab_heads.errors import UnsupportedModelError
from collab_heads.model.apply_state import undone
from collab_heads.sites.record import FIELD, CollabConfig, plain_path
from families import FAMILIES

SLOW = pytest.mark.slow
INPUTS = FAMILIES["bert"].inputs()


def narrow(model):
    swap_to_collaborative(model, dim_shared_query_key=16)


def prune(model):
    prune_heads(model, heads={path: [0] for path in sites(model)})


CHANGES = {"swap": narrow, "prune": prune, "gates": swap_to_gated, "alphas": swap_to_alpha}


def twins(name="bert"):
    """A model, and another one made from the same config object."""
    model = FAMILIES[name].build()
    return model, aligned(type(model)(model.config).eval())


def check_saved(model, folder, recorded, inputs=INPUTS):
    """What is saved is what is loaded, and it records, and says, so many changed sites."""
    model.eval().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    parts = [config] if FIELD in config else [part for part in config.values() if isinstance(part, dict)]
    assert sum(len(part[FIELD]["sites"]) for part in parts if FIELD in part) == recorded
    assert ("transformers_weights" in config) == (folder / "README.md").exists() == (recorded > 0)
    again, info = type(model).from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(output(aligned(again.eval()), inputs), output(aligned(model), inputs))
    return again


@pytest.mark.parametrize(
    "change", [pytest.param(name, marks=SLOW if name in ("gates", "alphas") else ()) for name in CHANGES]
)
def test_another_model_of_the_same_config_stays_what_it_is(change, tmp_path):
    changed, other = twins()
    assert changed.config is other.config
    CHANGES[change](changed)
    check_saved(other, tmp_path / "other", 0)
    check_saved(changed, tmp_path / "changed", 2)
    assert changed.config is not other.config and not hasattr(other.bert.config, FIELD)
    assert all(module.config is other.config for module in other.modules() if hasattr(module, "config"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ("t5", "marian", "clip"))
def test_stacks_with_configs_of_their_own(name, tmp_path):
    changed, other = twins(name)
    prune(changed)
    inputs = FAMILIES[name].inputs()
    check_saved(other, tmp_path / "other", 0, inputs)
    again = check_saved(changed, tmp_path / "changed", len(set(CollabConfig.alone(changed.config).sites)), inputs)
    assert CollabConfig.on(again) == CollabConfig.on(changed) == record_of(changed)


def test_two_changes_under_one_config(tmp_path):
    """Each goes on from what it is, not from what the other one made of the config."""
    first, second = twins()
    narrow(first)
    prune(second)
    check_saved(first, tmp_path / "first", 2)
    swap_to_gated(second)
    check_saved(second, tmp_path / "second", 2)
    prune_heads(first, heads={"enc-self": [[1], []]})
    assert not any(state.gates for state in CollabConfig.on(first).sites.values())
    check_saved(first, tmp_path / "again", 2)


@pytest.mark.slow
def test_one_that_was_made_of_a_changed_one_keeps_its_change(tmp_path):
    pruned = FAMILIES["bert"].build()
    prune(pruned)
    made = BertForSequenceClassification(pruned.config)
    fold_heads(pruned)
    check_saved(pruned, tmp_path / "folded", 0)
    check_saved(made, tmp_path / "made", 2)
    prune_heads(made, heads={"enc-self": [[1], []]})
    fold_heads(made)
    check_saved(made, tmp_path / "made folded", 0)


def test_a_task_model_knows_what_its_base_became(tmp_path):
    model, other = twins()
    narrow(model.bert)
    check_saved(other, tmp_path / "other", 0)
    prune(model)
    check_saved(model, tmp_path / "model", 2)
    fresh, changed = FAMILIES["bert"].build(), BertModel(bert_config())
    narrow(changed)
    fresh.bert = changed
    check_saved(fresh, tmp_path / "fresh", 2)


def test_layers_that_move_take_their_record_along(tmp_path):
    teacher, student = FAMILIES["bert"].build(), FAMILIES["bert"].build()
    narrow(teacher)
    prune_heads(teacher, heads={"enc-self": [[0], [1, 2]]})
    student.bert.encoder.layer[0] = teacher.bert.encoder.layer[1]
    check_saved(student, tmp_path / "moved", 1)
    assert record_of(student).sites["encoder.layer.0.attention.self"].kept == (0, 3)
    del teacher.bert.encoder.layer[0]
    teacher.config.num_hidden_layers = 1
    check_saved(teacher, tmp_path / "dropped", 1)


def test_a_layer_in_two_places_is_recorded_twice():
    model = FAMILIES["bert"].build()
    prune_heads(model, heads={"enc-self": [[0], []]})
    model.bert.encoder.layer[1] = model.bert.encoder.layer[0]
    assert list(CollabConfig.on(model).sites) == [f"encoder.layer.{i}.attention.self" for i in range(2)]


@pytest.mark.slow
def test_a_copy_has_a_record_of_its_own(tmp_path):
    model = FAMILIES["bert"].build()
    prune(model)
    twin = copy.deepcopy(model)
    fold_heads(model)
    check_saved(twin, tmp_path, 2)


def test_a_card_is_that_of_the_model():
    changed, other = twins()
    prune(changed)
    assert "collab_heads" not in str(model_card(other)) and "2 (4)" not in str(model_card(changed))
    assert "3 (4)" in str(model_card(changed))


def test_a_trial_leaves_the_config_of_others_alone():
    model, other = twins()
    prune(other)
    with undone(layers := layers_of(model), layers.with_heads):
        narrow(model)
    assert not CollabConfig.on(model).sites and CollabConfig.on(model).is_in(model)
    assert len(record_of(other).sites) == 2


def test_a_stack_that_does_not_load_alone_is_not_saved_alone(tmp_path):
    model = FAMILIES["t5"].build()
    model.encoder.save_pretrained(tmp_path / "stock")
    prune(model)
    with pytest.raises(UnsupportedModelError, match=r"block.0.* in this T5Stack .* a t5 model .*: save the whole"):
        model.encoder.save_pretrained(tmp_path / "changed")
    assert not (tmp_path / "changed").exists()


def test_paths_without_wrappers():
    assert (
        plain_path("encoder.layer.0._fsdp_wrapped_module.attention._orig_mod.self") == "encoder.layer.0.attention.self"
    )


def pair(*folders):
    return EncoderDecoderModel.from_encoder_decoder_pretrained(*folders).eval()


@pytest.fixture
def folders(tmp_path):
    """A changed BERT and a stock one, stored."""
    changed = BertModel(bert_config())
    narrow(changed)
    prune_heads(changed, heads={"enc-self": [[0], [1, 2]]})
    changed.save_pretrained(tmp_path / "changed")
    BertModel(bert_config()).save_pretrained(tmp_path / "stock")
    return tmp_path / "changed", tmp_path / "stock"


@pytest.mark.slow
@pytest.mark.parametrize("changed", ("encoder", "decoder"))
def test_an_encoder_decoder_made_of_a_changed_model(changed, folders, tmp_path):
    whole = pair(*folders) if changed == "encoder" else pair(*reversed(folders))
    part = BertModel.from_pretrained(folders[0])
    inside = getattr(whole, changed).base_model.state_dict()
    assert all(torch.equal(tensor, inside[name]) for name, tensor in part.encoder.state_dict(prefix="encoder.").items())
    inputs = {name: INPUTS["input_ids"] for name in ("input_ids", "decoder_input_ids")}
    again = check_saved(whole, tmp_path / "whole", 2, inputs)
    assert f"`{changed}.encoder.layer.1.attention.self`" in (tmp_path / "whole" / "README.md").read_text()
    again = check_saved(again, tmp_path / "again", 2, inputs)
    prune_heads(getattr(again, changed), heads={"enc-self" if changed == "encoder" else "dec-self": [[1], []]})
    last = getattr(check_saved(again, tmp_path / "pruned", 2, inputs), changed)
    assert [list(state.kept) for state in CollabConfig.on(last).sites.values()] == [[2, 3], [0, 3]]


@pytest.mark.slow
def test_the_parts_of_an_encoder_decoder_are_changed_in_it(tmp_path):
    config = EncoderDecoderConfig.from_encoder_decoder_configs(bert_config(), bert_config())
    whole, other = EncoderDecoderModel(config), EncoderDecoderModel(config)
    prune(whole.encoder)
    inputs = {name: INPUTS["input_ids"] for name in ("input_ids", "decoder_input_ids")}
    check_saved(other, tmp_path / "other", 0, inputs)
    again = check_saved(whole, tmp_path / "whole", 2, inputs)
    narrow(again.decoder)
    fold_heads(again.encoder)
    check_saved(again, tmp_path / "decoder", 4, inputs)


def test_an_encoder_decoder_leaves_the_config_of_others_alone(tmp_path):
    """Its encoder has a config of its own by then, like that of the decoder; it is found by its name."""
    config = EncoderDecoderConfig.from_encoder_decoder_configs(bert_config(), bert_config())
    whole, other = EncoderDecoderModel(config), EncoderDecoderModel(config)
    narrow(other.encoder)
    record = copy.deepcopy(getattr(other.config.encoder, FIELD))
    prune(whole.encoder)
    whole.save_pretrained(tmp_path)
    assert getattr(other.config.encoder, FIELD) == record and not hasattr(whole.config.decoder, FIELD)
    assert getattr(EncoderDecoderModel.from_pretrained(tmp_path).config.encoder, FIELD) != record


@pytest.mark.slow
def test_a_model_in_one_of_no_family(tmp_path):
    """Its config is found among those of the whole, which made itself a copy of it."""
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, image_size=8, patch_size=4
    )
    config = LlavaConfig(vision_config=vision, text_config=FAMILIES["llama"].build().config, image_token_index=1)
    whole, other = LlavaForConditionalGeneration(config), LlavaForConditionalGeneration(config)
    text = whole.model.language_model
    text.config = copy.deepcopy(text.config)
    prune(text)
    inputs = {"input_ids": torch.arange(2, 8)[None]}
    check_saved(whole, tmp_path / "whole", 2, inputs)
    check_saved(other, tmp_path / "other", 0, inputs)


def test_a_model_whose_config_is_not_found_is_refused(tmp_path):
    class PairConfig(PretrainedConfig):
        model_type = "pair-of-two"

    class Pair(PreTrainedModel):
        config_class = PairConfig

        def __init__(self, config):
            super().__init__(config)
            self.second = BertModel(bert_config())
            self.post_init()

    whole = Pair(PairConfig())
    whole.save_pretrained(tmp_path / "stock")
    narrow(whole.second)
    with pytest.raises(UnsupportedModelError, match=r"of second in this Pair is changed.*it has none.*'second'"):
        whole.save_pretrained(tmp_path / "changed")


class Named(BertPreTrainedModel):
    """Its base has a name of its own, so that it is not a base model to transformers."""

    def __init__(self, config, towers=1):
        super().__init__(config)
        self.first_tower = BertModel(config)
        if towers > 1:
            self.second_tower = BertModel(copy.deepcopy(config))
        self.post_init()

    def forward(self, **inputs):
        return self.first_tower(**inputs)


class Pair(Named):
    def __init__(self, config):
        super().__init__(config, towers=2)


def test_a_base_of_another_name(tmp_path):
    model = aligned(Named(bert_config()).eval())
    narrow(model.first_tower)
    for folder in (tmp_path / "once", tmp_path / "twice"):  # what was loaded is saved again
        model.save_pretrained(folder)
        again = aligned(Named.from_pretrained(folder).eval())
        assert torch.equal(again(**INPUTS)[0], model(**INPUTS)[0])
        model = again


def test_a_base_of_another_name_leaves_the_config_of_others_alone(tmp_path):
    config = bert_config()
    model, other = Named(config), Named(config)
    narrow(other.first_tower)
    record = copy.deepcopy(getattr(other.config, FIELD))
    prune(model.first_tower)
    assert model.config is other.config  # of two models until one of them is saved
    model.save_pretrained(tmp_path)
    assert model.config is not other.config and getattr(other.config, FIELD) == record
    assert getattr(Named.from_pretrained(tmp_path).config, FIELD) == getattr(model.config, FIELD) != record


def test_two_models_that_one_config_builds(tmp_path):
    model = aligned(Pair(bert_config()).eval())
    narrow(model.first_tower)
    with pytest.raises(UnsupportedModelError, match=r"several bert models.*second_tower\.encoder.*save each"):
        model.save_pretrained(tmp_path)
    assert not any(tmp_path.iterdir())
    narrow(model.second_tower)
    model.save_pretrained(tmp_path)
    again = aligned(Pair.from_pretrained(tmp_path).eval())
    assert torch.equal(again.second_tower(**INPUTS)[0], model.second_tower(**INPUTS)[0])


class Student(BertForSequenceClassification):
    def __init__(self, config):
        super().__init__(config)
        self.teacher = BertForSequenceClassification(copy.deepcopy(config))
        self.post_init()


@pytest.mark.parametrize("which", ("student", "teacher"))
def test_a_student_that_is_built_with_its_teacher(which, tmp_path):
    model = aligned(Student(bert_config()).eval())
    narrow(model if which == "student" else model.teacher)
    with pytest.raises(UnsupportedModelError, match=r"several bert models.*teacher\.bert\.encoder"):
        model.save_pretrained(tmp_path)
    model.teacher.save_pretrained(tmp_path)  # alone


def test_a_teacher_that_was_given_to_a_student(tmp_path):
    """What the class does not build cannot be built wrong; and its config is its own."""
    student, teacher = (aligned(BertForSequenceClassification(bert_config()).eval()) for _ in range(2))
    student.teacher = teacher
    narrow(student)
    assert not hasattr(teacher.config, FIELD)
    student.save_pretrained(tmp_path)
    again = aligned(BertForSequenceClassification.from_pretrained(tmp_path).eval())
    assert torch.equal(again(**INPUTS).logits, student(**INPUTS).logits)
