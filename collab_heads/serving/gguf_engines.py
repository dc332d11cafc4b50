"""Models in llama.cpp, run as PyTorch runs them: generation, and the states and embeddings of texts."""

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collab_heads.serving.comparison import NEW_TOKENS
from collab_heads.serving.example_inputs import rows_of
from collab_heads.serving.reads_texts import known
from collab_heads.serving.target import quiet

MOST_ROWS = 256  # texts in the cache of an engine


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
            self.engine = llama_cpp.Llama(str(file), type_k=float32, type_v=float32, verbose=False, **sizes | options)
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


class Continues(Loaded):
    """A decoder that continues several texts, and remembers what it has read of each.

    Args:
        file: of the model.
        tokens: the most tokens of a text.
        threads: of the engine.
        rows: the most texts, at most `MOST_ROWS`.
    """

    def __init__(self, file: Path, tokens: int, threads: int = 1, rows: int = 1):
        self.tokens, self.held = tokens, [list[int]() for _ in range(rows)]
        at_once = {"n_batch": max(tokens, rows), "n_ubatch": max(tokens, rows)}
        # with `embedding` the cache has room for several texts; then the engine is told to put out logits
        super().__init__(file, tokens * rows, threads, embedding=True, **at_once)
        self.library.llama_set_embeddings(self.engine.ctx, False)

    def __call__(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Return the logits after each text, [B, V].

        The beginning of a text is not read again if that of the same number began so in the call before.
        """
        places, found = [], list[Tensor]()  # row and position of every token to be read
        memory = self.library.llama_get_memory(self.engine.ctx)
        for number, (row, held) in enumerate(zip(rows, self.held, strict=False)):
            begin = known(row, held)
            self.library.llama_memory_seq_rm(memory, number, begin, -1)
            self.held[number] = held[:begin]
            places += [(number, position) for position in range(begin, len(row))]
        for start in range(0, len(places), self.engine.n_batch):
            found += self.read(rows, places[start : start + self.engine.n_batch])
        return torch.stack(found)

    def read(self, rows: Sequence[Sequence[int]], places: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
        """Read some tokens, and yield the logits after each text that ends among them, [V]."""
        batch = self.engine._batch.batch
        batch.n_tokens = len(places)
        for index, (number, position) in enumerate(places):
            batch.token[index], batch.pos[index] = rows[number][position], position
            batch.seq_id[index][0], batch.n_seq_id[index] = number, 1
            batch.logits[index] = position == len(rows[number]) - 1
        self.engine._ctx.decode(self.engine._batch)
        for index, (number, position) in enumerate(places):
            self.held[number].append(rows[number][position])
            if batch.logits[index]:
                yield self.array(self.library.llama_get_logits_ith(self.engine.ctx, index), self.engine.n_vocab())


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
