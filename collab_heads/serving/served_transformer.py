"""A module of sentence-transformers that runs what `export` wrote: `SentenceTransformer("served", …)` loads it."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sentence_transformers.base.modules import InputModule
from torch import Tensor

from collab_heads.errors import ArgumentError
from collab_heads.files.folders import MANIFEST
from collab_heads.serving.loading import load_exported
from collab_heads.serving.text_reader import EMBEDDING, STATES


class ServedTransformer(InputModule):
    """A sentence encoder in an engine, with its pooling and the layers after it.

    Args:
        folder: what `export` wrote.
        threads: the threads of the engine; None for all cores.

    Raises:
        ModelStateError: if the graph puts out no embeddings of texts, or the folder has no tokenizer.
        DataError, MissingPackageError: as `load_exported`.
    """

    def __init__(self, folder: str | Path, threads: int | None = None):
        super().__init__()
        self.served = load_exported(folder, threads=threads)
        self.reader = self.served.reader
        self.tokenizer = self.reader.tokenizer

    @classmethod
    def load(
        cls,
        model_name_or_path: str,
        subfolder: str = "",
        token: bool | str | None = None,
        cache_folder: str | None = None,
        revision: str | None = None,
        local_files_only: bool = False,
        init_defaults: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> "ServedTransformer":
        """Load the module, from a folder or from the Hub; the arguments are those of sentence-transformers.

        Args:
            model_name_or_path: the folder, or a name on the Hub.
            subfolder: the folder in it.
            token: for a private repository.
            cache_folder: where a repository is kept.
            revision: of a repository.
            local_files_only: whether nothing is loaded from the Hub.
            init_defaults: of other modules.
            kwargs: the same.
        """
        where = (subfolder, token, cache_folder, revision, local_files_only)
        return cls(cls.load_dir_path(model_name_or_path, *where) or model_name_or_path)

    @property
    def max_seq_length(self) -> int:
        """The most tokens of a text; longer ones are cut."""
        return self.reader.tokenizer.model_max_length

    @max_seq_length.setter
    def max_seq_length(self, value: int) -> None:
        self.reader.tokenizer.model_max_length = value

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **kwargs: Any) -> dict[str, Tensor]:
        """Return the inputs of the graph.

        Args:
            inputs: the texts, B of them.
            prompt: stands before each.
            kwargs: what other modules read.
        """
        if other := next((each for each in inputs if not isinstance(each, str)), None):
            raise ArgumentError(f"the model reads texts, not {other!r:.80}")
        return self.reader(inputs, prompt)

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Return the features with `sentence_embedding` [B, d] and `token_embeddings` [B, T, D].

        Args:
            features: what `preprocess` returned.
            kwargs: what other modules read.
        """
        outputs = self.served(**{name: value for name, value in features.items() if isinstance(value, Tensor)})
        return {**features, EMBEDDING: outputs[EMBEDDING], "token_embeddings": outputs[STATES]}

    def get_embedding_dimension(self) -> int:
        """Return d."""
        return self.served.width

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        """Copy the folder; without its digests, as sentence-transformers writes some of the files again.

        Args:
            output_path: the new folder.
            args: are not used.
            kwargs: are not used.
        """
        source, ignored = Path(self.served.folder or ""), shutil.ignore_patterns(MANIFEST)
        if source.resolve() != Path(output_path).resolve():
            shutil.copytree(source, output_path, ignore=ignored, dirs_exist_ok=True)
