"""A decoder in ExecuTorch that is called as the original is, and generates; its program holds the cache."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from collab_heads.base.checks import is_size
from collab_heads.errors import ArgumentError
from collab_heads.serving.exported_folder import SINGLE
from collab_heads.serving.fixed_cache import LENGTH, POSITION
from collab_heads.serving.reads_texts import ReadsTexts, known
from collab_heads.sites.state import expect

MOST_ROWS = 64  # texts that are continued together: each has a cache, and memory, of its own


class ServedProgram(ReadsTexts):
    """A decoder in ExecuTorch, which is called and generates as the original does; a text is read without its padding.

    Args:
        exported: the program, as transformers' exporters make and load it.
        folder: the folder, which has the tokenizer.
        portion: the most tokens that it reads at a time.

    Raises:
        ValueError: if the folder does not say how many tokens its cache has room for.
    """

    engine_name = "ExecuTorch"

    def __init__(self, exported: Any, folder: Path, portion: int):
        super().__init__(copy.deepcopy(exported.config))
        said: Any = (getattr(exported.generation_config, "cache_config", None) or {}).get(LENGTH)
        expect(is_size(said), LENGTH, said, "the number of tokens in the cache of the program")
        self.folder, self.generation_config = folder, copy.deepcopy(exported.generation_config)
        self.generation_config.cache_config = None  # of the program, and not of `generate`, which would warn
        self.size, self.positions = self.config.get_text_config().vocab_size, said
        self.config.max_position_embeddings = said  # what texts are cut to
        self.file, self.portion = Path(exported.components[SINGLE].program.path), portion
        self.held = [HeldText(exported.runners[SINGLE].method, portion)]

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits after each token of a text, [T, V].

        Args:
            tokens: of the text.
        """
        self.check_length(len(tokens))
        with self.explaining(f"a text of {len(tokens)} tokens"):
            return self.held[0].read(tokens, 0)

    def after(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Return the logits after each text, [B, V]; what a text begins with is not read again if it was there before.

        Args:
            texts: the tokens of each, B of them.
        """
        longest = max(map(len, texts))
        self.check_length(longest)
        if len(texts) > MOST_ROWS:
            raise ArgumentError(f"{len(texts)} texts: ExecuTorch continues {MOST_ROWS} at a time here; pass fewer")
        with self.explaining(f"{len(texts)} texts of {longest} tokens at most"):
            while len(self.held) < len(texts):
                self.held.append(HeldText(load_method(self.file), self.portion))
            pairs = zip(self.held, texts, strict=False)
            return torch.stack([held.read(text, known(text, held.tokens))[-1] for held, text in pairs])


class HeldText:
    """A text in the cache of a program.

    Args:
        method: of the program, with a cache of its own.
        portion: the most tokens that it reads at a time.
    """

    def __init__(self, method: Any, portion: int):
        self.method, self.portion, self.tokens = method, portion, list[int]()

    def read(self, text: Sequence[int], begin: int) -> Tensor:
        """Read a text from a token on, and return the logits after each token that was read, [T - begin, V]."""
        self.tokens, found = list(text[:begin]), []
        for start in range(begin, len(text), self.portion):
            part = text[start : start + self.portion]
            places = torch.arange(start, start + len(part))
            found.append(self.method.execute([torch.tensor([part]), places])[0][0].clone())
            self.tokens += part
        return torch.cat(found)


def load_method(file: Path) -> Any:
    """Return the method of a program, with memory of its own, which the methods of one loaded program share."""
    from executorch.runtime import Runtime

    return Runtime.get().load_program(file).load_method("forward")


def holds_cache(exported: Any) -> bool:
    """Return True if what was exported is a program that holds its cache."""
    return SINGLE in exported.components and POSITION in exported.components[SINGLE].metadata.kwargs
