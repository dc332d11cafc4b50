"""Syntactic heads: those that find the other end of a dependency better than a fixed offset does."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from collab_heads.analysis.measures.passes import Attention, Batch, Observer
from collab_heads.analysis.roles.treebank import NOTHING, Aligned, Treebank
from collab_heads.errors import ArgumentError, CalibrationError
from collab_heads.files.conllu import Sentence
from collab_heads.sites.site import AttentionSite

RELATIONS = ("nsubj", "obj", "amod", "advmod")
RENAMED = {"dobj": "obj"}  # the name in Universal Dependencies 1 and in the paper
DIRECTIONS = ("dependent->head", "head->dependent")


@dataclass(frozen=True)
class Baseline:
    """The accuracy of always looking at one relative position, for a relation in one direction.

    Attributes:
        offset: the best position, in words from the querying word.
        accuracy: the share of the queries that it answers.
        queries: number of querying words, in the measured sentences.
    """

    offset: int
    accuracy: float
    queries: int


@dataclass(frozen=True)
class Pool:
    """The words of a batch, aligned to its tokens, and the pairs of words to look for.

    Attributes:
        parts: [B, T, U], 1 where a token is part of a word.
        asked: [4, P], row, querying word, sought word and kind of every pair.
        kinds: [K], the number of queries of every kind.
    """

    parts: Tensor
    asked: Tensor
    kinds: Tensor


class Syntax(Observer):
    """An observer that counts how often a word attends most to a word to which it has a dependency.

    Attention between two words is summed over the sub-words of the word attended to, and averaged over those of the
    attending word. All words of the sentence are candidates, the word itself included; special tokens are not. A word
    with the relation counts as found if its largest weight falls on any word to which it has that relation. Words that
    the tokenizer does not separate count as one word, and relations between them are not counted.

    Only the self-attention of an encoder is measured: a decoder does not see the following words.

    Args:
        treebank: the treebank whose batches the pass reads.
        relations: main types of Universal Dependencies: "nsubj" includes "nsubj:pass". "dobj" means "obj".

    Source: Voita et al. 2019, arXiv:1905.09418, section 5.2; words from sub-words: Clark et al. 2019, arXiv:1906.04341,
        section 4.1.
    """

    weights = True

    def __init__(self, treebank: Treebank, relations: Sequence[str] = RELATIONS):
        relations = (relations,) if isinstance(relations, str) else relations
        self.relations = tuple(dict.fromkeys(RENAMED.get(each, each) for each in relations))
        if not self.relations or not all(isinstance(each, str) for each in self.relations):
            raise ArgumentError(f"relations={relations!r}: name some, such as {', '.join(RELATIONS)}")
        self.treebank = treebank
        self.kinds = [(relation, direction) for relation in self.relations for direction in DIRECTIONS]
        self._pool: tuple[Batch, Pool] | None = None

    def begin(self, sites: Sequence[AttentionSite]) -> None:
        measured = [site for site in sites if site.role == "enc-self"]
        self.right = {s.path: torch.zeros(len(self.kinds), s.num_heads, dtype=torch.int64) for s in measured}
        self.asked = {s.path: torch.zeros(len(self.kinds), dtype=torch.int64) for s in measured}
        self._pool = None

    def see_weights(self, site: AttentionSite, attention: Attention, batch: Batch) -> None:
        if site.path not in self.right:
            return
        weights = attention.weights  # (B, H, T, T)
        if self._pool is None or self._pool[0] is not batch:
            self._pool = (batch, self.pool(batch.index, weights))
        pool = self._pool[1]
        parts = pool.parts[:, None]
        # sums over the sub-words that attend have their largest where the means have it
        words = parts.mT @ (weights @ parts)  # (B, H, U, U)
        row, query, sought, kind = pool.asked
        hits = words.argmax(-1)[row, :, query] == sought[:, None]  # (P, H): a query seeks no word twice
        right = torch.zeros(len(self.kinds), hits.shape[1], dtype=torch.int64, device=hits.device)
        self.right[site.path] += right.index_add_(0, kind, hits.long()).cpu()
        self.asked[site.path] += pool.kinds

    def pool(self, index: int, weights: Tensor) -> Pool:
        """Return what all layers of a batch share; raise CalibrationError if it is not the treebank's batch."""
        batch, (rows, _, length, _) = self.treebank.batch(index), weights.shape
        if len(batch) != rows or max(len(aligned.ids) for _, aligned in batch) != length:
            raise CalibrationError(f"batch {index} is not that of the treebank: pass the treebank itself as batches")
        most = max(aligned.num_units for _, aligned in batch)
        parts, kinds = torch.zeros(rows, length, most), torch.zeros(len(self.kinds), dtype=torch.int64)
        asked: list[tuple[int, int, int, int]] = []
        for row, (sentence, aligned) in enumerate(batch):
            units = torch.tensor(aligned.token_units)
            tokens = (units != NOTHING).nonzero().flatten()
            parts[row, tokens, units[tokens]] = 1.0
            pairs = list(self.pairs(sentence, aligned))
            asked += [(row, *pair) for pair in pairs]
            for _, kind in {(query, kind) for query, _, kind in pairs}:
                kinds[kind] += 1
        columns = torch.tensor(asked, dtype=torch.int64).view(-1, 4).T.contiguous()
        return Pool(parts.to(weights), columns.to(weights.device), kinds)

    def pairs(self, sentence: Sentence, aligned: Aligned) -> Iterator[tuple[int, int, int]]:
        """Yield querying word, sought word and kind of every dependency to look for, each once."""
        asked: dict[tuple[int, int, int], None] = {}  # in order
        for word, (head, relation) in enumerate(zip(sentence.heads, sentence.relations, strict=True)):
            main = relation.split(":")[0]
            main = RENAMED.get(main, main)
            if main in self.relations and head:
                dependent, governor = aligned.word_units[word], aligned.word_units[head - 1]
                kind = 2 * self.relations.index(main)
                if dependent != governor:
                    asked |= {(dependent, governor, kind): None, (governor, dependent, kind + 1): None}
        return iter(asked)

    def results(self) -> tuple[Mapping[str, Mapping[tuple[str, str], Tensor]], Mapping[tuple[str, str], Baseline]]:
        """Return the accuracies and baselines of the relations that the treebank has.

        Returns:
            path -> (relation, direction) -> [H] float64, and (relation, direction) -> its best fixed offset.
        """
        for path, asked in self.asked.items():
            if not asked.any() and any(self.baselines()):
                raise CalibrationError(f"{path} saw no batch of the treebank")
        baselines = self.baselines()
        in_treebank = [(index, kind) for index, kind in enumerate(self.kinds) if kind in baselines]
        return {
            path: {kind: right[index].double() / int(self.asked[path][index]) for index, kind in in_treebank}
            for path, right in self.right.items()
        }, baselines

    def baselines(self) -> dict[tuple[str, str], Baseline]:
        """Return the fixed offset that answers most queries of each relation.

        Of equally good offsets the nearest is taken, and of two equally near ones the negative one.
        """
        offsets: list[Counter[int]] = [Counter() for _ in self.kinds]
        queries = [0] * len(self.kinds)
        for sentence, aligned in self.treebank.sentences:
            pairs = list(self.pairs(sentence, aligned))
            for query, sought, kind in pairs:
                offsets[kind][sought - query] += 1
            for _, kind in {(query, kind) for query, _, kind in pairs}:
                queries[kind] += 1
        baselines = {}
        for relation, counts, asked in zip(self.kinds, offsets, queries, strict=True):
            if asked:
                offset = nearest_of_best(counts)
                baselines[relation] = Baseline(offset, counts[offset] / asked, asked)
        return baselines


def nearest_of_best(counts: Counter[int]) -> int:
    """Return the most frequent offset; of equally frequent ones the nearest, of two such the negative one."""
    return min(counts, key=lambda offset: (-counts[offset], abs(offset), offset))
