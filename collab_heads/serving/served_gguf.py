"""A model in llama.cpp that is called as the original is, and generates: logits, states, or embeddings of texts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput
from transformers.utils import ModelOutput

from collab_heads.base.extras import check_extra
from collab_heads.errors import ArgumentError, ModelStateError
from collab_heads.saving.source_files import OF_TEXTS, SETTINGS
from collab_heads.serving.ctranslate2_engines import ids, rows_of
from collab_heads.serving.exported_folder import GENERATION, check_digests, naming, read_json
from collab_heads.serving.gguf_engines import MOST_ROWS, Continues, Embeds, Predicts
from collab_heads.serving.gguf_file import checked_facts, read_gguf
from collab_heads.serving.graph_engines import check_inside
from collab_heads.serving.target import first_line
from collab_heads.serving.text_reader import EMBEDDING, EmbedsTexts, Texts, read_texts

FEWEST = 256  # tokens for which an engine makes room


class ServedGguf(EmbedsTexts, PreTrainedModel, GenerationMixin):
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
        self.threads, self.room = threads, 0
        self.continues: Continues | None = None
        if self.can_generate() and (self.folder / GENERATION).exists():
            with naming(self.folder / GENERATION):
                self.generation_config = GenerationConfig.from_dict(read_json(self.folder, GENERATION))
        self.texts: Texts | None = None
        if facts.pools and (self.folder / OF_TEXTS).exists():
            self.texts = read_texts(self.folder)
        self.engine_for(1)

    @property
    def device(self) -> torch.device:
        """The processor."""
        return torch.device("cpu")

    def can_generate(self) -> bool:  # type: ignore[override]
        """Return True for a language model."""
        return not self.facts.form.embeds

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as a model of transformers does, with the same arguments: greedily, by sampling, with beams.

        Args:
            args: those of `generate` in transformers.
            kwargs: the same; `use_cache` is not used, since the engine has the cache.
        """
        return cast(Any, GenerationMixin).generate(self, *args, **{**kwargs, "use_cache": False})

    def engine_for(self, tokens: int) -> Any:
        """Return the engine, with room for a text; it is loaded again for one that is longer than those before.

        Args:
            tokens: of the text.

        Raises:
            ArgumentError: if the model reads no text so long.
            DataError: if the engine cannot load the file.
        """
        self.check_length(tokens)
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
        logits_to_keep: int = 0,
        use_cache: bool = False,
        return_dict: bool = True,
    ) -> ModelOutput:
        """Return what the original would: `logits` [B, T, V], `last_hidden_state` [B, T, D], or `sentence_embedding`.

        Padding gets zeros. An embedding of a text, [B, D], has length 1 if the original's has.

        Args:
            input_ids: [B, T].
            attention_mask: [B, T], 1 for tokens that count; None for all.
            token_type_ids: [B, T]; llama.cpp takes every token for one of type 0.
            logits_to_keep: 1 for the logits after each text alone, [B, 1, V]; the engine then remembers the texts, and
                reads only what is new in the next call.
            use_cache: is not used; `generate` passes it.
            return_dict: the same.

        Raises:
            ArgumentError: if a token is none of the vocabulary, or of another type, or a text is too long, or there are
                too many to be remembered.
            ModelStateError: if the engine fails.
        """
        if token_type_ids is not None and bool(token_type_ids.any()):
            raise ArgumentError("token_type_ids is not 0 everywhere: llama.cpp reads no pairs of texts")
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if input_ids.numel() and not 0 <= int(input_ids.min()) <= int(input_ids.max()) < self.facts.size:
            raise ArgumentError(f"input_ids hold {int(input_ids.max())}: the model has {self.facts.size} tokens")
        if not bool(mask.any(-1).all()):
            raise ArgumentError("a text of no tokens: llama.cpp reads none such")
        texts = [ids(row) for row in rows_of({"input_ids": input_ids, "attention_mask": mask})]
        if logits_to_keep == 1 and self.can_generate():
            return CausalLMOutput(logits=self.after(texts)[:, None])
        rows = [self.read(text) for text in texts]
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
        with explaining(f"a text of {len(tokens)} tokens"):
            return engine(tokens)

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
            room = min(max(FEWEST, 2 * longest), self.facts.positions)
            with naming(self.file):
                self.continues = held = Continues(self.file, room, self.threads, len(texts))
        with explaining(f"{len(texts)} texts of {longest} tokens at most"):
            return held(texts)

    def check_length(self, tokens: int) -> None:
        """Raise ArgumentError if a text has more tokens than the model reads.

        Args:
            tokens: of the text.
        """
        if tokens > self.facts.positions:
            raise ArgumentError(f"a text of {tokens} tokens: the model reads {self.facts.positions} at most; cut it")


@contextmanager
def explaining(what: str) -> Iterator[None]:
    """Turn an error of the engine into a ModelStateError that says what it was given."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise ModelStateError(f"llama.cpp fails on {what}: {first_line(error)}") from error
