"""Whisper: BART's layout and forward for audio; its key has no bias, and it scales before the dot product."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.whisper import modeling_whisper

from collab_heads.adapters.marian import STACKS, MarianAdapter, attention  # type: ignore[import-untyped]
from collab_heads.contract.model_forms import Blueprint, CTranslate2Form
from collab_heads.contract.registry import get_adapter, head_numbers, register
from collab_heads.layers.attention import replacing
from collab_heads.sites.record import CollabConfig


class WhisperForm(CTranslate2Form):
    """Whisper for CTranslate2: the tokens with which a transcript begins, and the heads that align words with sound."""

    def complete(self, prepared, model):
        """Name the heads of a changed model that align words with sound."""
        super().complete(prepared, model)
        if CollabConfig.on(model).sites:
            moved = prepared.config.decoder_attention_heads != model.config.decoder_attention_heads
            prepared.generation_config.alignment_heads = alignment_heads(model, moved)

    def token_ids(self, model):
        """Return the tokens around a transcript."""
        start, no_times = self.prompt(model)
        names = {"<|startoftranscript|>": start, "<|endoftext|>": model.config.eos_token_id}
        return names | {"<|notimestamps|>": no_times}

    def prompt(self, model):
        """Return the first token of a transcript, and the one that says it has no times; the last if none is stated."""
        stated = getattr(model.generation_config, "no_timestamps_token_id", None)
        return [model.config.decoder_start_token_id, stated or model.config.vocab_size - 1]


def alignment_heads(model, moved):
    """Return the heads that align words with sound, as pairs of a layer and a head in the engine.

    They are those that are left of the ones that the generation config names; if none is left, all heads of the last
    half of the layers, which is what the converter takes for a model that names none.

    Args:
        model: the changed model.
        moved: whether its heads stand one after the other, no more in their places.
    """
    adapter = get_adapter(model)
    numbers = head_numbers(model, adapter)
    kept = [numbers[site.path] for site in adapter.sites(model) if site.role == "dec-enc"]
    places = [{number: place if moved else number for place, number in enumerate(each)} for each in kept]
    stated = getattr(model.generation_config, "alignment_heads", None) or ()
    named = [[layer, places[layer][head]] for layer, head in stated if head in places[layer]]
    late = [[layer, place] for layer in range(len(kept) // 2, len(kept)) for place in places[layer].values()]
    return named or late


@register
class WhisperAdapter(MarianAdapter):
    """An adapter for Whisper: encoder-decoders, and their encoders and decoders alone."""

    model_types = ("whisper",)
    replacements = replacing(attention, modeling_whisper.WhisperAttention)
    blueprints: ClassVar[Mapping[str, Blueprint]] = {}
    ctranslate2 = {"whisper": WhisperForm(head_entries=STACKS, transcriber="models.Whisper")}

    def token_masks(
        self, config: PretrainedConfig, inputs: Mapping, masks: dict[str, Tensor | None]
    ) -> dict[str, Tensor | None]:
        """Return the masks without one for the encoder of audio.

        The encoder also reads the silence that pads its 30 seconds, so there all tokens count.
        """
        return {**masks, "encoder": None} if inputs.get("input_features") is not None else masks
