"""Compare contributions: of several models, of one model over its training, or after several kinds of prefixes."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from collab_heads.analysis.measures.passes import check_exclude
from collab_heads.analysis.measures.sentences import Sentences
from collab_heads.analysis.relevance.contribution_curve import difference_and_error, draw_curves, draw_history
from collab_heads.analysis.relevance.contribution_results import (
    PER_TOKEN,
    VERSION,
    Contribution,
    TokenContributions,
    none_for_nan,
)
from collab_heads.analysis.relevance.contributions import token_contributions
from collab_heads.analysis.relevance.prefixes import check_prefixes
from collab_heads.base.arguments import checking_arguments
from collab_heads.base.checks import check_choice
from collab_heads.base.option_values import PrefixKind
from collab_heads.base.progress import progress_bar
from collab_heads.base.report import Report, portable_name, text_table
from collab_heads.errors import ArgumentError
from collab_heads.files.reading import read_document, write_document
from collab_heads.saving.loading import load_or_explain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Model = PreTrainedModel | str | Path
SMALLEST = 1e-9  # smallest share of a token in a divergence, which a share of 0 would make infinite


@dataclass(frozen=True, eq=False)
class ContributionComparison(Report):
    """The result of `compare_contributions`.

    Attributes:
        runs: name of the model and its contributions, in the order in which models and prefixes were given.
        divergence: name of the model -> how far its contributions are from those of the last model, in nats: the
            Kullback-Leibler divergence from the last model's to its own after reference prefixes, averaged over tokens.
            Empty for one model, and without reference prefixes.
    """

    runs: tuple[tuple[str, TokenContributions], ...]
    divergence: Mapping[str, float] = field(default_factory=dict)

    def labels(self) -> list[str]:
        """Return a label per run that tells the runs apart: model, prefixes, or both."""
        models = len({name for name, _ in self.runs})
        kinds = len({run.prefixes for _, run in self.runs})
        return [
            ", ".join([name] * (models > 1 or kinds == 1) + [f"{run.prefixes} prefixes"] * (kinds > 1))
            for name, run in self.runs
        ]

    def models(self) -> list[str]:
        """Return the names of the models, in their order."""
        return list(dict.fromkeys(name for name, _ in self.runs))

    def steps(self) -> list[int] | None:
        """Return the last number in the name of each model, such as the step of a checkpoint.

        None unless every name has one and they increase.
        """
        found = [re.search(r"(\d+)\D*$", name) for name in self.models()]
        steps = [int(each[1]) for each in found if each]
        increase = all(earlier < later for earlier, later in pairwise(steps))
        return steps if len(steps) == len(found) and increase else None

    def over_models(self, measure: Contribution, prefixes: PrefixKind | None = None) -> list[tuple[float, float]]:
        """Return the mean of a measure and its standard error, for every model.

        If the models are checkpoints, this is the measure over the training.

        Args:
            measure: "source", "source_entropy" or "target_entropy".
            prefixes: the kind of prefixes; None for the first kind that was measured.

        Raises:
            ArgumentError: on another measure, or prefixes that were not measured.
        """
        kinds = [run.prefixes for _, run in self.runs]
        prefixes = prefixes or kinds[0]
        check_choice("prefixes", prefixes, kinds)
        return [run.average(measure) for _, run in self.runs if run.prefixes == prefixes]

    def difference(self, index: int, measure: Contribution = "source") -> tuple[float, float]:
        """Return the mean of a run less that of the first run, and the standard error of the difference.

        The sentences of both are the same, so the error is that of paired differences.

        Args:
            index: the place of the run in `runs`.
            measure: "source", "source_entropy" or "target_entropy".

        Raises:
            ArgumentError: on a measure that is not per generated token.
        """
        check_choice("measure", measure, PER_TOKEN)
        return difference_and_error(self.runs[index][1].rows(measure), self.runs[0][1].rows(measure))

    def without_relevance(self) -> "ContributionComparison":
        """Return the same without the relevance of every token to every token."""
        return replace(self, runs=tuple((name, run.without_relevance()) for name, run in self.runs))

    def plot(self, parts: int | None = None, *, title: str | None = None) -> "Figure":
        """Draw the curves of all runs, see `TokenContributions.plot`.

        Args:
            parts: number of parts of a sentence; None uses positions.
            title: a title for the figure.
        """
        runs = dict(zip(self.labels(), (run.curves(parts) for _, run in self.runs), strict=True))
        return draw_curves(runs, self.runs[0][1].names, parts is not None, title)

    def plot_history(self, *, title: str | None = None) -> "Figure":
        """Draw the means over a training, a point per checkpoint, and the divergence from the last checkpoint.

        The horizontal axis shows the numbers in the names of the models, or else the names.

        Args:
            title: a title for the figure.

        Raises:
            ArgumentError: if there are fewer than two models.
            MissingPackageError: if matplotlib is not installed.
        """
        names, steps = self.models(), self.steps()
        if len(names) < 2:
            raise ArgumentError(f"a history needs two checkpoints or more; this compares {len(names)}")
        kinds = dict.fromkeys(run.prefixes for _, run in self.runs)
        means = {measure: {kind: self.over_models(measure, kind) for kind in kinds} for measure in PER_TOKEN}
        far = [self.divergence.get(name, math.nan) for name in names]
        return draw_history(steps or names, means, far, self.runs[0][1].names, title)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the header and the rows of a table with a row per run."""
        names = self.runs[0][1].names
        more = ["divergence"] * bool(self.divergence)
        header = ["model", "prefixes", "tokens", f"share of the {names[0]}", "less the first"]
        header += [*(f"entropy of the {name}" for name in names), *more]
        rows = []
        for index, (name, run) in enumerate(self.runs):
            row = [name, run.prefixes, str(run.tokens), with_error(*run.average("source"))]
            row.append(with_error(*self.difference(index), sign=True) if index else "")
            row += [with_error(*run.average(measure)) for measure in PER_TOKEN[1:]]
            far = self.divergence.get(name) if run.prefixes == "reference" else None
            rows.append(row + ["" if far is None else f"{far:.4f}"] * bool(self.divergence))
        return header, rows

    def lines(self) -> list[str]:
        return [text_table(*self.table(), "means over generated tokens, \u00b1 the standard error over sentences")]

    def to_dict(self) -> dict:
        """Return all numbers, ready for JSON."""
        differences = [
            {measure: [none_for_nan(each) for each in self.difference(index, measure)] for measure in PER_TOKEN}
            for index in range(len(self.runs))
        ]
        runs = [
            {"name": name, "less the first": difference, "contributions": run.to_dict()}
            for (name, run), difference in zip(self.runs, differences, strict=True)
        ]
        return {"version": VERSION, "divergence": dict(self.divergence), "runs": runs}

    def save(self, path: str | Path) -> Path:
        """Write a JSON file; it replaces an existing one only when complete.

        Args:
            path: of the file; its folder is made where it is missing.
        """
        return write_document(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> "ContributionComparison":
        """Read a file that `save` wrote.

        Args:
            path: of the file.

        Raises:
            DataError: if the file is missing, damaged or of another version.
        """
        return read_document(path, VERSION, "comparison of contributions", cls._from_dict)

    @classmethod
    def _from_dict(cls, stored: Any) -> "ContributionComparison":
        runs = tuple((each["name"], TokenContributions.from_dict(each["contributions"])) for each in stored["runs"])
        return cls(runs, stored["divergence"])


@checking_arguments
def compare_contributions(
    models: Mapping[str, Model] | Sequence[str | Path],
    batches: Iterable[Mapping],
    *,
    prefixes: PrefixKind | Sequence[PrefixKind] = "reference",
    exclude: Iterable[int] | None = None,
    num_beams: int = 1,
    seed: int = 0,
    keep_relevance: bool = False,
) -> ContributionComparison:
    """Measure `token_contributions` of several models, or of the checkpoints of a training, on the same sentences.

    A model with exposure bias continues its prefix whatever the source is. To see this, compare the share of the source
    after random prefixes, and after the model's own, between models that were trained with and without minimum risk or
    word dropout. Over a training, the divergence shows when the contributions reach their final values:

        compare_contributions(sorted(Path("out").glob("step_*"), key=...), batches)

    Args:
        models: name -> a model or a folder; or folders alone, such as checkpoints in order, which are named after
            themselves. A folder is loaded when its turn comes, and held only then.
        batches: as `token_contributions` takes them, in a list or another object that can be read again.
        prefixes: one kind or several: "reference", "own" (those of each model), "random".
        exclude: as in `token_contributions`; so are `num_beams`, `seed` and `keep_relevance`.
        num_beams: number of beams with which models generate their own prefixes.
        seed: seed of the random prefixes, which are the same for all models.
        keep_relevance: also keep the relevance of every token to every generated token.

    Returns:
        The comparison; `print` it.

    Raises:
        ArgumentError: if there are no models, a folder holds none, two have the same name, prefixes are unknown, or the
            batches can be read only once.
        CollabHeadsError: all errors of `token_contributions`.

    Source: Voita, Sennrich, Titov 2021, arXiv:2010.10907, sections 5 and 7.
    """
    named = named_models(models)
    check_vocabularies(named)
    kinds = check_prefixes(prefixes)
    sentences, excluded = Sentences(batches), None if exclude is None else check_exclude(exclude)
    diverges = len(named) > 1 and "reference" in kinds
    runs: list[tuple[str, TokenContributions]] = []
    for name, model in progress_bar(named.items(), desc="measuring contributions"):
        loaded = model if isinstance(model, PreTrainedModel) else load(model)
        for kind in progress_bar(kinds, desc="measuring contributions"):
            run = token_contributions(
                loaded,
                sentences,
                prefixes=kind,
                exclude=excluded,
                num_beams=num_beams,
                seed=seed,
                keep_relevance=keep_relevance or (diverges and kind == "reference"),
            )
            runs.append((name, run))
    references = {name: run for name, run in runs if run.prefixes == "reference"} if diverges else {}
    last = list(references.values())[-1] if references else None
    far = {name: divergence(last, run) for name, run in references.items()} if last is not None else {}
    whole = ContributionComparison(tuple(runs), far)
    return whole if keep_relevance else whole.without_relevance()


def named_models(models: Mapping[str, Model] | Sequence[str | Path]) -> dict[str, Model]:
    """Return name -> model; raise ArgumentError if there are none, or two have the same name."""
    pairs = list(models.items()) if isinstance(models, Mapping) else [(Path(each).name, each) for each in models]
    if not pairs:
        raise ArgumentError("there are no models to compare")
    if not isinstance(models, Mapping) and len({name for name, _ in pairs}) < len(pairs):
        pairs = [(portable_name(str(each)), each) for each in models]
    named = dict(pairs)
    if len(named) < len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise ArgumentError(f"two models are called {double!r}: give a dict with names that differ")
    return named


def check_vocabularies(models: Mapping[str, Model]) -> None:
    """Raise ArgumentError unless all models have as many tokens: they read the same ids. No weights are loaded."""
    sizes: dict[str, int] = {}
    for name, model in models.items() if len(models) > 1 else ():
        config = model.config if isinstance(model, PreTrainedModel) else load_or_explain(AutoConfig, model)
        sizes[name] = config.get_text_config().vocab_size
        first, size = next(iter(sizes.items()))
        if sizes[name] != size:
            raise ArgumentError(
                f"{first} has {size:,} tokens, and {name} {sizes[name]:,}: models are compared on the same ids, so "
                "they must share a vocabulary"
            )


def load(folder: str | Path) -> PreTrainedModel:
    """Load a translation or language model in float32, from a folder or a name on the Hub."""
    config = load_or_explain(AutoConfig, folder)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return load_or_explain(auto, folder, dtype=torch.float32).eval()


def divergence(last: TokenContributions, other: TokenContributions) -> float:
    """Return the Kullback-Leibler divergence from one model's contributions to another's, averaged over tokens."""
    total = 0.0
    for one, two in zip(last.sentences, other.sentences, strict=True):
        if one.relevance is None or two.relevance is None:
            raise ArgumentError("divergence needs contributions that were measured with keep_relevance=True")
        p, q = (torch.cat(each.relevance.contributions(), dim=1) for each in (one, two) if each.relevance)
        total += float(torch.special.xlogy(p, p.clamp(min=SMALLEST) / q.clamp(min=SMALLEST)).sum())
    return total / last.tokens


def with_error(mean: float, error: float, sign: bool = False) -> str:
    return f"{mean:{'+' if sign else ''}.3f}" + ("" if none_for_nan(error) is None else f" \u00b1 {error:.3f}")
