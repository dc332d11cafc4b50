"""The target CTranslate2: converted by its own converter from layers under stock names, and compared token by token."""

import copy
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.base.extras import check_extra
from collab_heads.base.progress import progress_bar
from collab_heads.errors import CollabHeadsError, UnsupportedModelError
from collab_heads.files.reading import parse_json, read_text
from collab_heads.serving.comparison import NEW_TOKENS, Comparison, greedy, in_turns
from collab_heads.serving.example_inputs import without_labels
from collab_heads.serving.marian_start import starting_right
from collab_heads.serving.stock_layers import as_stock_layers
from collab_heads.serving.target import Target, first_line, quiet
from collab_heads.sites.record import FIELD

# What the converter (4.8) reads of a config, and configs of transformers 5 say no more: model type -> entries.
ABSOLUTE = {"position_embedding_type": "absolute"}
ENTRIES: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert"), ABSOLUTE),
    "bart": {"normalize_before": False},
    "mbart": {"normalize_before": True},
    "pegasus": {"normalize_before": True, "normalize_embedding": False},
    "mt5": {"tie_word_embeddings": False},  # by which it means that T5 scales the states below its logits
}


class CTranslate2(Target):
    """CTranslate2: heads of any width and any number of neurons in every layer, on the processor and on GPUs."""

    name, has_int8 = "ctranslate2", True

    def check(self, model, int8):
        super().check(model, int8)
        check_extra(self.name, f"exports to {self.name}")
        from ctranslate2.converters.transformers import _MODEL_LOADERS

        loader = _MODEL_LOADERS.get(type(model.config).__name__)
        if loader is None:
            raise UnsupportedModelError(f"CTranslate2 has no conversion of {type(model).__name__}: use to='onnx'")
        if engine_of(model) is None:
            raise UnsupportedModelError(f"{type(model).__name__} is none that CTranslate2 runs for text: use to='onnx'")
        if part_for(model, loader.architecture_name) is None:
            raise UnsupportedModelError(
                f"CTranslate2 runs a {loader.architecture_name}, not a {type(model).__name__}: use to='onnx'"
            )

    def write(self, model, folder, example, *, tokenizer, int8):
        """Convert a copy of the model whose layers have stock names."""
        from ctranslate2.converters import TransformersConverter
        from ctranslate2.converters.transformers import _MODEL_LOADERS

        copied = copy.deepcopy(model).float()
        notes = as_stock_layers(copied, "CTranslate2")
        part = part_for(copied, _MODEL_LOADERS[type(model.config).__name__].architecture_name)
        for name, value in ENTRIES.get(model.config.model_type, {}).items():
            setattr(copied.config, name, value)
        if hasattr(copied.config, "scale_decoder_outputs"):
            copied.config.tie_word_embeddings = copied.config.scale_decoder_outputs
        named = IdTokens(model) if tokenizer is None else tokenizer

        class InMemory(TransformersConverter):
            def load_model(self, model_class, model_name_or_path, **kwargs):
                return part

            def load_tokenizer(self, tokenizer_class, model_name_or_path, **kwargs):
                return named

        with tempfile.TemporaryDirectory() as place, quiet(), starting_right(cast(PreTrainedModel, part)):
            config = copy.deepcopy(model.config)
            if hasattr(config, FIELD):
                delattr(config, FIELD)
            config.dtype = None
            config.save_pretrained(place)
            try:
                InMemory(place).convert(str(folder), quantization="int8" if int8 else None, force=True)
            except CollabHeadsError:
                raise
            except Exception as error:
                raise UnsupportedModelError(
                    f"CTranslate2's converter fails on {type(model).__name__}: {first_line(error)}"
                ) from error
        if tokenizer is None:
            notes += ("the vocabulary has the ids as tokens, since no tokenizer was given",)
        if part is not copied:
            notes += (f"CTranslate2 runs the {type(part).__name__} of the model, without its head",)
        return notes

    def load(self, model, folder):
        return cast(type[Engine], engine_of(model))(folder)

    @torch.no_grad()
    def compare(self, model, folder, batches, tokenizer):
        """Compare what the engine computes for the rows of the batches, without padding."""
        engine, largest, scale, same, count = self.load(model, folder), 0.0, 0.0, 0, 0
        tokens = IdTokens(model) if tokenizer is None else tokenizer
        for batch in progress_bar(batches, desc="comparing"):
            for row in rows_of(without_labels(batch)):
                try:
                    gap, size, equal, chosen = engine.compare(model, row, tokens)
                except (RuntimeError, ValueError) as error:
                    raise UnsupportedModelError(
                        f"CTranslate2 fails on {type(model).__name__}: {first_line(error)}"
                    ) from error
                largest, scale = max(largest, gap), max(scale, size)
                same, count = same + equal, count + chosen
        inputs = without_labels(batches[0])
        rows = list(rows_of(inputs))
        before, after = in_turns([lambda: engine.run_torch(model, inputs), lambda: engine.run(rows, tokens)])
        return Comparison(largest / (scale or 1.0), same / count if count else None, before, after)


class IdTokens:
    """A vocabulary whose tokens are the ids, for a model without a tokenizer.

    Args:
        model: the model.
    """

    def __init__(self, model: PreTrainedModel):
        self.config = model.config
        self.size = model.config.vocab_size
        self.special_tokens_map: dict[str, str] = {}

    def get_vocab(self) -> dict[str, int]:
        """Return token -> id."""
        tokens = {self.convert_ids_to_tokens(number): number for number in range(self.size)}
        if self.config.model_type == "marian":  # the converter leaves out the last token if it has this name
            tokens["<pad>"] = tokens.pop(self.convert_ids_to_tokens(self.size - 1))
        return tokens

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """Return the token of an id, or the tokens of several."""
        return f"<{ids}>" if isinstance(ids, int) else [f"<{number}>" for number in ids]

    def __getattr__(self, name: str) -> str:
        """Return a special token, by the id in the config; the first token where it has none."""
        if not name.endswith("_token"):
            raise AttributeError(name)
        return self.convert_ids_to_tokens(getattr(self.config, f"{name}_id", None) or 0)


class Engine(ABC):
    """One of CTranslate2's engines, with a model that was loaded for one thread.

    Args:
        folder: of the converted model.
    """

    runner: ClassVar[str]

    def __init__(self, folder: Path):
        import ctranslate2

        self.engine = getattr(ctranslate2, self.runner)(str(folder), device="cpu", intra_threads=1, inter_threads=1)
        # a decoder whose first token is that of a language is given it by its user
        self.begins = parse_json(read_text(folder / "config.json")).get("decoder_start_token", "") is not None

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
        left_out = [model.config.pad_token_id] if model.config.model_type == "marian" else []  # by the converter
        logits[:, left_out] = -torch.inf
        expected = logits.log_softmax(-1)[torch.arange(len(target)), target]
        is_finite = expected.isfinite()
        gap = (found - expected)[is_finite].abs().max()
        sizes = expected[is_finite].abs().max()
        translated = self.run([row], tokens, start=text[:1])[0].hypotheses[0][not self.begins :]
        equal = sum(a == b for a, b in zip(translated, tokens.convert_ids_to_tokens(target.tolist()), strict=False))
        return float(gap), float(sizes), equal, NEW_TOKENS

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


def engine_of(model: PreTrainedModel) -> type[Engine] | None:
    """Return the engine that runs a model; None for what reads no text."""
    if model.main_input_name != "input_ids":
        return None
    if not model.can_generate():
        return None if model.config.is_encoder_decoder else Encodes
    return Translates if model.config.is_encoder_decoder else Continues


def part_for(model: PreTrainedModel, name: str) -> PreTrainedModel | None:
    """Return the model, or its base model, whichever is of the class that a converter reads; None if neither is."""
    parts = (model, cast(PreTrainedModel, model.base_model))
    return next((part for part in parts if type(part).__name__ == name), None)


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
