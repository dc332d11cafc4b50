"""The engines of CTranslate2: how each runs a batch, and how far what it computes for a row is from PyTorch."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from collab_heads.contract.registry import ctranslate2_form
from collab_heads.files.reading import parse_json, read_text
from collab_heads.serving.comparison import NEW_TOKENS, Differences, greedy, source_of
from collab_heads.serving.example_inputs import ids, rows_of

NAMED = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
# settings of `generate` that change which tokens can be chosen; the engine reads no generation config
RULES = {"forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids"}
RULES |= {"sequence_bias", "repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length"}


class Engine(ABC):
    """One of CTranslate2's engines, with a model that was loaded for one thread.

    Args:
        folder: of the converted model.
        model: its original in PyTorch.
        tokenizer: the tokenizer that its vocabulary is of.
    """

    runner: str

    def __init__(self, folder: Path, model: PreTrainedModel, tokenizer: Any):
        import ctranslate2

        runner = attrgetter(self.runner)(ctranslate2)
        self.engine = runner(str(folder), device="cpu", intra_threads=1, inter_threads=1)
        self.model, self.tokenizer = without_rules(model), tokenizer
        # a decoder whose first token is that of a language is given it by its user
        self.begins = parse_json(read_text(folder / "config.json")).get("decoder_start_token", "") is not None

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """The vocabulary: token -> id."""
        return self.tokenizer.get_vocab()

    def rows(self, inputs: Mapping) -> list[dict[str, Tensor]]:
        """Return the rows of a batch as batches of one, without their padding."""
        return list(rows_of(inputs))

    @abstractmethod
    def compare(self, found: Differences, row: Mapping) -> None:
        """Compare what the engine computes for a row with PyTorch."""

    @abstractmethod
    def run(self, rows: Sequence[Mapping]) -> Any:
        """Run the rows of a batch."""

    def run_torch(self, inputs: Mapping) -> Any:
        """Run a batch in PyTorch."""
        return greedy(self.model, source_of(inputs))


class Encodes(Engine):
    runner = "Encoder"

    def compare(self, found, row):
        found.add("last_hidden_state", self.run_torch(row).last_hidden_state, self.run([row]))

    def run(self, rows):
        """Return the last hidden states: [B, T, D]."""
        types = [ids(row, "token_type_ids") for row in rows] if "token_type_ids" in rows[0] else None
        found = self.engine.forward_batch([ids(row) for row in rows], token_type_ids=types)
        return torch.from_numpy(np.array(found.last_hidden_state))

    def run_torch(self, inputs):
        return self.model.base_model(**inputs)


class Continues(Engine):
    runner = "Generator"

    def compare(self, found, row):
        expected = self.model(**row).logits
        logits = torch.from_numpy(np.array(self.engine.forward_batch([ids(row)])))
        found.add("logits", expected, logits[..., : expected.shape[-1]])  # the converter may fill the vocabulary up
        chosen = greedy(self.model, row)
        continued = torch.tensor([self.run([row])[0].sequences_ids[0]])
        found.add_tokens(chosen.sequences[:, row["input_ids"].shape[1] :], continued, chosen.scores)

    def run(self, rows):
        """Continue the rows greedily."""
        texts = [self.tokenizer.convert_ids_to_tokens(ids(row)) for row in rows]
        return self.engine.generate_batch(
            texts, max_length=NEW_TOKENS, min_length=NEW_TOKENS, sampling_topk=1, include_prompt_in_result=False
        )


class Translates(Engine):
    runner = "Translator"

    def compare(self, found, row):
        """Compare the log-probabilities of PyTorch's greedy translation."""
        chosen = greedy(self.model, row)
        read, target = chosen.sequences[:, :-1], chosen.sequences[0, 1:]
        text = self.tokenizer.convert_ids_to_tokens(chosen.sequences[0, self.begins :].tolist())
        scored = self.engine.score_batch([self.text(row)], [text])
        logits = self.model(**row, decoder_input_ids=read).logits[0]
        if not ctranslate2_form(self.model.config).chooses_padding:
            logits[:, self.model.config.pad_token_id] = -torch.inf
        scores = logits.log_softmax(-1)
        size = scores[scores.isfinite()].abs().max()  # of all tokens: those of sure choices are nearly 0
        expected = scores[torch.arange(len(target)), target]
        found.add("log_probs", expected, torch.tensor(scored[0].log_probs[: len(target)]), float(size))
        translated = self.run([row], start=text[:1])[0].hypotheses[0][not self.begins :]
        numbers = torch.tensor([[self.numbers.get(token, -1) for token in translated]])
        found.add_tokens(target[None], numbers, chosen.scores)

    def text(self, row: Mapping) -> list[str]:
        """Return the tokens of a row."""
        return self.tokenizer.convert_ids_to_tokens(ids(row))

    def run(self, rows, start=None):
        """Translate the rows greedily; `start` is the first token of a decoder that has none of its own."""
        length = NEW_TOKENS + (not self.begins)  # with the token that is given
        return self.engine.translate_batch(
            [self.text(row) for row in rows],
            None if self.begins else [start or ["<0>"]] * len(rows),
            beam_size=1,
            max_decoding_length=length,
            min_decoding_length=length,
        )


class Transcribes(Engine):
    def __init__(self, folder, model, tokenizer):
        form = ctranslate2_form(model.config)
        self.runner = cast(str, form.transcriber)
        super().__init__(folder, model, tokenizer)
        self.end, self.prompt = model.config.eos_token_id, list(form.prompt(model))

    def compare(self, found, row):
        """Compare the logits of the engine's greedy tokens; both start as a transcript without times does."""
        (transcript,) = self.run([row])
        chosen = torch.tensor(transcript.sequences_ids)
        read = torch.cat([torch.tensor([self.prompt]), chosen], dim=1)
        logits = self.model(**row, decoder_input_ids=read).logits[0, -chosen.shape[1] - 1 : -1]
        steps = torch.from_numpy(np.array([np.array(each).reshape(-1) for each in transcript.logits[0]]))
        for each in (logits, steps):
            each[:, self.end] = -torch.inf  # which the engine is not to choose
        found.add("logits", logits, steps[: len(logits)])
        found.add_tokens(logits.argmax(-1)[None], chosen, [each[None] for each in logits])

    def run(self, rows):
        """Transcribe the rows greedily."""
        import ctranslate2

        features = torch.cat([row["input_features"] for row in rows]).float().contiguous().numpy()
        return self.engine.generate(
            ctranslate2.StorageView.from_array(features),
            [self.prompt] * len(rows),
            beam_size=1,
            max_length=2 * NEW_TOKENS,  # of which the engine takes half for the text
            suppress_blank=False,
            suppress_tokens=[self.end],
            return_logits_vocab=True,
        )

    def run_torch(self, inputs):
        """Transcribe as the engine does; a family's own `generate` may begin again where a transcript looks odd."""
        features = inputs["input_features"]
        start = torch.tensor([self.prompt]).expand(len(features), -1)
        options: dict[str, Any] = {"do_sample": False, "num_beams": 1}
        options |= {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS}
        generate = cast(Any, GenerationMixin).generate
        return generate(self.model, input_features=features, decoder_input_ids=start, **options)

    def rows(self, inputs):
        return [{"input_features": each[None]} for each in inputs["input_features"]]


def engine_of(model: PreTrainedModel) -> type[Engine] | None:
    """Return the engine that runs a model; None where there is none."""
    if ctranslate2_form(model.config).transcriber is not None and model.can_generate():
        return Transcribes
    if model.main_input_name != "input_ids":
        return None
    if not model.can_generate():
        return None if model.config.is_encoder_decoder else Encodes
    return Translates if model.config.is_encoder_decoder else Continues


def without_rules(model: PreTrainedModel) -> PreTrainedModel:
    """Return the same model, of the same modules, whose greedy decoding knows no rules but those of the engine."""
    plain = cast(Any, copy.copy(model))
    if model.can_generate():
        before, pad = plain.generation_config, model.config.pad_token_id
        suppressed = None if ctranslate2_form(model.config).chooses_padding else [pad]
        named = {name: getattr(before, name) for name in NAMED}
        plain.generation_config = GenerationConfig(**named, suppress_tokens=suppressed)
    return plain


def rules(model: PreTrainedModel) -> str:
    """Return the rules of a model's generation config, which the engine does not read; the padding is known to it."""
    given = cast(Any, model).generation_config.to_diff_dict() if model.can_generate() else {}
    known: tuple[Any, ...] = None, [], [[model.config.pad_token_id]]
    found = {name: given[name] for name in sorted(RULES) if given.get(name) not in known}
    return ", ".join(f"{name}={value!r:.40}" for name, value in found.items())
