"""The result of `token_contributions`: for people (`str`), for machines (`to_dict`), as curves, as a file."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from collab_heads.analysis.relevance.contribution_curve import Curve, draw_curves, mean_and_error, mean_curve
from collab_heads.analysis.relevance.sentence_contributions import SentenceContributions
from collab_heads.analysis.relevance.sides import SourceAndTarget
from collab_heads.base.checks import check_choice
from collab_heads.base.option_values import PrefixKind
from collab_heads.base.report import Report, plain, text_table
from collab_heads.errors import ArgumentError
from collab_heads.files.reading import read_document, write_document

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERSION = 1
PARTS = 10  # of a sentence, in JSON and pictures

Contribution = Literal["source", "source_entropy", "target_entropy", "influence"]
CONTRIBUTIONS: tuple[Contribution, ...] = get_args(Contribution)
PER_TOKEN: tuple[Contribution, ...] = CONTRIBUTIONS[:3]  # a number per generated token; influence: per source token


@dataclass(frozen=True, eq=False)
class ContributionExample:
    """The contributions of one sentence, with its tokens.

    Attributes:
        source: [P, S], contributions of the source tokens to the generated ones.
        target: [P, T], those of the target prefix.
        source_tokens: [S], as text, like the other tokens.
        target_tokens: [T].
        said: [P], the generated tokens.
        names: the names of the two sides.
    """

    source: Tensor
    target: Tensor
    source_tokens: tuple[str, ...]
    target_tokens: tuple[str, ...]
    said: tuple[str, ...]
    names: tuple[str, str]


@dataclass(frozen=True, eq=False)
class TokenContributions(Report):
    """The result of `token_contributions`.

    Attributes:
        sentences: the contributions of the tokens of each sentence, in the order of the batches.
        excluded: ids of the tokens that did not count as positions.
        names: the names of the two sides: "source" and "target prefix", or "prompt" and "continuation".
        prefixes: what the decoder read: "reference", "own" or "random".
    """

    sentences: tuple[SentenceContributions, ...]
    excluded: tuple[int, ...]
    names: tuple[str, str] = SourceAndTarget.names
    prefixes: PrefixKind = "reference"

    @property
    def source(self) -> Tensor:
        """The mean share of the source at every position, [P]; the rest is the share of the target prefix."""
        return self.curve("source").mean

    @property
    def counts(self) -> Tensor:
        """The number of sentences that have the position, [P]."""
        return self.curve("source").counts

    @property
    def mean(self) -> float:
        """The mean share of the source over all generated tokens."""
        return self.average("source")[0]

    @property
    def tokens(self) -> int:
        """The number of generated tokens that were explained."""
        return sum(len(sentence.source) for sentence in self.sentences)

    def average(self, measure: Contribution) -> tuple[float, float]:
        """Return the mean over all generated tokens and its standard error over sentences (NaN for one sentence).

        Args:
            measure: "source", "source_entropy" or "target_entropy".

        Raises:
            ArgumentError: on a measure that is not per generated token.
        """
        check_choice("measure", measure, PER_TOKEN)
        return mean_and_error(self.rows(measure))

    def curve(self, measure: Contribution = "source", parts: int | None = None) -> Curve:
        """Return a measure by position: the mean over sentences, which count alike, with its standard error.

        Args:
            measure: "source", "source_entropy" or "target_entropy", by the position of the generated token; or
                "influence", by that of the source token.
            parts: number of parts of a sentence, to compare sentences of all lengths; None uses positions. Late
                positions are those of long sentences only: see `of_length`.

        Raises:
            ArgumentError: on an unknown measure, or if `parts` is below 1.
        """
        check_choice("measure", measure, CONTRIBUTIONS)
        return mean_curve(self.rows(measure), parts)

    def rows(self, measure: Contribution) -> list[Tensor]:
        """Return the numbers of every sentence.

        Args:
            measure: see `curve`.
        """
        return [getattr(sentence, measure) for sentence in self.sentences]

    def of_length(self, tokens: int, source: int | None = None) -> "TokenContributions":
        """Keep only the sentences of one length, as the paper compares them.

        Args:
            tokens: number of generated tokens.
            source: number of source tokens; None for any number.

        Raises:
            ArgumentError: if there is no such sentence.
        """
        kept = [
            sentence
            for sentence in self.sentences
            if len(sentence.source) == tokens and source in (None, len(sentence.influence))
        ]
        if not kept:
            known = sorted({len(sentence.source) for sentence in self.sentences})
            raise ArgumentError(
                f"no sentence of {tokens} generated tokens{'' if source is None else f' and {source} source tokens'}; "
                f"there are sentences of {', '.join(map(str, known))}"
            )
        return replace(self, sentences=tuple(kept))

    def typical(self, tokenizer: PreTrainedTokenizerBase | None = None) -> ContributionExample | None:
        """Return the sentence of median length whose relevance was kept, to look at; None if there is none.

        Args:
            tokenizer: turns ids into text; None shows ids.
        """
        kept = [sentence.relevance for sentence in self.sentences if sentence.relevance and len(sentence.source)]
        if not kept:
            return None
        middle = sorted(kept, key=lambda each: len(each.source))[(len(kept) - 1) // 2]
        return ContributionExample(*middle.contributions(), *middle.words(tokenizer), self.names)

    def without_relevance(self) -> "TokenContributions":
        """Return the same without the relevance of every token to every token, which is most of a file."""
        return replace(self, sentences=tuple(replace(sentence, relevance=None) for sentence in self.sentences))

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers, ready for JSON."""
        computed = {
            "version": VERSION,
            "mean": self.mean,
            "averages": {name: [none_for_nan(each) for each in self.average(name)] for name in PER_TOKEN},
            "source": self.source,
            "counts": self.counts,
            "by_position": self.curves(),
            "by_part": self.curves(PARTS),
        }
        return plain(computed) | super().to_dict()

    @classmethod
    def from_dict(cls, stored: dict) -> "TokenContributions":
        """Return the contributions that `to_dict` described.

        Args:
            stored: also after JSON.
        """
        sentences = tuple(SentenceContributions.from_dict(each) for each in stored["sentences"])
        names = cast(tuple[str, str], tuple(stored["names"]))
        return cls(sentences, tuple(stored["excluded"]), names, stored["prefixes"])

    def save(self, path: str | Path) -> Path:
        """Write a JSON file; it replaces an existing one only when complete.

        Args:
            path: of the file; its folder is made where it is missing.
        """
        return write_document(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> "TokenContributions":
        """Read a file that `save` wrote.

        Args:
            path: of the file.

        Raises:
            DataError: if the file is missing, damaged or of another version.
        """
        return read_document(path, VERSION, "record of the contributions of tokens", cls.from_dict)

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, TokenContributions) else NotImplemented

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the header and the rows of a table with a row per position."""
        curves = [self.curve(measure) for measure in PER_TOKEN]
        header = ["position", "sentences", *self.names, *(f"entropy of the {name}" for name in self.names)]
        rows = []
        for position, count in enumerate(curves[0].counts.tolist()):
            share, *entropies = (float(curve.mean[position]) for curve in curves)
            numbers: Sequence[float] = (share, 1 - share, *entropies)
            rows.append([str(position), str(count), *(f"{number:.3f}" for number in numbers)])
        return header, rows

    def lines(self) -> list[str]:
        return [text_table(*self.table(), self.summary())]

    def plot(self, parts: int | None = None, *, title: str | None = None) -> "Figure":
        """Draw curves with 95 % intervals: the share of the source, entropies, the influence of source tokens.

        Args:
            parts: number of parts of a sentence, to compare sentences of all lengths; None uses positions, of which
                only long sentences have the late ones.
            title: a title for the figure.

        Raises:
            ArgumentError: if `parts` is below 1.
            MissingPackageError: if matplotlib is not installed.
        """
        return draw_curves({"": self.curves(parts)}, self.names, parts is not None, title)

    def curves(self, parts: int | None = None) -> dict[str, Curve]:
        """Return every measure by position.

        Args:
            parts: see `curve`.
        """
        return {measure: self.curve(measure, parts) for measure in CONTRIBUTIONS}

    def summary(self) -> str:
        """Return the result in one sentence."""
        (share, _), (source, _), (target, _) = map(self.average, PER_TOKEN)
        said = f"the {self.names[0]} gives {share:.3f} of all {self.tokens} tokens"
        entropies = f"entropy {source:.2f} nats over its tokens, {target:.2f} over those of the {self.names[1]}"
        return f"{said}, {entropies} ({self.prefixes} prefixes)"


def none_for_nan(number: float) -> float | None:
    return None if torch.tensor(number).isnan() else number
