"""Check the settings of `generate` beside a served model: they come from anywhere, and the engines trust them."""

from collections.abc import Callable
from typing import Any

from transformers import GenerationConfig

from collab_heads.base.checks import MAX_SIZE, is_index, is_list, is_number
from collab_heads.sites.state import expect

MOST_ROWS = 1024  # beams, or answers to one text: each takes memory of its own
ROWS = ("num_beams", "num_beam_groups", "num_return_sequences")
SIZES = (
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "top_k"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
)
NUMBERS = (
    *("temperature", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "max_time"),
    *("repetition_penalty", "encoder_repetition_penalty", "length_penalty", "diversity_penalty", "guidance_scale"),
)
FLAGS = (
    *("do_sample", "use_cache", "renormalize_logits", "remove_invalid_values", "return_dict_in_generate"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
)
GIVEN = ("decoder_start_token_id", "forced_bos_token_id")  # tokens that the model reads
COMPARED = (  # a token or several; -1 for none
    *("bos_token_id", "eos_token_id", "pad_token_id", "forced_eos_token_id"),
    *("suppress_tokens", "begin_suppress_tokens"),
)


def settings_from(stored: dict, size: int = MAX_SIZE) -> GenerationConfig:
    """Return the settings that a file stores.

    Args:
        stored: the content of the file.
        size: of the vocabulary, if it is known.

    Raises:
        ConfigError: if a setting is of another type, too large for the memory, or a token that the model does not have.
    """

    def check(names: tuple[str, ...], is_valid: Callable[[Any], bool], wanted: str) -> None:
        for name in names:
            value = stored.get(name)
            expect(value is None or is_valid(value), name, value, wanted)

    check(ROWS, lambda value: is_index(value, MOST_ROWS + 1), f"a whole number up to {MOST_ROWS:,}")
    check(SIZES, lambda value: is_index(value, MAX_SIZE + 1), f"a whole number up to {MAX_SIZE:,}")
    check(NUMBERS, is_number, "a number")
    check(FLAGS, lambda value: isinstance(value, bool), "true or false")
    check(GIVEN, lambda value: is_index(value, size), "a token of the vocabulary")
    check(COMPARED, lambda value: all(map(is_token, value if is_list(value) else [value])), "a token, or several")
    return GenerationConfig.from_dict(stored)


def is_token(value: Any) -> bool:
    """Return True for the number of a token, or -1, which is none."""
    return is_index(value, MAX_SIZE) or (value == -1 and not isinstance(value, bool))
