"""Describe a model type for CTranslate2; an adapter holds the description."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel


@dataclass(frozen=True)
class CTranslate2Form:
    """A description of a model type for CTranslate2's converter and engines. A family may override the methods.

    Attributes:
        entries: entries of a config that the converter (4.8) reads, and configs of transformers 5 say no more.
        head_entries: the config entries for the number of heads of every stack.
        transcriber: the engine that transcribes sound, as a path in the package; None for a type that reads text.
        chooses_padding: whether the engine can choose the padding as a token.
    """

    entries: Mapping[str, Any] = field(default_factory=dict)
    head_entries: tuple[str, ...] = ("num_attention_heads",)
    transcriber: str | None = None
    chooses_padding: bool = True

    def complete(self, prepared: PreTrainedModel, model: PreTrainedModel) -> None:
        """Complete the configs of a copy whose layers have stock names, in place.

        Args:
            prepared: the copy, which a converter reads.
            model: its original.
        """
        for name, value in self.entries.items():
            setattr(prepared.config, name, value)

    def token_ids(self, model: PreTrainedModel) -> Mapping[str, int]:
        """Return the tokens that the converter or the engine looks up by name -> id.

        Args:
            model: the model.
        """
        return {}

    def prompt(self, model: PreTrainedModel) -> Sequence[int]:
        """Return the ids with which a transcript begins, without times; only with a `transcriber`.

        Args:
            model: the model.
        """
        return [model.config.decoder_start_token_id]

    @contextmanager
    def converting(self, part: PreTrainedModel) -> Iterator[None]:
        """Have the converter read a model rightly, in this context.

        Args:
            part: what is converted; its weights may change, in place.
        """
        yield
