"""Settings of `generate` are checked by name: those of transformers' models pass, others are refused."""

import json

import pytest
from transformers import GenerationConfig

from collab_heads.errors import ConfigError
from collab_heads.serving.search_settings import settings_from
from families import FAMILIES

WRONG = {
    "num_beams": ["many", 0.5, True, 1 << 11, -1],
    "num_return_sequences": [1 << 11],
    "max_length": ["x", 1 << 25, 1.0],
    "top_k": ["x", -1],
    "no_repeat_ngram_size": [[3]],
    "temperature": ["hot", float("nan"), False],
    "length_penalty": ["x"],
    "guidance_scale": [[1.0]],
    "do_sample": ["yes", 1],
    "output_scores": ["no"],
    "forced_bos_token_id": [100, "x", -1, [1]],
    "decoder_start_token_id": [100],
    "eos_token_id": ["x", [1, "y"], -2, 1.0, True, {}],
    "suppress_tokens": [[1.5], "x"],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_setting_is_refused_by_name(name):
    for value in WRONG[name]:
        with pytest.raises(ConfigError, match=rf"{name} is .*, expected "):
            settings_from({name: value}, size=100)


def test_valid_settings_stay():
    given = {"num_beams": 4, "eos_token_id": [1, 2], "pad_token_id": -1, "do_sample": True, "temperature": 0.5}
    given |= {"forced_bos_token_id": 99, "suppress_tokens": [3], "max_new_tokens": None, "top_k": 0}
    found = settings_from(given, size=100)
    assert {name: getattr(found, name) for name in given} == given


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.build().can_generate()])
def test_the_settings_of_every_family_are_valid(name):
    config = FAMILIES[name].build().generation_config
    assert settings_from(json.loads(config.to_json_string())) == GenerationConfig.from_dict(config.to_dict())
