"""The engines of CTranslate2: how each runs a batch, and how far what it computes for a row is from PyTorch."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel

from collab_heads.contract.registry import ctranslate2_form
from collab_heads.files.reading import parse_json, read_text
from collab_heads.serving.comparison import NEW_TOKENS, greedy


class Engine(ABC):
    """One of CTranslate2's engines, with a model that was loaded for one thread.

    Args:
        folder: of the converted model.
        model: its original in PyTorch.
    """

    runner: str

    def __init__(self, folder: Path, model: PreTrainedModel):
        import ctranslate2

        runner = attrgetter(self.runner)(ctranslate2)
        self.engine = runner(str(folder), device="cpu", intra_threads=1, inter_threads=1)
        # a decoder whose first token is that of a language is given it by its user
        self.begins = parse_json(read_text(folder / "config.json")).get("decoder_start_token", "") is not None

    def rows(self, inputs: Mapping) -> list[dict[str, Tensor]]:
        """Return the rows of a batch as batches of one, without their padding."""
        return list(rows_of(inputs))

    @abstractmethod
    def compare(self, model: PreTrainedModel, row: Mapping, tokens: Any) -> tuple[float, float, int, int]:
        """Return the largest difference for a row, the largest value, equal tokens and all tokens."""

    @abstractmethod
    def run(self, rows: Sequence[Mapping], tokens: Any) -> Any:
        """Run the rows of a batch."""

    def run_torch(self, model: PreTrainedModel, inputs: Mapping) -> Any:
        """Run a batch in PyTorch."""
        return greedy(model, {name: value for name, value in inputs.items() if not name.startswith("decoder_")})


class Encodes(Engine):
    runner = "Encoder"

    def compare(self, model, row, tokens):
        found, expected = self.run([row], tokens)[0], model.base_model(**row).last_hidden_state[0]
        return float((found - expected).abs().max()), float(expected.abs().max()), 0, 0

    def run(self, rows, tokens):
        """Return the last hidden states: [B, T, D]."""
        types = [ids(row, "token_type_ids") for row in rows] if "token_type_ids" in rows[0] else None
        found = self.engine.forward_batch([ids(row) for row in rows], token_type_ids=types)
        return torch.from_numpy(np.array(found.last_hidden_state))

    def run_torch(self, model, inputs):
        return model.base_model(**inputs)


class Continues(Engine):
    runner = "Generator"

    def compare(self, model, row, tokens):
        found = torch.from_numpy(np.array(self.engine.forward_batch([ids(row)])))[0]
        expected = model(**row).logits[0, :, : found.shape[-1]]
        equal = agreeing(model, row, self.run([row], tokens)[0].sequences_ids[0])
        return float((found - expected).abs().max()), float(expected.abs().max()), equal, NEW_TOKENS

    def run(self, rows, tokens):
        """Continue the rows greedily."""
        texts = [tokens.convert_ids_to_tokens(ids(row)) for row in rows]
        return self.engine.generate_batch(
            texts, max_length=NEW_TOKENS, min_length=NEW_TOKENS, sampling_topk=1, include_prompt_in_result=False
        )


class Translates(Engine):
    runner = "Translator"

    def compare(self, model, row, tokens):
        """Compare the log-probabilities of PyTorch's greedy translation."""
        chosen = greedy(model, row).sequences
        target = chosen[0, 1:]
        text = tokens.convert_ids_to_tokens(chosen[0, self.begins :].tolist())
        scored = self.engine.score_batch([self.text(row, tokens)], [text])
        found = torch.tensor(scored[0].log_probs[: len(target)])
        logits = model(**row, decoder_input_ids=chosen[:, :-1]).logits[0]
        if not ctranslate2_form(model.config).chooses_padding:
            logits[:, model.config.pad_token_id] = -torch.inf
        scores = logits.log_softmax(-1)
        expected = scores[torch.arange(len(target)), target]
        gap = (found - expected)[expected.isfinite()].abs().max()
        size = scores[scores.isfinite()].abs().max()  # of all tokens: those of sure choices are nearly 0
        translated = self.run([row], tokens, start=text[:1])[0].hypotheses[0][not self.begins :]
        equal = sum(a == b for a, b in zip(translated, tokens.convert_ids_to_tokens(target.tolist()), strict=False))
        return float(gap), float(size), equal, NEW_TOKENS

    def text(self, row: Mapping, tokens: Any) -> list[str]:
        """Return the tokens of a row."""
        return tokens.convert_ids_to_tokens(ids(row))

    def run(self, rows, tokens, start=None):
        """Translate the rows greedily; `start` is the first token of a decoder that has none of its own."""
        return self.engine.translate_batch(
            [self.text(row, tokens) for row in rows],
            None if self.begins else [start or ["<0>"]] * len(rows),
            beam_size=1,
            max_decoding_length=NEW_TOKENS,
            min_decoding_length=NEW_TOKENS,
        )


class Transcribes(Engine):
    def __init__(self, folder, model):
        form = ctranslate2_form(model.config)
        self.runner = cast(str, form.transcriber)
        super().__init__(folder, model)
        self.end, self.prompt = model.config.eos_token_id, list(form.prompt(model))

    def compare(self, model, row, tokens):
        """Compare the logits of the engine's greedy tokens; both start as a transcript without times does."""
        (found,) = self.run([row], tokens)
        chosen = torch.tensor(found.sequences_ids[0])
        read = torch.cat([torch.tensor(self.prompt), chosen])[None]
        logits = model(**row, decoder_input_ids=read).logits[0, -len(chosen) - 1 : -1]
        logits[:, self.end] = -torch.inf  # which the engine is not to choose
        steps = torch.from_numpy(np.array([np.array(each).reshape(-1) for each in found.logits[0]]))[: len(chosen)]
        is_finite = logits.isfinite() & steps.isfinite()
        gap = (steps - logits)[is_finite].abs().max()
        return float(gap), float(logits[is_finite].abs().max()), int((logits.argmax(-1) == chosen).sum()), len(chosen)

    def run(self, rows, tokens):
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

    def run_torch(self, model, inputs):
        """Transcribe as the engine does; a family's own `generate` may begin again where a transcript looks odd."""
        features, start = (
            inputs["input_features"],
            torch.tensor([self.prompt]).expand(len(inputs["input_features"]), -1),
        )
        options: dict[str, Any] = {"do_sample": False, "num_beams": 1}
        options |= {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS}
        return GenerationMixin.generate(model, input_features=features, decoder_input_ids=start, **options)

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


def ids(row: Mapping, name: str = "input_ids") -> list[int]:
    """Return the ids of a row."""
    return row[name][0].tolist()


def rows_of(inputs: Mapping) -> Iterator[dict[str, Tensor]]:
    """Yield the rows of a batch as batches of one, without their padding."""
    for index in range(len(inputs["input_ids"])):
        mask = inputs["attention_mask"][index].bool() if "attention_mask" in inputs else slice(None)
        found = {name: inputs[name][index][mask][None] for name in ("input_ids", "token_type_ids") if name in inputs}
        yield found | {"attention_mask": torch.ones_like(found["input_ids"])}


def agreeing(model: PreTrainedModel, row: Mapping, found: Sequence[int]) -> int:
    """Return how many tokens of a greedy continuation are those of PyTorch."""
    expected = greedy(model, row).sequences[0, row["input_ids"].shape[1] :].tolist()
    return sum(a == b for a, b in zip(found, expected, strict=False))
