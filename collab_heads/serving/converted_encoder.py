"""An encoder in CTranslate2 that is called as the original is, and embeds texts as its original's folder says."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.utils import ModelOutput

from collab_heads.errors import ModelStateError
from collab_heads.saving.source_files import listed
from collab_heads.serving.converted import Converted, table_sizes
from collab_heads.serving.example_inputs import check_ids, ids, rows_of
from collab_heads.serving.sentence_encoder import OF_ENCODER, SentenceEncoder
from collab_heads.serving.target import first_line
from collab_heads.serving.text_reader import EMBEDDING, STATES


class ConvertedEncoder(Converted):
    """An encoder in CTranslate2; the pooling of a sentence encoder, and the layers after it, are those of PyTorch.

    Args:
        folder: what `export` wrote for CTranslate2.
        threads: of the engine.
        check: whether its files are compared with their digests.

    Raises:
        DataError: if a file in the folder is damaged.
        UnsupportedModelError: if the model is no encoder.
    """

    def __init__(self, folder: Path, threads: int = 1, check: bool = True):
        config = PretrainedConfig(architectures=[type(self).__name__])
        super().__init__(folder, config, "Encoder", "encoder", threads, check)
        self.encoder: SentenceEncoder | None = None
        self.sizes = table_sizes(folder)
        self.dim = self.states([[0]]).shape[-1]
        if (folder / OF_ENCODER).exists():
            self.encoder = SentenceEncoder(folder, listed(folder, OF_ENCODER), self.dim)
            self.texts, self.width = self.encoder.texts, self.encoder.width

    def states(self, texts: list[list[int]], types: list[list[int]] | None = None) -> Tensor:
        """Return the last hidden states of texts, [B, T, D], padded at their ends.

        Args:
            texts: the ids of each, B of them.
            types: the types of their tokens; None for 0.

        Raises:
            ModelStateError: if the engine cannot read them, such as texts longer than its positions.
        """
        try:
            found = self.engine.forward_batch(texts, token_type_ids=types)
        except (RuntimeError, ValueError) as error:
            raise ModelStateError(f"CTranslate2 fails on these texts: {first_line(error)}: cut them") from error
        return torch.from_numpy(np.array(found.last_hidden_state))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> ModelOutput:
        """Return `last_hidden_state` [B, T, D], zeros for padding; of a sentence encoder, `sentence_embedding` [B, d].

        Args:
            input_ids: [B, T].
            attention_mask: [B, T], 1 for tokens that count; None for all.
            token_type_ids: [B, T]; None for 0.

        Raises:
            ArgumentError: if the model has no such token, or type of one.
            ModelStateError: if the engine fails.
        """
        tables = ("input_ids", input_ids, "tokens"), ("token_type_ids", token_type_ids, "types of tokens")
        for (name, numbers, what), size in zip(tables, self.sizes, strict=False):
            if numbers is not None:
                check_ids(name, numbers, size, what)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        given = {"input_ids": input_ids, "token_type_ids": token_type_ids, "attention_mask": mask}
        rows = list(rows_of({name: value for name, value in given.items() if value is not None}))
        types = None if token_type_ids is None else [ids(row, "token_type_ids") for row in rows]
        states = torch.zeros(*input_ids.shape, self.dim)
        if rows:  # texts of no tokens have no states
            found = self.states([ids(row) for row in rows], types)
            states[mask.bool()] = torch.cat([each[: len(ids(row))] for each, row in zip(found, rows, strict=True)])
        outputs = {STATES: states} if self.encoder is None else {STATES: states, EMBEDDING: self.encoder(states, mask)}
        return ModelOutput(outputs)
