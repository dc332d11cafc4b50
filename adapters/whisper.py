"""Whisper: BART's layout and forward for audio; its key has no bias, and it scales before the dot product."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.whisper import modeling_whisper

from collab_heads.adapters.marian import MarianAdapter, attention  # type: ignore[import-untyped]
from collab_heads.contract.blueprints import Blueprint
from collab_heads.contract.registry import register


class CollaborativeWhisperAttention(modeling_whisper.WhisperAttention):
    """`WhisperAttention` with a collaborative query/key projection, whose scale acts in the backend."""

    eager = staticmethod(modeling_whisper.eager_attention_forward)
    forward = attention


@register
class WhisperAdapter(MarianAdapter):
    """An adapter for Whisper: encoder-decoders, and their encoders and decoders alone."""

    model_types = ("whisper",)
    replacements = {modeling_whisper.WhisperAttention: CollaborativeWhisperAttention}
    blueprints: ClassVar[Mapping[str, Blueprint]] = {}

    def token_masks(
        self, config: PretrainedConfig, inputs: Mapping, masks: dict[str, Tensor | None]
    ) -> dict[str, Tensor | None]:
        """Return the masks without one for the encoder of audio.

        The encoder also reads the silence that pads its 30 seconds, so there all tokens count.
        """
        return {**masks, "encoder": None} if inputs.get("input_features") is not None else masks
