"""The tasks of `evaluate`, a class each: what its data holds, what a model answers, and how answers are scored."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.base.option_values import EvaluationTask
from collab_heads.contract.registry import is_lone_decoder
from collab_heads.errors import ArgumentError, DataError, UnsupportedModelError
from collab_heads.evaluation.classifier_tasks import Classification, Regression, gives_numbers
from collab_heads.evaluation.scores import mean_of, of_sums, of_translations, spearman, times
from collab_heads.evaluation.task import Limits, Task
from collab_heads.running.translations import most_tokens, translations

NEAREST = 10  # texts, or passages of a query
ROWS = 1024  # of a table of similarities that are computed at a time


def check_embeds(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError if a model is none that embeds texts."""
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{type(model).__name__} has an encoder and a decoder: give a model that embeds texts"
        )
    if gives_numbers(model):
        raise UnsupportedModelError(
            f"this {type(model).__name__} gives a number for its texts, and no embedding: choose the task regression"
        )


def nearest(vectors: Tensor, others: Tensor, count: int, *, but_itself: bool = False) -> Tensor:
    """Return the indices [N, count] of the vectors nearest to each of the vectors [N, D], the nearest first.

    Args:
        vectors: [N, D], of unit length.
        others: [M, D], of unit length.
        count: how many to return; M, if that is less.
        but_itself: whether both are the same vectors, none of which is its own neighbour.
    """
    found = []
    for start in range(0, len(vectors), ROWS):
        similarity = vectors[start : start + ROWS] @ others.T
        if but_itself:
            similarity[torch.arange(len(similarity)), torch.arange(start, start + len(similarity))] = -torch.inf
        found.append(similarity.topk(min(count, len(others) - but_itself)).indices)
    return torch.cat(found)


def share_changed(found: Tensor, original: Tensor) -> float:
    """Return the share of neighbours, [N, k], that are not among the original's, [N, k]."""
    if not found.numel():
        return 0.0
    kept = (found[:, :, None] == original[:, None, :]).any(-1)
    return 1.0 - float(kept.double().mean())


class Embedded(NamedTuple):
    """The cosine of each pair, [N], and the nearest of all texts for each text, [M, 10]."""

    cosines: np.ndarray
    neighbours: Tensor


class Similarity(Task):
    """How similar two texts are: the cosine of their embeddings against a number."""

    COLUMNS = ("sentence1", "sentence2", "score"), ("sentence1", "sentence2", "label")
    PACKAGES = ("scipy",)
    FLIPS = "the ten nearest neighbours of each text that change"

    def __init__(self, columns: Sequence[Sequence[str]], where: str, limits: Limits):
        super().__init__(columns, where, limits)
        self.wanted = self.numbers(2)
        self.texts = list(dict.fromkeys(self.columns[0] + self.columns[1]))

    def check(self, model, tokenizer):
        check_embeds(model)

    def answers(self, model, tokenizer):
        vectors, place = self.embedded(model, tokenizer, self.texts), {text: i for i, text in enumerate(self.texts)}
        first, second = (vectors[[place[text] for text in column]] for column in self.columns[:2])
        cosines = (first.double() * second.double()).sum(-1).numpy()
        return Embedded(cosines, nearest(vectors, vectors, NEAREST, but_itself=True))

    def scores(self, answers):
        return {"Spearman": times(100, spearman(answers.cosines, self.wanted))}

    def flips(self, answers, original):
        return share_changed(answers.neighbours, original.neighbours)


class Translation(Task):
    """The translation of a text, with the search that the model's generation config asks for, without sampling."""

    COLUMNS = (("source", "target"),)
    PACKAGES = ("sacrebleu",)
    FLIPS = "translations that differ"

    def check(self, model, tokenizer):
        if not (model.config.is_encoder_decoder and model.can_generate()):
            raise UnsupportedModelError(
                f"{type(model).__name__} does not translate: give an encoder-decoder with a head"
            )

    def answers(self, model, tokenizer):
        found = [""] * len(self)
        for group, batch in self.batches(model, tokenizer, self.columns[0]):
            inputs = {name: value for name, value in batch.items() if name != "token_type_ids"}
            (texts,) = translations(model, tokenizer, [inputs], most_tokens(model, inputs) - 1)  # without the start
            for row, text in zip(group, texts, strict=True):
                found[row] = text
        return found

    def scores(self, answers):
        from sacrebleu.metrics import BLEU, CHRF

        metrics: Mapping[str, Any] = {"BLEU": BLEU(force=True), "chrF": CHRF()}
        return {name: of_translations(metric, answers, self.columns[1]) for name, metric in metrics.items()}

    def flips(self, answers, original):
        return float(np.mean([own != other for own, other in zip(answers, original, strict=True)]))


class Read(NamedTuple):
    """The tokens of each text but the first, with their losses in nats and what the model finds most probable there."""

    tokens: list[np.ndarray]
    losses: list[np.ndarray]
    chosen: list[np.ndarray]


class Perplexity(Task):
    """How well a language model predicts the tokens of texts, the first of each text left out."""

    COLUMNS = (("text",), ("sentence",))
    SIGN = -1
    FLIPS = "tokens for which the most probable token differs"

    def check(self, model, tokenizer):
        if not is_lone_decoder(model.config) or not model.can_generate():
            raise UnsupportedModelError(
                f"{type(model).__name__} is no language model with a head: give one that generates"
            )

    def answers(self, model, tokenizer):
        found = Read(*([np.zeros(0)] * len(self) for _ in Read._fields))
        for group, batch in self.batches(model, tokenizer, self.columns[0]):
            ids, mask = batch["input_ids"], batch["attention_mask"]
            logits, ids, mask = model(input_ids=ids, attention_mask=mask).logits[:, :-1], ids[:, 1:], mask[:, 1:].bool()
            losses = torch.nn.functional.cross_entropy(logits.float().mT, ids, reduction="none")  # [B, T - 1]
            for name, values in zip(Read._fields, (ids, losses, logits.argmax(-1)), strict=True):
                for row, each, counts in zip(group, values, mask, strict=True):
                    getattr(found, name)[row] = each[counts].cpu().numpy()
        return found

    def scores(self, answers):
        sums = np.array([[each.sum(dtype=np.float64), len(each)] for each in answers.losses])
        if not sums[:, 1].any():
            raise DataError(f"{self.where}: no text has a second token, which could be predicted: give longer ones")
        return {"perplexity": of_sums(sums, lambda totals: np.exp(totals[:, 0] / np.maximum(totals[:, 1], 1)))}

    def flips(self, answers, original):
        if not all(map(np.array_equal, answers.tokens, original.tokens)):
            raise ArgumentError(
                "the tokenizers of the models divide the texts into other tokens: perplexities can be compared for the "
                "same tokens alone"
            )
        return float((np.concatenate(answers.chosen) != np.concatenate(original.chosen)).mean())


class Retrieval(Task):
    """Which of all passages of the data a query finds; each row is a query with a passage that answers it.

    Several rows may have one query. A row without a query is a passage that answers none.
    """

    COLUMNS = (("query", "passage"),)
    TEXTS = slice(1, 2)
    FLIPS = "the ten nearest passages of each query that change"

    def __init__(self, columns: Sequence[Sequence[str]], where: str, limits: Limits):
        super().__init__(columns, where, limits)
        place = {passage: index for index, passage in enumerate(dict.fromkeys(self.columns[1]))}
        self.passages, self.wanted = list(place), dict[str, set[int]]()
        for query, passage in zip(*self.columns, strict=True):
            if query.strip():
                self.wanted.setdefault(query, set()).add(place[passage])
        if not self.wanted:
            raise DataError(f"{where}: no row has a query")

    def __len__(self) -> int:
        return len(self.wanted)

    def first(self, count):
        """Return the first queries, among their own passages."""
        rows = [row for row in zip(*self.columns, strict=True) if row[0].strip()][:count]
        return type(self)(list(zip(*rows, strict=True)), self.where, self.limits)

    def check(self, model, tokenizer):
        check_embeds(model)

    def answers(self, model, tokenizer):
        queries = self.embedded(model, tokenizer, list(self.wanted), "query")
        passages = self.embedded(model, tokenizer, self.passages, "document", "passage", "corpus")
        return nearest(queries, passages, NEAREST)

    def scores(self, answers):
        discounts = 1 / np.log2(np.arange(NEAREST) + 2)
        gains, recalls = np.zeros(len(self)), np.zeros(len(self))
        for row, (found, wanted) in enumerate(zip(answers.tolist(), self.wanted.values(), strict=True)):
            hits = np.array([passage in wanted for passage in found])
            gains[row] = (hits * discounts[: len(hits)]).sum() / discounts[: len(wanted)].sum()
            recalls[row] = hits.sum() / len(wanted)
        return {"nDCG@10": times(100, mean_of(gains)), "recall@10": times(100, mean_of(recalls))}

    def flips(self, answers, original):
        return share_changed(answers, original)


class OwnFunction(Task):
    """A function of the user's, which returns a number per example.

    Args:
        function: takes a model and its tokenizer; called several times for each model.
    """

    FLIPS = "examples whose number differs"
    ROUNDS = 1

    def __init__(self, function: Callable[[Any, Any], Any]):
        self.function = function

    @property
    def name(self):
        """The name of the function."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    def first(self, count):
        """Return the task itself: only the function knows its examples."""
        return self

    def answers(self, model, tokenizer):
        found = self.function(model, tokenizer)
        try:
            values = np.asarray(found, dtype=np.float64)
        except (TypeError, ValueError):
            values = np.zeros(0)
        if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
            raise ArgumentError(f"{self.name} must return a list with a number per example, not {found!r:.80}")
        return values

    def count(self, answers):
        """Return how many numbers there are."""
        return len(answers)

    def scores(self, answers):
        return {"mean": mean_of(answers)}

    def flips(self, answers, original):
        if len(answers) != len(original):
            raise ArgumentError(f"{self.name} returned {len(answers)} numbers, and {len(original)} for the original")
        return float((answers != original).mean())


TASKS: dict[EvaluationTask, type[Task]] = {
    "similarity": Similarity,
    "classification": Classification,
    "regression": Regression,
    "translation": Translation,
    "perplexity": Perplexity,
    "retrieval": Retrieval,
}
