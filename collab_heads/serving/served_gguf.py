"""A model in llama.cpp that is called as the original is: logits, states, or embeddings of texts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput
from transformers.utils import ModelOutput

from collab_heads.base.extras import check_extra
from collab_heads.errors import ArgumentError, DataError, ModelStateError
from collab_heads.files.folders import damage
from collab_heads.saving.source_files import OF_TEXTS
from collab_heads.serving.ctranslate2_engines import ids, rows_of
from collab_heads.serving.exported_folder import naming
from collab_heads.serving.gguf_engines import Embeds, Predicts
from collab_heads.serving.gguf_file import checked_facts, read_gguf
from collab_heads.serving.graph_engines import AGAIN, check_inside
from collab_heads.serving.target import first_line
from collab_heads.serving.text_reader import EMBEDDING, EmbedsTexts, Texts, read_texts

FEWEST = 256  # tokens for which an engine makes room


class ServedGguf(EmbedsTexts, PreTrainedModel):
    """A model in llama.cpp. A text is read without its padding, and by itself.

    Args:
        file: what `export` wrote for llama.cpp.
        threads: of the engine.
        check: whether the file is compared with its digest in the manifest of its folder, if there is one.

    Raises:
        DataError: if the file is damaged, or says something of itself that exports never say.
        MissingPackageError: if llama.cpp is not installed.
    """

    def __init__(self, file: Path, threads: int = 1, check: bool = True):
        check_extra("gguf", "models in llama.cpp")
        if check and (wrong := damage(file.parent)):
            raise DataError(
                f"{file.parent} is damaged: {wrong}: {AGAIN}, or pass check=False if you changed it yourself"
            )
        check_inside(file)
        with naming(file):
            self.facts = facts = checked_facts(*read_gguf(file))
        sizes = {"vocab_size": facts.size, "hidden_size": facts.width, "max_position_embeddings": facts.positions}
        kind: Any = {"architectures": [type(self).__name__], "is_decoder": not facts.form.embeds}
        super().__init__(PretrainedConfig(**kind | sizes))
        self.file, self.folder, self.width = file, file.parent, facts.width
        self.threads, self.room = threads, 0
        self.texts: Texts | None = None
        if facts.pools and (self.folder / OF_TEXTS).exists():
            self.texts = read_texts(self.folder)
        self.engine_for(1)

    @property
    def device(self) -> torch.device:
        """The processor."""
        return torch.device("cpu")

    def can_generate(self) -> bool:  # type: ignore[override]
        """Return True for a language model; `llama_cpp.Llama` generates with the file, and this class reads texts."""
        return not self.facts.form.embeds

    def engine_for(self, tokens: int) -> Any:
        """Return the engine, with room for a text; it is loaded again for one that is longer than those before.

        Args:
            tokens: of the text.

        Raises:
            ArgumentError: if the model reads no text so long.
            DataError: if the engine cannot load the file.
        """
        if tokens > self.facts.positions:
            raise ArgumentError(f"a text of {tokens} tokens: the model reads {self.facts.positions} at most; cut it")
        if tokens > self.room:
            self.room = min(max(FEWEST, 2 * self.room, tokens), self.facts.positions)
            kind = Embeds if self.facts.form.embeds else Predicts
            with naming(self.file):
                self.engine = kind(self.file, self.room, self.threads)
        return self.engine

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> ModelOutput:
        """Return what the original would: `logits` [B, T, V], `last_hidden_state` [B, T, D], or `sentence_embedding`.

        Padding gets zeros. An embedding of a text, [B, D], has length 1 if the original's has.

        Args:
            input_ids: [B, T].
            attention_mask: [B, T], 1 for tokens that count; None for all.
            token_type_ids: [B, T]; llama.cpp takes every token for one of type 0.

        Raises:
            ArgumentError: if a token is none of the vocabulary, or of another type, or a text is too long.
            ModelStateError: if the engine fails.
        """
        if token_type_ids is not None and bool(token_type_ids.any()):
            raise ArgumentError("token_type_ids is not 0 everywhere: llama.cpp reads no pairs of texts")
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if input_ids.numel() and not 0 <= int(input_ids.min()) <= int(input_ids.max()) < self.facts.size:
            raise ArgumentError(f"input_ids hold {int(input_ids.max())}: the model has {self.facts.size} tokens")
        if not bool(mask.any(-1).all()):
            raise ArgumentError("a text of no tokens: llama.cpp reads none such")
        rows = [self.read(ids(row)) for row in rows_of({"input_ids": input_ids, "attention_mask": mask})]
        if self.facts.pools:
            found = torch.cat(rows)
            return ModelOutput({EMBEDDING: normalize(found, dim=-1) if self.facts.normalizes else found})
        found = torch.zeros(*input_ids.shape, rows[0].shape[-1])
        found[mask.bool()] = torch.cat([row.flatten(end_dim=-2) for row in rows])
        return BaseModelOutput(last_hidden_state=found) if self.facts.form.embeds else CausalLMOutput(logits=found)

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Return what the engine puts out for a text.

        Args:
            tokens: of the text.
        """
        engine = self.engine_for(len(tokens))
        try:
            return engine(tokens)
        except (RuntimeError, ValueError) as error:
            raise ModelStateError(f"llama.cpp fails on a text of {len(tokens)} tokens: {first_line(error)}") from error
