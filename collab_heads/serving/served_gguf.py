"""A model in llama.cpp that is called as the original is, and generates: logits, states, or embeddings of texts."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import PretrainedConfig
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from collab_heads.base.extras import check_extra
from collab_heads.errors import ArgumentError
from collab_heads.files.folders import MANIFEST
from collab_heads.saving.source_files import OF_TEXTS, SETTINGS
from collab_heads.serving.exported_folder import GENERATION, check_digests, naming, read_settings
from collab_heads.serving.gguf_engines import MOST_ROWS, Continues, Embeds, Predicts
from collab_heads.serving.gguf_file import checked_facts, read_gguf
from collab_heads.serving.graph_engines import check_inside
from collab_heads.serving.reads_texts import ReadsTexts, spread
from collab_heads.serving.text_reader import EMBEDDING, read_texts

FEWEST = 256  # tokens for which an engine makes room


class ServedGguf(ReadsTexts):
    """A model in llama.cpp, which is called and generates as the original does; a text is read without its padding.

    Args:
        file: what `export` wrote for llama.cpp.
        threads: of the engine.
        check: whether it is compared with its digest in the manifest of its folder, if there is one.

    Raises:
        DataError: if the file is damaged, is not in the manifest of its folder, or says something of itself that
            exports never say.
        MissingPackageError: if llama.cpp is not installed.
    """

    engine_name = "llama.cpp"

    def __init__(self, file: Path, threads: int = 1, check: bool = True):
        check_extra("gguf", "models in llama.cpp")
        if check:
            check_digests(file.parent, [file.name, GENERATION, OF_TEXTS, SETTINGS])
        check_inside(file)
        with naming(file):
            self.facts = facts = checked_facts(*read_gguf(file))
        sizes = {"vocab_size": facts.size, "hidden_size": facts.width, "max_position_embeddings": facts.positions}
        kind: Any = {"architectures": [type(self).__name__], "is_decoder": not facts.form.embeds}
        super().__init__(PretrainedConfig(**kind | sizes))
        self.file, self.folder, self.width = file, file.parent, facts.width
        self.size, self.positions = facts.size, facts.positions
        self.threads, self.room = threads, 0
        self.continues: Continues | None = None
        if self.can_generate() and (settings := read_settings(self.folder, facts.size)) is not None:
            self.generation_config = settings
        if facts.pools and (self.folder / OF_TEXTS).exists():
            self.texts = read_texts(self.folder)
        self.engine_for(1)

    def can_generate(self) -> bool:  # type: ignore[override]
        """Return True for a language model."""
        return not self.facts.form.embeds

    def copy_to(self, folder: Path) -> None:
        """Copy the file, with what `export` wrote beside it, but nothing else that may be there.

        Args:
            folder: an empty one.
        """
        if (self.file.parent / MANIFEST).exists():
            super().copy_to(folder)
        else:
            shutil.copy(self.file, folder)

    def engine_for(self, tokens: int) -> Any:
        """Return the engine, with room for a text; it is loaded again for one that is longer than those before.

        Args:
            tokens: of the text.

        Raises:
            ArgumentError: if the model reads no text so long.
            DataError: if the engine cannot load the file.
            ModelStateError: if it has no memory for a text so long.
        """
        self.check_length(tokens)
        if tokens > self.room:
            room = min(max(FEWEST, 2 * self.room, tokens), self.positions)
            kind = Embeds if self.facts.form.embeds else Predicts
            with self.explaining(f"room for {room} tokens") if self.room else naming(self.file):
                self.engine = kind(self.file, room, self.threads)
            self.room = room  # not before: the engine ends the process on a text that is longer than its room
        return self.engine

    def output(self, rows: Sequence[Tensor], mask: Tensor) -> ModelOutput:
        """Return the output for a batch; an embedding of a text has length 1 if the original's has.

        Args:
            rows: what `read` returned for each text.
            mask: of the batch, [B, T].
        """
        if self.can_generate():
            return super().output(rows, mask)
        if not self.facts.pools:
            return BaseModelOutput(last_hidden_state=spread(rows, mask))
        found = torch.cat(list(rows))
        return ModelOutput({EMBEDDING: normalize(found, dim=-1) if self.facts.normalizes else found})

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Return what the engine puts out for a text.

        Args:
            tokens: of the text.
        """
        engine = self.engine_for(len(tokens))
        with self.explaining(f"a text of {len(tokens)} tokens"):
            return engine(tokens).flatten(end_dim=-2)

    def after(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Return the logits after each text, [B, V].

        Args:
            texts: the tokens of each, B of them.
        """
        longest, held = max(map(len, texts)), self.continues
        self.check_length(longest)
        if len(texts) > MOST_ROWS:
            raise ArgumentError(f"{len(texts)} texts: llama.cpp continues {MOST_ROWS} at a time; pass fewer")
        if held is None or longest > held.tokens or len(texts) > len(held.held):
            self.continues = held = None  # before the next one is made
            room = min(max(FEWEST, 2 * longest), self.positions)
            with self.explaining(f"room for {len(texts)} texts of {room} tokens"):
                self.continues = held = Continues(self.file, room, self.threads, len(texts))
        with self.explaining(f"{len(texts)} texts of {longest} tokens at most"):
            return held(texts)
