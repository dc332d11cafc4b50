"""The tasks of `evaluate` for models with a head for whole texts: classes, and numbers such as cross-encoders give."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedModel

from collab_heads.contract.registry import is_lone_decoder
from collab_heads.data.batches import padding_of
from collab_heads.errors import DataError, UnsupportedModelError
from collab_heads.evaluation.scores import class_scores, pearson, share_reordered, spearman, times
from collab_heads.evaluation.task import Limits, Task


def classifies(model: PreTrainedModel) -> bool:
    """Return True for a model with a head for whole texts."""
    return type(model).__name__.endswith("ForSequenceClassification")


def gives_numbers(model: PreTrainedModel) -> bool:
    """Return True for a model whose head gives a single number, such as a cross-encoder."""
    return classifies(model) and model.config.num_labels == 1


def check_last_token(model: PreTrainedModel, limits: Limits) -> None:
    """Raise UnsupportedModelError if a decoder cannot find the last token of a text, which its head reads."""
    if is_lone_decoder(model.config) and padding_of(model.config) is None and limits.batch_size > 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} finds the last token of a text by its config.pad_token_id, which is None: set it "
            "to the tokenizer's, or pass batch_size=1"
        )


class Classified(NamedTuple):
    """The numbers of the right class and of the predicted one, [N] each, and the names of all classes."""

    references: np.ndarray
    predictions: np.ndarray
    names: np.ndarray


class Classification(Task):
    """The class of a text, or of a pair of texts; a label is the name or the number of a class of the model."""

    COLUMNS = ("sentence", "label"), ("text", "label"), ("sentence1", "sentence2", "label")
    TEXTS = slice(-1)
    FLIPS = "answers that differ"

    def check(self, model, tokenizer):
        if not classifies(model) or model.config.num_labels < 2:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no head for classes of texts: give one that classifies"
            )
        check_last_token(model, self.limits)
        self.references(model)

    def references(self, model: PreTrainedModel) -> np.ndarray:
        """Return the number that each label has in a model, [N]."""
        classes = {str(name): int(number) for number, name in (model.config.id2label or {}).items()}
        numbers = {str(number): number for number in classes.values()}
        numbers |= {name.lower(): number for name, number in classes.items()} | classes
        found = [numbers.get(label, numbers.get(label.lower())) for label in self.columns[-1]]
        if None in found:
            row, known = found.index(None), ", ".join(f"{name} ({number})" for name, number in classes.items())
            raise DataError(
                f"{self.where}, example {row + 1}: the model has no label {self.columns[-1][row]!r:.80}; it has "
                f"{known:.300}"
            )
        return np.array(found)

    def answers(self, model, tokenizer):
        found = np.zeros(len(self), dtype=int)
        for group, batch in self.batches(model, tokenizer, *self.columns[:-1]):
            found[group] = model(**batch).logits.argmax(-1).cpu().numpy()
        classes = {int(number): str(name) for number, name in (model.config.id2label or {}).items()}
        names = np.array([classes[number] for number in sorted(classes)])
        return Classified(self.references(model), found, names)

    def scores(self, answers):
        scores = class_scores(answers.references, answers.predictions, len(answers.names))
        return {name: times(100, score) for name, score in scores.items()}

    def flips(self, answers, original):
        return float((answers.names[answers.predictions] != original.names[original.predictions]).mean())


class Regression(Task):
    """A number for a text or for a pair of texts, as cross-encoders give it."""

    COLUMNS = tuple(
        (*texts, number)
        for texts in (("sentence1", "sentence2"), ("sentence",), ("text",))
        for number in ("score", "label")
    )
    TEXTS = slice(-1)
    PACKAGES = ("scipy",)
    FLIPS = "the pairs of examples whose order changes"

    def __init__(self, columns: Sequence[Sequence[str]], where: str, limits: Limits):
        super().__init__(columns, where, limits)
        self.wanted = self.numbers(-1)

    def check(self, model, tokenizer):
        if not gives_numbers(model):
            raise UnsupportedModelError(
                f"{type(model).__name__} gives no single number for a text: give one with num_labels=1"
            )
        check_last_token(model, self.limits)

    def answers(self, model, tokenizer):
        found = np.zeros(len(self))
        for group, batch in self.batches(model, tokenizer, *self.columns[:-1]):
            found[group] = model(**batch).logits[:, 0].double().cpu().numpy()
        return found

    def scores(self, answers):
        found = {"Spearman": spearman, "Pearson": pearson}
        return {name: times(100, score(answers, self.wanted)) for name, score in found.items()}

    def flips(self, answers, original):
        return share_reordered(answers, original)
