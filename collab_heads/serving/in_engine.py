"""A model in an engine: it has no weights in PyTorch, stays in its folder, and embeds texts as that says."""

import copy
import functools
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from collab_heads.errors import ArgumentError, ModelStateError
from collab_heads.files.atomic import write_file
from collab_heads.files.folders import MANIFEST, write_folder
from collab_heads.saving.card import README
from collab_heads.saving.source_files import OF_TEXTS, files_in
from collab_heads.serving.graph_engines import check_inside
from collab_heads.serving.text_reader import EMBEDDING, TextReader, Texts


class ModelInEngine(PreTrainedModel):
    """A model in an engine, which is called as the original is.

    Attributes:
        folder: the folder, which has the tokenizer.
        texts: how a sentence encoder reads texts; None for another model.
        width: of its embeddings, d.
    """

    folder: Path | None
    texts: Texts | None
    width: int

    @property
    def device(self) -> torch.device:
        """The processor."""
        return torch.device("cpu")

    def __deepcopy__(self, memo: dict) -> "ModelInEngine":
        """Return a copy with settings of its own, which shares the engine: nothing changes that."""
        memo[id(self)] = copied = copy.copy(self)
        copied.__dict__ |= {"_modules": dict(self._modules)}
        for name in {"config", "generation_config"} & self.__dict__.keys():
            setattr(copied, name, copy.deepcopy(getattr(self, name), memo))
        return copied

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | Path, push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """Copy what the model was loaded from; `push_to_hub(name)` uploads such a copy.

        Args:
            save_directory: the new folder.
            push_to_hub: must be false.
            kwargs: what other models of transformers take; not used.

        Raises:
            ArgumentError: if `push_to_hub` is true.
            ModelStateError: if the model was loaded from no folder.
            OutputError: if the new folder is not empty, or cannot be written.
        """
        if push_to_hub:
            raise ArgumentError("push_to_hub=True: call push_to_hub(name) of the model")
        if self.folder is None:
            raise ModelStateError("the model was loaded from no folder, so there is nothing to copy")
        write_folder(Path(save_directory), self.copy_to, only_new=True)
        if (self.folder / MANIFEST).exists() and (card := self.folder / README).exists():
            write_file(Path(os.path.realpath(save_directory), README), card.read_bytes())  # not in the manifest

    def copy_to(self, folder: Path) -> None:
        """Copy what the model was loaded from into a folder.

        Args:
            folder: an empty one.
        """
        ignored = shutil.ignore_patterns(README, MANIFEST)
        shutil.copytree(cast(Path, self.folder), folder, ignore=ignored, dirs_exist_ok=True)

    @functools.cached_property
    def reader(self) -> TextReader:
        """The reader that turns texts into the inputs of a sentence encoder.

        Raises:
            ModelStateError: if the model puts out no embeddings of texts, or the folder has no tokenizer.
        """
        if self.folder is None or self.texts is None:
            raise ModelStateError(
                f"this {self.config.model_type or type(self).__name__} puts out no {EMBEDDING}, or {OF_TEXTS} is "
                "missing beside it: export a model that was loaded from a folder of sentence-transformers, which has a "
                "modules.json"
            )
        if not files_in(self.folder):
            raise ModelStateError(f"{self.folder} has no tokenizer: export with tokenizer=, or save it there")
        for file in files_in(self.folder):
            check_inside(file)
        return TextReader(self.folder, self.texts, self.config)

    def encode(self, texts: Sequence[str], batch_size: int = 32, *, prompt_name: str | None = None) -> np.ndarray:
        """Return the embeddings of texts, [N, d], float32, as the `encode` of sentence-transformers does.

        Args:
            texts: the texts, N of them. Those of similar length are read together; longer ones than the model reads
                are cut.
            batch_size: texts that are tokenized at a time, and read at a time but in llama.cpp, which reads each alone.
            prompt_name: the name of the prompt that stands before each text; None for that of the model, if it has one.

        Raises:
            ArgumentError: if a text is none, or there is no such prompt.
            ModelStateError: if the model puts out no embeddings of texts, or the folder has no tokenizer.
            DataError: if the tokenizer in the folder cannot be loaded.
        """
        return self.reader.encode(cast(Any, self), texts, batch_size, prompt_name, self.width)
