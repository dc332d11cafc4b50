"""A translation model in CTranslate2 that is called as the original's `generate` is: what `evaluate` scores."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PretrainedConfig

from collab_heads.errors import ArgumentError, ModelStateError
from collab_heads.serving.converted import Converted
from collab_heads.serving.example_inputs import ids, rows_of
from collab_heads.serving.exported_folder import read_settings
from collab_heads.serving.target import first_line

LONGEST = 21  # tokens of a translation, the first included, where nothing says how many: as in transformers


class ServedTranslator(Converted):
    """A translation model in CTranslate2.

    Args:
        folder: what `export` wrote for CTranslate2.
        tokenizer: the tokenizer that its vocabulary is of.
        threads: of the engine.
        check: whether its files are compared with their digests.

    Raises:
        DataError: if a file in the folder is damaged.
        UnsupportedModelError: if the model is none that translates.
    """

    def __init__(self, folder: Path, tokenizer: Any, threads: int = 1, check: bool = True):
        config = PretrainedConfig(is_encoder_decoder=True, architectures=[type(self).__name__])
        super().__init__(folder, config, "Translator", "translation model", threads, check)
        self.generation_config = read_settings(folder, len(tokenizer)) or GenerationConfig()
        self.begins = self.stored.get("decoder_start_token", "") is not None
        self.tokenizer, self.numbers = tokenizer, tokenizer.get_vocab()

    @classmethod
    def can_generate(cls) -> bool:
        """Return True."""
        return True

    def generate(
        self, inputs: Tensor | None = None, generation_config: GenerationConfig | None = None, **settings: Any
    ) -> Tensor:
        """Return the ids of the translations, [B, T].

        Args:
            inputs: the ids of the texts, [B, S].
            generation_config: the beams, the length penalty, what is not to be repeated, the longest translation, and
                the first token, if it is that of a language. CTranslate2 does not read other settings, and always
                searches. None for that of the model.
            settings: in place of those of the config; also `input_ids`, and `attention_mask`, [B, S]. Without it,
                padding does not count.

        Raises:
            ArgumentError: if there are no ids, or a text has no tokens.
            ModelStateError: if the engine cannot read them, such as texts longer than its positions.
        """
        given, spell = copy.deepcopy(generation_config or self.generation_config), self.tokenizer.convert_ids_to_tokens
        batch = given.update(**settings)
        if inputs is not None:
            batch["input_ids"] = inputs
        if batch.get("input_ids") is None:
            raise ArgumentError("pass the ids of the texts, as inputs or as input_ids=")
        if batch.get("attention_mask") is None:
            batch["attention_mask"] = batch["input_ids"] != self.tokenizer.pad_token_id
        longest = (given.max_length or LONGEST) if given.max_new_tokens is None else given.max_new_tokens + 1
        first = [] if self.begins else [given.decoder_start_token_id]
        start = spell([number for number in (*first, given.forced_bos_token_id) if number is not None])
        texts = [spell(ids(row)) for row in rows_of(batch)]
        if not texts or len(texts) < len(batch["input_ids"]):
            raise ArgumentError("a text of no tokens: leave it out")
        try:
            found = self.engine.translate_batch(
                texts,
                [start] * len(texts) if start else None,
                beam_size=given.num_beams or 1,
                length_penalty=1.0 if given.length_penalty is None else given.length_penalty,
                repetition_penalty=given.repetition_penalty or 1.0,
                no_repeat_ngram_size=given.no_repeat_ngram_size or 0,
                # without the token before the first, and the last one if PyTorch makes it the end
                max_decoding_length=longest - 1 - (given.forced_eos_token_id is not None),
            )
        except (RuntimeError, ValueError) as error:
            raise ModelStateError(f"CTranslate2 fails on these texts: {first_line(error)}: cut them") from error
        rows = [torch.tensor(self.ids_of(each.hypotheses[0]), dtype=torch.long) for each in found]
        return pad_sequence(rows, batch_first=True, padding_value=self.tokenizer.pad_token_id)

    def ids_of(self, tokens: list[str]) -> list[int]:
        """Return the ids of tokens.

        Args:
            tokens: of the vocabulary.
        """
        return [self.numbers.get(token, self.tokenizer.unk_token_id) for token in tokens]
