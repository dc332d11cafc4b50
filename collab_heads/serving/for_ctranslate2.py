"""The target CTranslate2: converted by its own converter from layers under stock names, and compared token by token."""

import copy
import json
import tempfile
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from collab_heads.base.extras import check_extra
from collab_heads.base.progress import progress_bar
from collab_heads.contract.registry import ctranslate2_form
from collab_heads.errors import ArgumentError, CollabHeadsError, UnsupportedModelError
from collab_heads.files.reading import parse_json, read_text
from collab_heads.serving.comparison import Differences, in_turns
from collab_heads.serving.ctranslate2_engines import Engine, engine_of, rules
from collab_heads.serving.example_inputs import without_labels
from collab_heads.serving.exported_folder import GENERATION
from collab_heads.serving.sentence_encoder import is_sentence_encoder, sentence_encoder, write_modules
from collab_heads.serving.stock_layers import as_stock_layers
from collab_heads.serving.target import Target, first_line, quiet
from collab_heads.sites.record import forget

POSITIONS = "max_position_embeddings"  # as transformers calls it
CONVERTED = "converted"  # the folder that the converter writes


class CTranslate2(Target):
    """CTranslate2: heads of any width and any number of neurons in every layer, on the processor and on GPUs."""

    name, has_int8, has_own_code = "ctranslate2", True, True

    def check_installed(self, int8):
        super().check_installed(int8)
        check_extra(self.name, f"exports to {self.name}")

    def check(self, model, int8, tokenizer):
        super().check(model, int8, tokenizer)
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

        if model.main_input_name not in example:
            held = ", ".join(sorted(example)) or "nothing"
            raise ArgumentError(f"CTranslate2 reads {model.main_input_name}: the batches hold {held}")
        copied = copy.deepcopy(model).float()
        form = ctranslate2_form(model.config)
        notes = as_stock_layers(copied, "CTranslate2", form.head_entries)
        part = part_for(copied, _MODEL_LOADERS[type(model.config).__name__].architecture_name)
        form.complete(copied, model)
        named = IdTokens(model) if tokenizer is None else tokenizer

        class InMemory(TransformersConverter):
            def load_model(self, model_class, model_name_or_path, **kwargs):
                return part

            def load_tokenizer(self, tokenizer_class, model_name_or_path, **kwargs):
                return named

        with tempfile.TemporaryDirectory() as place, quiet(), form.converting(cast(PreTrainedModel, part)):
            config = copy.deepcopy(model.config)
            forget(config)
            config.dtype = None
            config.save_pretrained(place)
            try:
                # in a folder of its own: the converter would delete this one, with the manifest that says it is ours
                InMemory(place).convert(str(folder / CONVERTED), quantization="int8" if int8 else None)
            except (CollabHeadsError, OSError):
                raise
            except Exception as error:
                raise UnsupportedModelError(
                    f"CTranslate2's converter fails on {type(model).__name__}: {first_line(error)}: use another engine "
                    "(to=)"
                ) from error
        for file in (folder / CONVERTED).iterdir():
            file.rename(folder / file.name)
        (folder / CONVERTED).rmdir()
        complete_config(folder / "config.json", getattr(model.config, POSITIONS, None))
        if model.can_generate():  # which the engine does not read, but whoever passes it on
            cast(Any, model).generation_config.to_json_file(folder / GENERATION)
        if tokenizer is None:
            notes += ("the vocabulary has the ids as tokens, since no tokenizer was given",)
        if form.transcriber is None and (unread := rules(model)):
            notes += (f"CTranslate2 does not read the generation config: pass what stands for {unread} in each call",)
        if is_sentence_encoder(model):
            write_modules(sentence_encoder(model), folder, reads_texts=tokenizer is not None)
        if part is not copied:
            notes += (f"CTranslate2 runs the {type(part).__name__} of the model, without its head",)
        return notes

    def load(self, model, folder, tokenizer=None):
        named = IdTokens(model) if tokenizer is None else tokenizer
        return cast(type[Engine], engine_of(model))(folder, model, named)

    @torch.no_grad()
    def compare(self, model, folder, batches, tokenizer):
        """Compare what the engine computes for the rows of the batches, without padding."""
        try:
            engine = self.load(model, folder, tokenizer)
        except (RuntimeError, ValueError) as error:
            raise UnsupportedModelError(
                f"CTranslate2 does not load {type(model).__name__}: {first_line(error)}"
            ) from error
        found = Differences()
        for batch in progress_bar(batches, desc="comparing"):
            for row in engine.rows(without_labels(batch)):
                try:
                    engine.compare(found, row)
                except CollabHeadsError:
                    raise
                except (RuntimeError, ValueError) as error:
                    raise UnsupportedModelError(
                        f"CTranslate2 fails on {type(model).__name__}: {first_line(error)}: use another engine (to=)"
                    ) from error
        inputs = without_labels(batches[0])
        rows = engine.rows(inputs)
        return found.comparison(*in_turns([lambda: engine.run_torch(inputs), lambda: engine.run(rows)]))


def complete_config(file: Path, positions: int | None) -> None:
    """Fill in what the engine wants and the converter found nowhere, and how many positions there are.

    A special token that a tokenizer does not have gets the name of one that it has; lists of suppressed tokens that are
    missing are empty.

    Args:
        file: the config of a converted model; it is written again.
        positions: the most tokens of a text; None for any number. The engine does not read it.
    """
    config = parse_json(read_text(file))
    names = ("eos_token", "bos_token", "unk_token")
    known = next((config[name] for name in names if config.get(name)), None)
    config |= {name: known for name in names if name in config and config[name] is None}
    config |= {name: [] for name in ("suppress_ids", "suppress_ids_begin") if name in config and config[name] is None}
    config |= {} if positions is None else {POSITIONS: positions}
    file.write_text(json.dumps(config, indent=2), encoding="utf-8")


class IdTokens:
    """A vocabulary whose tokens are the ids, for a model without a tokenizer.

    Args:
        model: the model.
    """

    def __init__(self, model: PreTrainedModel):
        self.config = model.config
        self.size = model.config.vocab_size
        self.named = ctranslate2_form(model.config).token_ids(model)
        self.special_tokens_map: dict[str, str] = {}

    def get_vocab(self) -> dict[str, int]:
        """Return token -> id."""
        tokens = {self.convert_ids_to_tokens(number): number for number in range(self.size)}
        for name, number in self.named.items():
            tokens[name] = tokens.pop(self.convert_ids_to_tokens(number))
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
