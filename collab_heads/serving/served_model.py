"""Call and run what was exported as a graph: a model that takes inputs and generates, as the original does."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast, Seq2SeqLMOutput
from transformers.utils import ModelOutput

from collab_heads.base.arguments import checking_arguments
from collab_heads.base.checks import check_count
from collab_heads.base.extras import MissingPackageError, check_extra, is_installed
from collab_heads.errors import ArgumentError
from collab_heads.files.reading import parse_json, read_text
from collab_heads.layers.attention import CACHE

CACHES = "cache.json"  # the shapes of the cache of every layer, beside the graphs
SINGLE, ENCODER, DECODER = "model", "encoder", "decode"  # names of graphs


class CrossAttentionEncoder(nn.Module):
    """The encoder of an encoder-decoder, with the keys and values that cross-attention makes of its states.

    Both are computed once for a text. What else the decoder computes here is no output, and is left out of the graph.

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


class ServedModel(PreTrainedModel, GenerationMixin):
    """An exported model that is called as the original is, and generates with it: greedily, by sampling, with beams.

    Args:
        exported: the graphs, as transformers' exporters make and load them.
        caches: the shapes of the self-attention cache of every layer, [heads, width of keys, width of values]; empty
            for a model that does not generate.
    """

    def __init__(self, exported: Any, caches: Sequence[Sequence[int]] = ()):
        super().__init__(copy.deepcopy(exported.config))
        self.exported, self.caches = exported, caches
        if exported.generation_config is not None:
            self.generation_config = exported.generation_config
        kwargs = exported.components[DECODER if self.config.is_encoder_decoder and caches else SINGLE].metadata.kwargs
        self.main_input_name = next(iter(kwargs)) if not caches else "input_ids"
        self.names = set(kwargs)
        self.cache_name = "cache" if "cache" in kwargs else "past_key_values"  # of the transformers that exported it
        if self.config.is_encoder_decoder and caches:
            self.encoder = ServedEncoder(exported)
            self.main_input_name = self.encoder.main_input_name

    @property
    def device(self) -> torch.device:
        """The processor."""
        return torch.device("cpu")

    @classmethod
    def can_generate(cls) -> bool:
        """Return True: whether the graphs can is found when they are called."""
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
        if not self.caches:
            return self.exported(**self.completed(given))
        cache = past_key_values if cache is None else cache
        is_new = cache is None or not cache.get_seq_length()
        if not self.config.is_encoder_decoder:
            tokens = cast(Tensor, input_ids)
            given[self.cache_name] = self.empty_cache(len(tokens)) if is_new else cache
            if attention_mask is None:
                seen = 0 if is_new else cache.get_seq_length()
                given["attention_mask"] = torch.ones(len(tokens), seen + tokens.shape[1], dtype=torch.long)
            if position_ids is None:
                given["position_ids"] = positions(tokens, given["attention_mask"])
            outputs = self.run(SINGLE, given)
            return CausalLMOutputWithPast(**{"logits": outputs.logits, CACHE: getattr(outputs, self.cache_name)})
        if attention_mask is None and input_ids is not None:
            given["attention_mask"] = attention_mask = torch.ones_like(input_ids)
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids=input_ids, attention_mask=attention_mask, **inputs)
        if decoder_input_ids is None:
            start = self.generation_config.decoder_start_token_id or self.config.decoder_start_token_id
            decoder_input_ids = torch.full((len(encoder_outputs["last_hidden_state"]), 1), start)
        states = BaseModelOutput(last_hidden_state=encoder_outputs["last_hidden_state"])
        cache, logits = self.cross_attention_cache(encoder_outputs) if is_new else cache, []
        for tokens in decoder_input_ids.split(1, dim=1):  # the graph takes one of every row
            source = cache.cross_attention_cache
            fed = {"decoder_input_ids": tokens, "encoder_outputs": states, self.cache_name: cache}
            outputs = self.run(DECODER, given | fed)
            cache = getattr(outputs, self.cache_name)
            cache.cross_attention_cache = source  # the graph returns no keys and values of it
            logits.append(outputs.logits)
        return Seq2SeqLMOutput(**{"logits": torch.cat(logits, dim=1), CACHE: cache})

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

    def completed(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs of a graph without a cache; a mask or token types that are not given have their defaults.

        Args:
            given: name -> input, or None.

        Raises:
            ArgumentError: if others are missing: OpenVINO would say nothing.
        """
        found = {name: value for name, value in given.items() if name in self.names and value is not None}
        if "input_ids" in found:
            for name, default in (("attention_mask", torch.ones_like), ("token_type_ids", torch.zeros_like)):
                if name in self.names:
                    found.setdefault(name, default(found["input_ids"]))
        if missing := sorted(self.names - found.keys()):
            raise ArgumentError(f"the graph takes {', '.join(missing)}, too: pass them, or export with other batches")
        return found

    def run(self, graph: str, given: dict[str, Any]) -> Any:
        """Run a graph on the inputs that it takes.

        Args:
            graph: the name of the graph.
            given: name -> input, or None; others than those of the graph are left out.
        """
        return self.exported.runners[graph](**{name: given[name] for name in self.names if given.get(name) is not None})


class ServedEncoder(nn.Module):
    """The exported encoder of an encoder-decoder.

    Args:
        exported: the graphs.
    """

    def __init__(self, exported: Any):
        super().__init__()
        self.exported = exported
        self.names = exported.components[ENCODER].metadata.kwargs
        self.main_input_name = next(iter(self.names))

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        input_features: Tensor | None = None,
        **kwargs: Any,
    ) -> ModelOutput:
        """Return the states, and the keys and values that cross-attention makes of them."""
        if attention_mask is None and input_ids is not None:
            attention_mask = torch.ones_like(input_ids)
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "input_features": input_features}
        kept = {name: value for name, value in given.items() if name in self.names and value is not None}
        return ModelOutput(self.exported.runners[ENCODER](**kept))


def positions(tokens: Tensor, mask: Tensor) -> Tensor:
    """Return the positions [B, T] of the last tokens of a mask, padding left out."""
    return (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]


def check_exporters(what: str) -> None:
    """Check that the installed transformers runs what its exporters export, as it does since 5.23.

    Args:
        what: what needs it, in the plural; for the message.

    Raises:
        MissingPackageError: if it is an earlier one.
    """
    if not all(is_installed(name) for name in ("transformers.exporters", "transformers.exporters.runners")):
        raise MissingPackageError(
            f"{what} need transformers 5.23 or later, not {transformers.__version__}: "
            "pip install 'transformers>=5.23,<6'"
        )


@checking_arguments
def load_exported(folder: str | Path, *, threads: int | None = None) -> ServedModel:
    """Load what `export` wrote for ONNX Runtime or OpenVINO.

    Args:
        folder: the folder.
        threads: the threads of the engine; None for all cores.

    Returns:
        A model that is called, and generates, as the original does.

    Raises:
        DataError: if the folder holds no export.
        MissingPackageError: if the engine is not installed, or transformers is older than 5.23.
    """
    check_exporters("exported models")
    from transformers.exporters.base import ExportedModel

    folder = Path(folder)
    if threads is not None:
        check_count("threads", threads, least=1, most=1 << 16)
    manifest = parse_json(read_text(folder / "export.json"))
    check_extra(manifest["export_format"], f"models in {manifest['export_format']}")
    exported = ExportedModel.from_pretrained(
        str(folder), local_files_only=True, device="cpu", **engine_options(manifest["export_format"], threads)
    )
    caches = parse_json(read_text(folder / CACHES)) if (folder / CACHES).exists() else {"layers": []}
    return ServedModel(exported, caches["layers"])


def engine_options(engine: str, threads: int | None) -> dict[str, Any]:
    """Return the options of an engine: its threads, and for OpenVINO float32, of which it takes less by default."""
    if engine == "onnx":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or 0
        return {"session_options": options}
    counted = {} if threads is None else {"INFERENCE_NUM_THREADS": threads}
    return {"config": {"INFERENCE_PRECISION_HINT": "f32", **counted}}
