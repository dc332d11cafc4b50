"""Call and run what was exported as a graph: a model that takes inputs and generates, as the original does."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast, Seq2SeqLMOutput
from transformers.utils import ModelOutput

from collab_heads.base.wrappers import names_wrapper
from collab_heads.errors import ArgumentError
from collab_heads.layers.attention import CACHE
from collab_heads.running.batches import MODALITIES
from collab_heads.serving.exported_folder import DECODER, ENCODER, SINGLE
from collab_heads.serving.graph_interface import taken
from collab_heads.serving.in_engine import ModelInEngine
from collab_heads.serving.text_reader import Texts


class CrossAttentionEncoder(nn.Module):
    """The encoder of an encoder-decoder, with the keys and values that cross-attention makes of its states.

    Both are computed once for a text. What else the decoder computes here is left out of the graph.

    Args:
        model: an encoder-decoder that generates.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        """Return the states, and for layer i `key_i` and `value_i`, [B, H, S, d] each."""
        model = cast(Any, self.model)
        states = model.get_encoder()(**inputs).last_hidden_state
        start = torch.full_like(states[:, :1, 0], model.config.decoder_start_token_id, dtype=torch.long)  # any batch
        outputs = model(
            decoder_input_ids=start,
            encoder_outputs=BaseModelOutput(last_hidden_state=states),
            use_cache=True,
            **{CACHE: EncoderDecoderCache(DynamicCache(), DynamicCache())},
            **({"attention_mask": inputs["attention_mask"]} if "attention_mask" in inputs else {}),
        )
        found = {"last_hidden_state": states}
        for index, layer in enumerate(outputs[CACHE].cross_attention_cache.layers):
            found |= {f"key_{index}": layer.keys, f"value_{index}": layer.values}
        return found


class ServedModel(ModelInEngine, GenerationMixin):
    """An exported model that is called as the original is, and generates with it: greedily, by sampling, with beams.

    Args:
        exported: the graphs, as transformers' exporters make and load them.
        caches: the shapes of the self-attention cache of every layer, [heads, width of keys, width of values]; empty
            for a model that does not generate.
        folder: the folder, which has the tokenizer.
        texts: how a sentence encoder reads texts; None for another model.
        width: of its embeddings, d.
        limits: the largest shape of each input, by name. More rows are run in portions.
    """

    def __init__(
        self,
        exported: Any,
        caches: Sequence[Sequence[int]] = (),
        folder: Path | None = None,
        texts: Texts | None = None,
        width: int = 0,
        limits: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ):
        super().__init__(copy.deepcopy(exported.config))
        self.exported, self.caches, self.folder, self.texts, self.width = exported, caches, folder, texts, width
        self.limits = limits
        if exported.generation_config is not None:
            self.generation_config = exported.generation_config
        has_two = self.config.is_encoder_decoder and bool(caches)
        self.names, self.constants = inputs_of(exported, DECODER if has_two else SINGLE)
        self.main_input_name = next(iter(exported.components[SINGLE].metadata.kwargs)) if not caches else "input_ids"
        self.cache_name = (
            "cache" if "cache" in self.names else "past_key_values"
        )  # of the transformers that exported it
        if has_two:
            self.encoder = ServedEncoder(exported)
            self.main_input_name = self.encoder.main_input_name

    @property
    def dtype(self) -> torch.dtype:
        """The type of the original's weights when it was exported, which inputs of floating-point numbers have, too."""
        return self.exported.dtype

    @classmethod
    def can_generate(cls) -> bool:
        """Return True; whether the graphs can generate shows when they are called."""
        return True

    def get_encoder(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Return the encoder.

        Args:
            args: are not used; other encoder-decoders of transformers take a modality.
            kwargs: the same.
        """
        return self.encoder

    def empty_cache(self, rows: int) -> DynamicCache:
        """Return a cache of no tokens.

        Args:
            rows: how many texts there are, B.
        """
        cache = DynamicCache()  # of all tokens, also where a window slides: the mask in the graph hides the others
        for index, (heads, key, value) in enumerate(self.caches):
            cache.update(torch.zeros(rows, heads, 0, key), torch.zeros(rows, heads, 0, value), index)
        return cache

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Any = None,
        cache: Any = None,
        **inputs: Any,
    ) -> Any:
        """Run the graph; arguments and outputs are those of the original.

        Args:
            input_ids: [B, T], of the text, or of the tokens that follow what the cache has.
            attention_mask: [B, S], 1 for tokens that count, those in the cache included; None for all.
            position_ids: [B, T]; None counts the tokens of the mask.
            decoder_input_ids: [B, T], of an encoder-decoder; None begins a target.
            encoder_outputs: what `get_encoder()` returned; None runs the encoder.
            past_key_values: the cache of an earlier call; None for an empty one.
            cache: the same, as it is called since transformers 5.24.
            inputs: other inputs of the graph, by name, such as `token_type_ids` or `pixel_values`.
        """
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids, **inputs}
        given |= {"decoder_input_ids": decoder_input_ids, "encoder_outputs": encoder_outputs}
        past = past_key_values if cache is None else cache
        if not self.caches:
            return self.run(SINGLE, given | {CACHE: past})
        check_cache(past)
        is_new = past is None or not past.get_seq_length()
        if self.config.is_encoder_decoder:
            return self.continue_target(given, None if is_new else past)
        if input_ids is None:
            raise ArgumentError("the graph takes input_ids: pass them")
        past = self.empty_cache(len(input_ids)) if is_new else past
        if attention_mask is None:
            shape = len(input_ids), past.get_seq_length() + input_ids.shape[1]
            given["attention_mask"] = torch.ones(shape, dtype=torch.long)
        mask, count = given["attention_mask"], input_ids.shape[1]
        usual = positions(input_ids, mask)
        if position_ids is None:
            position_ids = given["position_ids"] = usual
        if "position_ids" not in self.names and bool(((position_ids == usual) | (mask[:, -count:] == 0)).all()):
            del given["position_ids"]  # it is what the graph counts
        outputs = self.run(SINGLE, given | {self.cache_name: past})
        return CausalLMOutputWithPast(**{"logits": outputs.logits, CACHE: self.cache_of(outputs)})

    def continue_target(self, given: Mapping[str, Any], past: EncoderDecoderCache | None) -> Seq2SeqLMOutput:
        """Run the decoder of an encoder-decoder, one token of every row at a time.

        Args:
            given: the inputs of `forward`, by name.
            past: the cache of an earlier call; None for an empty one.
        """
        source = {name: value for name, value in given.items() if not name.startswith("decoder_")}
        states = source.pop("encoder_outputs")
        if states is None:
            states = self.encoder(**source)
        if not isinstance(states, Mapping) or "key_0" not in states:
            raise ArgumentError("encoder_outputs are not those of this model: pass what its get_encoder() returned")
        if past is None:
            past = self.cross_attention_cache(states)
        tokens, hidden, logits = given["decoder_input_ids"], states["last_hidden_state"], []
        if tokens is None:
            start = self.generation_config.decoder_start_token_id or self.config.decoder_start_token_id
            tokens = torch.full((len(hidden), 1), start)
        fed = {name: value for name, value in given.items() if name in self.names or name not in self.encoder.names}
        fed["encoder_outputs"] = BaseModelOutput(last_hidden_state=hidden)
        if given["attention_mask"] is None:
            fed["attention_mask"] = torch.ones(hidden.shape[:2], dtype=torch.long)
        for token in tokens.split(1, dim=1):
            outputs = self.run(DECODER, fed | {"decoder_input_ids": token, self.cache_name: past})
            past = EncoderDecoderCache(self.cache_of(outputs), past.cross_attention_cache)
            logits.append(outputs.logits)
        found: dict[str, Any] = {"logits": torch.cat(logits, dim=1), CACHE: past}
        return Seq2SeqLMOutput(**found)

    def cache_of(self, outputs: Any) -> DynamicCache:
        """Return the cache of the decoder's own tokens that a graph returned, without a copy.

        Args:
            outputs: what the graph returned.
        """
        found = getattr(outputs, self.cache_name)
        within = "self_attention_cache." if self.config.is_encoder_decoder else ""
        cache = DynamicCache()
        for index in range(len(self.caches)):
            layer, path = DynamicLayer(), f"{within}layers.{index}"
            layer.lazy_initialization(found[f"{path}.keys"], found[f"{path}.values"])
            layer.keys, layer.values = found[f"{path}.keys"], found[f"{path}.values"]
            cache.layers.append(layer)
        return cache

    def cross_attention_cache(self, encoder_outputs: Any) -> EncoderDecoderCache:
        """Return a cache of no target tokens, with the keys and values of the source.

        Args:
            encoder_outputs: what `get_encoder()` returned.
        """
        cross = DynamicCache()
        for index in range(len(self.caches)):
            cross.update(encoder_outputs[f"key_{index}"], encoder_outputs[f"value_{index}"], index)
        cache = EncoderDecoderCache(self.empty_cache(len(encoder_outputs["last_hidden_state"])), cross)
        cache.is_updated = dict.fromkeys(range(len(self.caches)), True)
        return cache

    def run(self, graph: str, given: dict[str, Any]) -> Any:
        """Run a graph.

        Args:
            graph: its name.
            given: name -> input, or None.

        Raises:
            ArgumentError: if an input is missing, is none of the graph and would change what it computes, or is longer
                than the graph takes.
        """
        runner, inputs = self.exported.runners[graph], taken(given, self.names, self.constants, self.config)
        most = largest_number_of_rows(inputs, self.limits)
        if most is None:
            outputs = runner(**inputs)
        else:
            portions = zip(*(value.split(most) for value in inputs.values()), strict=True)
            outputs = joined([runner(**dict(zip(inputs, portion, strict=True))) for portion in portions])
        return ModelOutput(outputs) if type(outputs) is dict else outputs


def check_cache(cache: object) -> None:
    """Raise ArgumentError for a cache of another kind than graphs take."""
    if not isinstance(cache, DynamicCache | EncoderDecoderCache | None):
        raise ArgumentError(
            f"the graph takes a DynamicCache, not a {type(cache).__name__}: leave cache_implementation out"
        )


def served_class(exported: Any) -> type[ServedModel]:
    """Return a class with the name of the original's, by which pipelines of transformers know what a model can do.

    A name that means a wrapper to us means none here, whatever the folder says.
    """
    graph = DECODER if DECODER in exported.components else SINGLE
    name = exported.components[graph].metadata.architecture
    if names_wrapper(name):
        return ServedModel
    return type(name, (ServedModel,), {"__module__": __name__, "__doc__": ServedModel.__doc__})


class ServedEncoder(nn.Module):
    """The exported encoder of an encoder-decoder.

    Args:
        exported: the graphs.
    """

    def __init__(self, exported: Any):
        super().__init__()
        self.exported = exported
        self.names, self.constants = inputs_of(exported, ENCODER)
        self.main_input_name = next(iter(exported.components[ENCODER].metadata.kwargs))

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        input_features: Tensor | None = None,
        **kwargs: Any,
    ) -> ModelOutput:
        """Return the states, and the keys and values that cross-attention makes of them."""
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "input_features": input_features, **kwargs}
        inputs = taken(given, self.names, self.constants, self.exported.config)
        return ModelOutput(self.exported.runners[ENCODER](**inputs))


def largest_number_of_rows(inputs: Mapping[str, Any], limits: Mapping[str, Sequence[int]]) -> int | None:
    """Return the number of rows that a graph takes at a time; None if it takes those that are given.

    Raises:
        ArgumentError: if a row is larger than the graph takes, or there are too many rows of a model that compares
            rows with each other, such as texts with images.
    """
    for name in inputs.keys() & limits.keys():
        shape, most = inputs[name].shape, limits[name]
        if len(shape) != len(most) or any(size > limit for size, limit in zip(shape[1:], most[1:], strict=True)):
            raise ArgumentError(
                f"{name} of shape {list(shape)}: the graph takes rows of {list(most[1:])} at most; cut the texts "
                "(truncation=True), or export with longer batches"
            )
    exceeded = [limits[name][0] for name in inputs.keys() & limits.keys() if len(inputs[name]) > limits[name][0]]
    if not exceeded:
        return None
    if sum(bool(inputs.keys() & set(names)) for names, _ in MODALITIES.values()) > 1:
        raise ArgumentError(
            f"the graph takes {min(exceeded)} rows at a time, and compares rows of {' and '.join(sorted(inputs))} with "
            "each other: pass fewer, or export with larger batches"
        )
    return min(exceeded)


def joined(outputs: Sequence[Any]) -> Any:
    """Return the outputs for portions of the rows as one, whatever holds their tensors."""
    leaves = [pytree.tree_flatten(each) for each in outputs]
    together = (torch.cat(tensors) for tensors in zip(*(tensors for tensors, _ in leaves), strict=True))
    return pytree.tree_unflatten(list(together), leaves[0][1])


def inputs_of(exported: Any, graph: str) -> tuple[set[str], dict[str, Any]]:
    """Return the names of the inputs of a graph, and the values of those that are fixed in it."""
    metadata = exported.components[graph].metadata
    return set(metadata.kwargs), metadata.in_constants


def positions(tokens: Tensor, mask: Tensor) -> Tensor:
    """Return the positions [B, T] of the last tokens of a mask, padding left out."""
    return (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
