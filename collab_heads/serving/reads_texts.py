"""Call a language model in an engine that takes one text at a time: rows without their padding, and generation."""

import itertools
import operator
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils import ModelOutput

from collab_heads.errors import ArgumentError, ModelStateError
from collab_heads.serving.example_inputs import check_ids, ids, rows_of
from collab_heads.serving.in_engine import ModelInEngine
from collab_heads.serving.target import first_line
from collab_heads.serving.text_reader import Texts


class ReadsTexts(ModelInEngine, GenerationMixin):
    """A model whose engine takes one text at a time, without padding, and remembers what it has read.

    Attributes:
        engine_name: of the engine, for messages.
        size: the number of tokens in the vocabulary, V.
        positions: the most tokens of a text.
    """

    engine_name: ClassVar[str]
    size: int
    positions: int
    texts: Texts | None = None
    width = 0

    def can_generate(self) -> bool:  # type: ignore[override]
        """Return True for a language model."""
        return True

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as a model of transformers does, with the same arguments: greedily, by sampling, with beams.

        Args:
            args: those of `generate` in transformers.
            kwargs: the same, but for what asks for more than logits (`guidance_scale`, `output_hidden_states`);
                `use_cache` is not used, since the engine has the cache.
        """
        return cast(Any, GenerationMixin).generate(self, *args, **{**kwargs, "use_cache": False})

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        logits_to_keep: int = 0,
        use_cache: bool = False,
        return_dict: bool = True,
    ) -> ModelOutput:
        """Return what the original would; padding gets zeros.

        A language model has `logits`, [B, T, V]. An encoder has `last_hidden_state`, [B, T, D], or
        `sentence_embedding`, [B, d].

        Args:
            input_ids: [B, T].
            attention_mask: [B, T], 1 for tokens that count; None for all.
            token_type_ids: [B, T]; the engine takes every token for one of type 0.
            logits_to_keep: the last positions that logits are returned of; 0 for all. 1 is for the logits after each
                text alone, [B, 1, V]; the engine then remembers the texts, and reads only what is new in the next call.
            use_cache: is not used; `generate` passes it.
            return_dict: the same.

        Raises:
            ArgumentError: if a token is none of the vocabulary, or of another type, or a text is empty or too long, or
                there are too many to be remembered.
            ModelStateError: if the engine fails.
        """
        mask, texts = self.texts_in(input_ids, attention_mask, token_type_ids)
        if logits_to_keep == 1:
            return CausalLMOutput(logits=self.after(texts)[:, None])
        output = self.output([self.read(text) for text in texts], mask)
        if logits_to_keep and "logits" in output:
            output["logits"] = output["logits"][:, -logits_to_keep:]
        return output

    def output(self, rows: Sequence[Tensor], mask: Tensor) -> ModelOutput:
        """Return the output for a batch.

        Args:
            rows: what `read` returned for each text.
            mask: of the batch, [B, T].
        """
        return CausalLMOutput(logits=spread(rows, mask))

    @abstractmethod
    def read(self, tokens: Sequence[int]) -> Tensor:
        """Return what the engine puts out for a text, [T, …].

        Args:
            tokens: of the text.
        """

    @abstractmethod
    def after(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Return the logits after each text, [B, V].

        Args:
            texts: the tokens of each, B of them.
        """

    def texts_in(
        self, input_ids: Tensor, attention_mask: Tensor | None, token_type_ids: Tensor | None
    ) -> tuple[Tensor, list[list[int]]]:
        """Return the mask of a batch, and the tokens of its rows.

        Args:
            input_ids: [B, T].
            attention_mask: [B, T]; None for all.
            token_type_ids: [B, T]; None for zeros.

        Raises:
            ArgumentError: if a token is none of the vocabulary, or of another type, or a row has none, or the mask has
                another shape.
        """
        if token_type_ids is not None and bool(token_type_ids.any()):
            raise ArgumentError(f"token_type_ids is not 0 everywhere: {self.engine_name} reads no pairs of texts here")
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if mask.shape != input_ids.shape:
            raise ArgumentError(f"attention_mask has the shape {[*mask.shape]}, and input_ids {[*input_ids.shape]}")
        check_ids("input_ids", input_ids, self.size, "tokens")
        if not (len(mask) and bool(mask.any(-1).all())):
            raise ArgumentError(f"a text of no tokens: {self.engine_name} reads none such")
        return mask, [ids(row) for row in rows_of({"input_ids": input_ids, "attention_mask": mask})]

    def check_length(self, tokens: int) -> None:
        """Raise ArgumentError if a text has more tokens than the model reads.

        Args:
            tokens: of the text.
        """
        if tokens > self.positions:
            raise ArgumentError(f"a text of {tokens} tokens: the model reads {self.positions} at most; cut it")

    @contextmanager
    def explaining(self, what: str) -> Iterator[None]:
        """Turn an error of the engine into a ModelStateError.

        Args:
            what: the engine was given.
        """
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise ModelStateError(f"{self.engine_name} fails on {what}: {first_line(error)}") from error


def spread(rows: Sequence[Tensor], mask: Tensor) -> Tensor:
    """Return what was put out for the tokens of each row, at their places in a batch, and zeros elsewhere."""
    found = rows[0].new_zeros(*mask.shape, rows[0].shape[-1])
    found[mask.bool()] = torch.cat(list(rows))
    return found


def known(text: Sequence[int], held: Sequence[int]) -> int:
    """Return how many tokens a text begins with that were read before; the last one is always read."""
    return sum(itertools.takewhile(bool, map(operator.eq, text[:-1], held)))
