"""The target CTranslate2: converted by its own converter from layers under stock names, and compared token by token."""

import copy
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from collab_heads.base.extras import check_extra
from collab_heads.base.progress import progress_bar
from collab_heads.contract.registry import get_adapter
from collab_heads.errors import CollabHeadsError, UnsupportedModelError
from collab_heads.files.reading import parse_json, read_text
from collab_heads.model.open_site import open_sites
from collab_heads.serving.comparison import Comparison, in_turns
from collab_heads.serving.ctranslate2_engines import Engine, engine_of, no_times
from collab_heads.serving.example_inputs import without_labels
from collab_heads.serving.stock_layers import as_stock_layers
from collab_heads.serving.target import Target, first_line, quiet
from collab_heads.sites.record import FIELD, CollabConfig

CONVERTED = "converted"  # the folder that the converter writes
NEVER = -1e9  # added to the logit of the padding, which would not be left out
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

    def check_installed(self, int8):
        super().check_installed(int8)
        check_extra(self.name, f"exports to {self.name}")

    def check(self, model, int8):
        super().check(model, int8)
        from ctranslate2.converters.transformers import _MODEL_LOADERS

        loader = _MODEL_LOADERS.get(type(model.config).__name__)
        if loader is None:
            raise UnsupportedModelError(f"CTranslate2 has no conversion of {type(model).__name__}: use to='onnx'")
        if engine_of(model) is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} is none that CTranslate2 runs for text or speech: use to='onnx'"
            )
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
        if model.config.model_type == "whisper" and CollabConfig.on(model).sites:
            moved = copied.config.decoder_attention_heads != model.config.decoder_attention_heads
            cast(Any, copied.generation_config).alignment_heads = alignment_heads(model, moved)
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
                # in a folder of its own: the converter would delete this one, with the manifest that says it is ours
                InMemory(place).convert(str(folder / CONVERTED), quantization="int8" if int8 else None)
            except (CollabHeadsError, OSError):
                raise
            except Exception as error:
                raise UnsupportedModelError(
                    f"CTranslate2's converter fails on {type(model).__name__}: {first_line(error)}"
                ) from error
        for file in (folder / CONVERTED).iterdir():
            file.rename(folder / file.name)
        (folder / CONVERTED).rmdir()
        complete_config(folder / "config.json")
        if tokenizer is None:
            notes += ("the vocabulary has the ids as tokens, since no tokenizer was given",)
        if part is not copied:
            notes += (f"CTranslate2 runs the {type(part).__name__} of the model, without its head",)
        return notes

    def load(self, model, folder):
        return cast(type[Engine], engine_of(model))(folder, model)

    @torch.no_grad()
    def compare(self, model, folder, batches, tokenizer):
        """Compare what the engine computes for the rows of the batches, without padding."""
        try:
            engine = self.load(model, folder)
        except (RuntimeError, ValueError) as error:
            raise UnsupportedModelError(
                f"CTranslate2 does not load {type(model).__name__}: {first_line(error)}"
            ) from error
        largest, scale, same, count = 0.0, 0.0, 0, 0
        tokens = IdTokens(model) if tokenizer is None else tokenizer
        for batch in progress_bar(batches, desc="comparing"):
            for row in engine.rows(without_labels(batch)):
                try:
                    gap, size, equal, chosen = engine.compare(model, row, tokens)
                except (RuntimeError, ValueError) as error:
                    raise UnsupportedModelError(
                        f"CTranslate2 fails on {type(model).__name__}: {first_line(error)}"
                    ) from error
                largest, scale = max(largest, gap), max(scale, size)
                same, count = same + equal, count + chosen
        inputs = without_labels(batches[0])
        rows = engine.rows(inputs)
        before, after = in_turns([lambda: engine.run_torch(model, inputs), lambda: engine.run(rows, tokens)])
        return Comparison(largest / (scale or 1.0), same / count if count else None, before, after)


def complete_config(file: Path) -> None:
    """Fill in what the engine wants and the converter found nowhere.

    A special token that a tokenizer does not have gets the name of one that it has; Whisper suppresses no tokens.

    Args:
        file: the config of a converted model; it is written again.
    """
    config = parse_json(read_text(file))
    names = ("eos_token", "bos_token", "unk_token")
    known = next((config[name] for name in names if config.get(name)), None)
    config |= {name: known for name in names if name in config and config[name] is None}
    config |= {name: [] for name in ("suppress_ids", "suppress_ids_begin") if name in config and config[name] is None}
    file.write_text(json.dumps(config, indent=2), encoding="utf-8")


def alignment_heads(model: PreTrainedModel, moved: bool) -> list[list[int]]:
    """Return the heads of a Whisper that align words with sound, as pairs of a layer and a head in the engine.

    They are those that are left of the ones that its generation config names; if none is left, all heads of the last
    half of the layers, which is what the converter takes for a model that names none.

    Args:
        model: the changed model.
        moved: whether its heads stand one after the other, no more in their places.
    """
    adapter = get_adapter(model)
    sites = [site for site in open_sites(model, adapter, adapter.sites(model)) if site.site.role == "dec-enc"]
    places = [{number: place if moved else number for place, number in enumerate(site.head_numbers)} for site in sites]
    stated = getattr(model.generation_config, "alignment_heads", None) or ()
    named = [[layer, places[layer][head]] for layer, head in stated if head in places[layer]]
    late = [[layer, place] for layer in range(len(sites) // 2, len(sites)) for place in places[layer].values()]
    return named or late


class IdTokens:
    """A vocabulary whose tokens are the ids, for a model without a tokenizer.

    Args:
        model: the model.
    """

    def __init__(self, model: PreTrainedModel):
        self.config = model.config
        self.size = model.config.vocab_size
        self.no_times = no_times(model) if model.config.model_type == "whisper" else None
        self.special_tokens_map: dict[str, str] = {}

    def get_vocab(self) -> dict[str, int]:
        """Return token -> id."""
        tokens = {self.convert_ids_to_tokens(number): number for number in range(self.size)}
        if self.config.model_type == "whisper":
            names = {
                "<|startoftranscript|>": self.config.decoder_start_token_id,
                "<|endoftext|>": self.config.eos_token_id,
            }
            names["<|notimestamps|>"] = self.no_times
            for name, number in names.items():
                tokens[name] = tokens.pop(self.convert_ids_to_tokens(number))
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


def part_for(model: PreTrainedModel, name: str) -> PreTrainedModel | None:
    """Return the model, or its base model, whichever is of the class that a converter reads; None if neither is."""
    parts = (model, cast(PreTrainedModel, model.base_model))
    return next((part for part in parts if type(part).__name__ == name), None)


def starts_from_zeros(model: PreTrainedModel) -> bool:
    """Return True if the first token of a decoder has an embedding of zeros."""
    embeddings, start = cast(Any, model).get_decoder().get_input_embeddings(), model.config.decoder_start_token_id
    return not bool(embeddings.weight[start].any())


@contextmanager
def starting_right(model: PreTrainedModel) -> Iterator[None]:
    """Have Marian's decoder start from the embedding of its first token while a converter runs; others are unchanged.

    CTranslate2 starts it from zeros, and leaves the padding out. That is right for models of the Marian toolkit, whose
    padding transformers adds as zeros, and silently wrong for those that transformers trained.

    Args:
        model: what is converted; where the padding stays, its logit becomes very small, in place.
    """
    if model.config.model_type != "marian" or starts_from_zeros(model):
        yield
        return
    from ctranslate2.converters.transformers import _MODEL_LOADERS, BartLoader, MarianMTLoader

    class StartingFromPadding(MarianMTLoader):
        def set_decoder(self, spec, decoder):
            BartLoader.set_decoder(self, spec, decoder)

        def _remove_pad_weights(self, spec):
            pass

        def get_vocabulary(self, model, tokenizer):
            return BartLoader.get_vocabulary(self, model, tokenizer)

        def set_config(self, config, model, tokenizer):
            super().set_config(config, model, tokenizer)
            config.decoder_start_token = self.get_vocabulary(model, tokenizer)[model.config.decoder_start_token_id]

    name, before = type(model.config).__name__, _MODEL_LOADERS[type(model.config).__name__]
    with torch.no_grad():
        cast(Any, model).final_logits_bias[:, model.config.pad_token_id] = NEVER
    _MODEL_LOADERS[name] = StartingFromPadding()
    try:
        yield
    finally:
        _MODEL_LOADERS[name] = before
