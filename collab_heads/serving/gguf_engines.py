"""Models in llama.cpp, run as PyTorch runs them: greedy generation, and the states and embeddings of texts."""

import ctypes
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collab_heads.serving.comparison import NEW_TOKENS
from collab_heads.serving.ctranslate2_engines import rows_of
from collab_heads.serving.target import quiet


class Loaded:
    """A model in llama.cpp, with a cache in float32.

    Args:
        file: of the model.
        tokens: the most tokens of a text.
        threads: of the engine.
        options: of `llama_cpp.Llama`.
    """

    def __init__(self, file: Path, tokens: int, threads: int = 1, **options: Any):
        import llama_cpp

        self.library, float32 = llama_cpp, llama_cpp.GGML_TYPE_F32
        sizes = {"n_ctx": tokens, "n_batch": tokens, "n_ubatch": tokens}
        sizes |= dict.fromkeys(("n_threads", "n_threads_batch"), threads)
        with quiet():
            self.engine = llama_cpp.Llama(str(file), type_k=float32, type_v=float32, verbose=False, **sizes, **options)
        weakref.finalize(self, self.engine.close)  # at the end of Python, too: it fails in what is left there by itself

    def array(self, found: Any, width: int) -> Tensor:
        """Return a copy of numbers that the engine keeps: [width]."""
        return torch.from_numpy(np.ctypeslib.as_array(found, shape=(width,)).copy())


class Greedy(Loaded):
    """A decoder that generates greedily as one of PyTorch does.

    Args:
        file: of the model.
        tokens: the most tokens of a text.
        ends: the tokens that end a text, which are not chosen.
    """

    def __init__(self, file: Path, tokens: int, ends: Tensor):
        super().__init__(file, tokens)
        self.ends = ends

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Read tokens after those before, and return the logits after the last one: [V]."""
        self.engine.eval(tokens)
        return self.array(self.library.llama_get_logits_ith(self.engine.ctx, -1), self.engine.n_vocab())

    def generate(self, **inputs: Tensor) -> SimpleNamespace:
        """Continue the rows of a batch greedily: `sequences` [B, new tokens], and `logits` of every step, [B, V]."""
        chosen, steps = [], []
        for row in rows_of(inputs):
            self.engine.reset()
            read, found = row["input_ids"][0].tolist(), []
            for _ in range(NEW_TOKENS):
                found.append(self.logits(read))
                read = [int(found[-1].index_fill(0, self.ends, -torch.inf).argmax())]
                chosen.append(read[0])
            steps.append(torch.stack(found))
        return SimpleNamespace(sequences=torch.tensor(chosen).view(len(steps), -1), logits=torch.stack(steps).unbind(1))


class Predicts(Loaded):
    """A decoder: what it predicts after each token of a text."""

    def __init__(self, file: Path, tokens: int, threads: int = 1):
        super().__init__(file, tokens, threads, logits_all=True)

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits of a text, [1, T, V]."""
        self.engine.reset()
        self.engine.eval(tokens)
        return torch.from_numpy(self.engine.scores[: len(tokens)].copy())[None]


class Embeds(Loaded):
    """An encoder: the states of a text, or its embedding, as the file says."""

    def __init__(self, file: Path, tokens: int, threads: int = 1):
        super().__init__(file, tokens, threads, embedding=True)

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        """Return the states of a text, [1, T, D], or its embedding, [1, D]."""
        library, context, width = self.library, self.engine.ctx, self.engine.n_embd()
        given = (library.llama_token * len(tokens))(*tokens)  # the batch holds no references
        batch, every = (
            library.llama_batch_get_one(given, len(tokens)),
            (ctypes.c_int8 * len(tokens))(*[1] * len(tokens)),
        )
        batch.logits = every
        if library.llama_encode(context, batch):
            raise RuntimeError(f"llama_encode takes no text of {len(tokens)} tokens")
        if library.llama_pooling_type(context):
            return self.array(library.llama_get_embeddings_seq(context, 0), width)[None]
        return self.array(library.llama_get_embeddings(context), len(tokens) * width).view(1, -1, width)
