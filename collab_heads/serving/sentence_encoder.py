"""Sentence encoders: the modules beside the transformer in a folder of sentence-transformers, as a part of its graph.

Such a folder lists its modules in `modules.json`: the transformer, a pooling over its tokens, and layers after that.
A folder comes from anywhere: what is in it is checked, and no class that it names is imported.

Shapes: B texts, T tokens, D width of a state, d width of an embedding.
"""

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_heads.base.checks import MAX_SIZE, is_index
from collab_heads.errors import DataError, UnsupportedModelError
from collab_heads.files.reading import own_file
from collab_heads.running.batches import evaluating
from collab_heads.saving.marks import MODULE, SOURCE
from collab_heads.saving.source_files import (
    CLASSES,
    MODULES,
    OF_TEXTS,
    SETTINGS,
    THEIRS,
    copy_modules,
    encoder_class,
    encoder_source,
    listed,
)
from collab_heads.serving.comparison import naming_outputs
from collab_heads.serving.text_reader import EMBEDDING, STATES, TextReader, naming, read_json, read_texts
from collab_heads.sites.record import check_keys
from collab_heads.sites.state import expect

OF_ENCODER = "encoder_modules.json"  # `modules.json` of the original, where ours stands in its place
SERVED = "ServedTransformer"  # our module of sentence-transformers, in `modules.json` of an exported folder
LEAST = 1e-9  # what a mean is divided by at least, as in sentence-transformers


def first(states: Tensor, mask: Tensor) -> Tensor:
    """Return the state of the first token that counts."""
    return (states * ((mask.cumsum(1) == 1) & (mask == 1)).unsqueeze(-1)).sum(1)


def last(states: Tensor, mask: Tensor) -> Tensor:
    """Return the state of the last token that counts."""
    return (states * ((mask.cumsum(1) == mask.sum(1, keepdim=True)) & (mask == 1)).unsqueeze(-1)).sum(1)


def largest(states: Tensor, mask: Tensor) -> Tensor:
    """Return the largest value of each column."""
    return states.masked_fill(mask.unsqueeze(-1) == 0, -torch.inf).amax(1)


def weighted(states: Tensor, weights: Tensor) -> Tensor:
    """Return the mean of the states, with weights [B, T]."""
    weights = weights.unsqueeze(-1).to(states.dtype)
    return (states * weights).sum(1) / weights.sum(1).clamp(min=LEAST)


def by_root(states: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of the states, divided by the square root of their number."""
    weights = mask.unsqueeze(-1).to(states.dtype)
    return (states * weights).sum(1) / weights.sum(1).clamp(min=LEAST).sqrt()


# name in a config of a pooling -> function of states [B, T, D] and a mask of whole numbers [B, T], which returns [B, D]
POOLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": first,
    "max": largest,
    "mean": weighted,
    "mean_sqrt_len_tokens": by_root,
    "weightedmean": lambda states, mask: weighted(states, mask * mask.cumsum(1)),
    "lasttoken": last,
}
# the fields of older folders, in the order in which several poolings stand beside each other
FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
ACTIVATIONS = {each.__name__: each for each in (nn.Identity, nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid)}
PLACES = ("module_input_name", "module_output_name")  # what a layer reads and writes


class Pooling(nn.Module):
    """A pooling over the tokens, or several, one beside the other.

    Args:
        config: the content of its config.
        width: D.
    """

    def __init__(self, config: Mapping[str, Any], width: int):
        super().__init__()
        known = {"embedding_dimension", "word_embedding_dimension", "pooling_mode", "include_prompt", *FLAGS}
        config = check_keys(config, known, "the config of the pooling")
        size = config.get("embedding_dimension", config.get("word_embedding_dimension"))
        expect(size == width, "embedding_dimension of the pooling", size, f"{width}, the width of the transformer")
        flags = tuple(mode for field, mode in FLAGS.items() if config.get(field)) or ("mean",)
        modes = config.get("pooling_mode", flags)
        self.modes: list[str] = [modes] if isinstance(modes, str) else modes
        is_list = isinstance(self.modes, list | tuple) and len(self.modes) > 0
        valid = is_list and all(isinstance(mode, str) and mode in POOLINGS for mode in self.modes)
        expect(valid, "pooling_mode", modes, f"of {', '.join(POOLINGS)}, which a graph can do")
        prompts = config.get("include_prompt", True)
        expect(prompts is True, "include_prompt", prompts, "true: a graph does not know how long a prompt is")
        self.width = len(self.modes) * width

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return [B, D], or more for several poolings, of states [B, T, D] and a mask [B, T]."""
        return torch.cat([POOLINGS[mode](states, mask) for mode in self.modes], dim=-1)


class Dense(nn.Module):
    """A linear layer with an activation.

    Args:
        config: the content of its config.
        width: of its input.
        weights: its tensors by name.
    """

    def __init__(self, config: Mapping[str, Any], width: int, weights: Mapping[str, Tensor]):
        super().__init__()
        known = {"in_features", "out_features", "bias", "activation_function", "use_residual", *PLACES}
        config = check_keys(config, known, "the config of the layer", ("in_features", "out_features"))
        check_places(config)
        expect(not config.get("use_residual"), "use_residual", config.get("use_residual"), "false")
        size, self.width = config["in_features"], config["out_features"]
        expect(size == width, "in_features", size, f"{width}, the width of the module before it")
        expect(is_index(self.width, MAX_SIZE) and self.width > 0, "out_features", self.width, "a size")
        name = config.get("activation_function", "torch.nn.modules.activation.Tanh")
        place, _, kind = name.rpartition(".") if isinstance(name, str) else ("", "", "")
        known_ones = place.startswith("torch.nn") and kind in ACTIVATIONS
        expect(known_ones, "activation_function", name, f"one of torch.nn: {', '.join(ACTIVATIONS)}")
        wanted: dict[str, tuple[int, ...]] = {"linear.weight": (self.width, size)}
        if config.get("bias", True):
            wanted["linear.bias"] = (self.width,)
        found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        expect(found == wanted, "the shapes of the weights", found, f"{wanted}")
        with torch.device("meta"):
            self.linear = nn.Linear(size, self.width, bias="linear.bias" in wanted)
        self.activation = ACTIVATIONS[kind]()
        self.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, assign=True)

    def forward(self, embeddings: Tensor) -> Tensor:
        """Return [B, d] of [B, width of the input]."""
        return self.activation(self.linear(embeddings))


class Normalize(nn.Module):
    """Division by the length."""

    def __init__(self, config: Mapping[str, Any], width: int):
        super().__init__()
        check_places(check_keys(config, set(PLACES), "the config of the layer"))
        self.width = width

    def forward(self, embeddings: Tensor) -> Tensor:
        """Return embeddings [B, d] of length 1."""
        return nn.functional.normalize(embeddings, dim=-1)


def check_places(config: Mapping[str, Any]) -> None:
    """Raise ConfigError unless a layer reads and writes sentence embeddings."""
    for name in PLACES:
        expect(config.get(name) in (None, EMBEDDING), name, config.get(name), repr(EMBEDDING))


class SentenceEncoder(nn.Module):
    """The pooling and the layers of a sentence encoder, after its transformer.

    Args:
        source: the folder of sentence-transformers.
        modules: what `modules.json` lists.
        width: D.

    Raises:
        DataError: if a file is missing or damaged, or the modules do not fit each other.
        UnsupportedModelError: if a module is none that a graph can hold.
    """

    def __init__(self, source: Path, modules: list[dict], width: int):
        super().__init__()
        self.source, self.texts = source, read_texts(source)
        kinds = [kind_of(source, module.get("type")) for module in modules]
        if kinds[:2] != ["Transformer", "Pooling"] or modules[0].get("path") or set(kinds[2:]) & {*kinds[:2]}:
            raise UnsupportedModelError(
                f"{source} holds {', '.join(kinds) or 'no modules'}: a graph takes a Transformer in the folder itself, "
                f"a Pooling, and layers after it. {ALONE}"
            )
        self.steps = nn.ModuleList()
        for kind, module in zip(kinds[1:], modules[1:], strict=True):
            folder = own_file(source / module.get("path", ""), source)
            with naming(folder):
                config, more = read_json(folder / "config.json"), [read_weights(folder)] if kind == "Dense" else []
                step = STEPS[kind](config, width, *more)
            self.steps.append(step)
            width = step.width
        self.width = width
        self.requires_grad_(False)

    @property
    def poolings(self) -> list[str]:
        """The names of its poolings, which stand beside each other."""
        return cast(Pooling, self.steps[0]).modes

    def forward(self, states: Tensor, mask: Tensor | None) -> Tensor:
        """Return embeddings [B, d], float32, of states [B, T, D] and a mask [B, T]; None for one without padding."""
        states = states.float()
        mask = torch.ones(states.shape[:2], dtype=torch.long) if mask is None else mask.long()
        pooling, *layers = self.steps
        return functools.reduce(lambda value, layer: layer(value), layers, pooling(states, mask))

    def encode(
        self, model: PreTrainedModel, texts: Sequence[str], batch_size: int = 32, prompt_name: str | None = None
    ) -> np.ndarray:
        """Return the embeddings of texts by the transformer in PyTorch, [N, d], float32: see `TextReader.encode`."""
        reader, width = TextReader(self.source, self.texts, model.config), self.width
        with evaluating(model), naming_outputs(model), embedding_texts(model, self):
            return reader.encode(model, texts, batch_size, prompt_name, width)


STEPS: dict[str, Callable[..., Any]] = {"Pooling": Pooling, "Dense": Dense, "Normalize": Normalize}
ALONE = "To export the transformer alone, load it from a folder without modules.json"


def kind_of(source: Path, name: object) -> str:
    """Return the class of a module by its last name."""
    kind = str(name).rpartition(".")[2]
    if not str(name).startswith(THEIRS) or kind not in {"Transformer", *STEPS}:
        raise UnsupportedModelError(
            f"{source}: a graph cannot hold the module {name!s:.200}, but {', '.join(STEPS)}. {ALONE}"
        )
    return kind


def is_sentence_encoder(model: PreTrainedModel) -> bool:
    """Return True if a model is the transformer of the sentence encoder whose folder it was loaded from."""
    source = encoder_source(model.config)
    return source is not None and encoder_class(source) == CLASSES[0] and model.base_model is model


def sentence_encoder(model: PreTrainedModel) -> SentenceEncoder:
    """Return what stands beside the transformer of a sentence encoder in its folder.

    Raises:
        DataError, UnsupportedModelError: as `SentenceEncoder`.
    """
    source = cast(Path, encoder_source(model.config))
    return SentenceEncoder(source, listed(source), model.config.get_text_config().hidden_size)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a module, from safetensors alone."""
    from safetensors.torch import load_file

    file = own_file(folder / "model.safetensors", folder)
    if not file.exists():
        raise DataError(
            f"{folder} has no {file.name}, and pickles are not read: save it again, as in "
            f"SentenceTransformer({str(folder.parent)!r}).save('new')"
        )
    return load_file(file)


def write_served(encoder: SentenceEncoder, folder: Path, *, reads_texts: bool) -> None:
    """Write what sentence-transformers reads beside the graph of a sentence encoder: one module of ours, its settings.

    Args:
        encoder: the sentence encoder.
        folder: of the graph.
        reads_texts: whether a tokenizer stands there; without it sentence-transformers cannot load the folder.
    """
    write_texts(encoder, folder)
    files: dict[str, Any] = {
        MODULES: [{"idx": 0, "name": "0", "path": "", "type": f"{MODULE}.{SERVED}"}],
        "1_Pooling/config.json": flagged(encoder),
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2), encoding="utf-8")
    (folder / f"{MODULE}.py").write_bytes(SOURCE.read_bytes())
    if not reads_texts:
        (folder / MODULES).unlink()


def flagged(encoder: SentenceEncoder) -> dict[str, Any]:
    """Return the config of a pooling with the fields of older folders, which readers that pool themselves know."""
    pooling = cast(Pooling, encoder.steps[0])
    flags = {field: mode in pooling.modes for field, mode in FLAGS.items()}
    return {"word_embedding_dimension": pooling.width // len(pooling.modes)} | flags


def write_modules(encoder: SentenceEncoder, folder: Path, *, reads_texts: bool) -> None:
    """Write the same for an engine that puts out states alone, with the modules that make embeddings of them.

    Args:
        encoder: the sentence encoder.
        folder: of the model.
        reads_texts: see `write_served`.
    """
    copy_modules(encoder.source, folder)
    (folder / MODULES).rename(folder / OF_ENCODER)
    write_served(encoder, folder, reads_texts=reads_texts)


def write_texts(encoder: SentenceEncoder, folder: Path) -> None:
    """Write how a sentence encoder reads texts, for `read_texts`."""
    texts = encoder.texts._asdict()
    of_transformer = {name: texts.pop(name) for name in ("max_seq_length", "do_lower_case")}
    of_transformer["max_seq_length"] = of_transformer["max_seq_length"] or most_tokens(folder)
    for name, content in {OF_TEXTS: of_transformer, SETTINGS: {"model_type": CLASSES[0], **texts}}.items():
        (folder / name).write_text(json.dumps(content, indent=2), encoding="utf-8")


def most_tokens(folder: Path) -> int | None:
    """Return the most tokens of a text, by the tokenizer and the config in a folder, since some readers want a number.

    It is None if neither says one, or there is no tokenizer yet.
    """
    tokenizer, config = (read_json(folder / name) for name in ("tokenizer_config.json", "config.json"))
    said = [tokenizer.get("model_max_length"), config.get("max_position_embeddings")]
    return min((number for number in said if tokenizer and is_index(number, MAX_SIZE) and number), default=None)


@contextmanager
def embedding_texts(model: PreTrainedModel, encoder: SentenceEncoder | None) -> Iterator[None]:
    """Have a model put out the embeddings of texts, too, while the context is open: a dict with `EMBEDDING`."""
    if encoder is None:
        yield
        return
    stock, own = model.forward, vars(model).get("forward")

    @functools.wraps(stock)
    def forward(**inputs: Any) -> dict[str, Any]:
        outputs = stock(**inputs)
        return {**outputs, EMBEDDING: encoder(outputs[STATES], inputs.get("attention_mask"))}

    model.forward = forward
    try:
        yield
    finally:
        if own is None:
            del model.forward
        else:
            model.forward = own
