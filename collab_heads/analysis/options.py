"""The options of `analyze_heads` as one value, and the choice of parts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_heads.analysis.chosen_sentences import Chosen, check_sentences
from collab_heads.analysis.measures.ablation import Evaluate
from collab_heads.analysis.relevance.contribution_comparison import named_models
from collab_heads.analysis.relevance.prefixes import check_prefixes
from collab_heads.analysis.roles.labels import RoleThresholds
from collab_heads.analysis.roles.treebank import Treebank
from collab_heads.base.checks import check_choice, check_count
from collab_heads.base.option_values import REPORT_PARTS as PARTS
from collab_heads.base.option_values import PrefixKind
from collab_heads.base.option_values import ReportPart as Part
from collab_heads.errors import ArgumentError
from collab_heads.files.conllu import Sentence
from collab_heads.heads.history import GATES, HeadHistory

NO_SOURCE = (
    "only encoder-decoders have a source and a target to tell apart, and decoders a prompt and its continuation, where "
    "labels are -100 for the prompt"
)


@dataclass(frozen=True)
class AnalysisOptions:
    """The options of `analyze_heads`, whose docstring describes them."""

    parts: Part | Iterable[Part] | None
    tokenizer: PreTrainedTokenizerBase | None
    treebank: Treebank | str | Path | Sequence[Sentence] | None
    exclude: Iterable[int] | None
    token_counts: Tensor | None
    thresholds: RoleThresholds | None
    evaluate: Evaluate | None
    metric: str
    higher_is_better: bool
    num_examples: int
    sentences: Iterable[Chosen]
    contribution_sentences: int
    prefixes: PrefixKind | Sequence[PrefixKind]
    compare_with: Mapping[str, PreTrainedModel | str | Path] | Sequence[str | Path]
    gate_history: HeadHistory | None
    data: str

    def __post_init__(self):
        object.__setattr__(self, "parts", check_parts(self.parts))
        check_count("num_examples", self.num_examples)
        object.__setattr__(self, "sentences", check_sentences(self.sentences))
        check_count("contribution_sentences", self.contribution_sentences, least=1)
        check_prefixes(self.prefixes)
        if self.gate_history is not None and not self.gate_history.where(GATES):
            raise ArgumentError(f"gate_history has no {GATES!r} at any step: there is nothing to show of it")
        if self.compare_with:
            named_models(self.compare_with)

    def choose(self, has_labels: bool, has_source: bool) -> tuple[tuple[Part, ...], list[str]]:
        """Return the parts to measure: those requested, or all that model and data allow.

        Returns:
            The parts, and notes for the reader on parts that were left out.
        """
        parts = check_parts(self.parts)
        if parts is not None:
            if "contributions" in parts and not has_source:
                raise ArgumentError(f"part 'contributions': {NO_SOURCE}")
            if "gradient" in parts and not has_labels:
                raise ArgumentError("part 'gradient' is of the loss, and the batches have no labels")
            if "ablation" in parts and not (has_labels or self.evaluate):
                raise ArgumentError(
                    "part 'ablation': the batches have no labels for a loss; pass evaluate (on the command line "
                    "--evaluate with --task)"
                )
            return parts, []
        missing: set[Part] = set() if has_source else {"contributions"}
        notes = []
        if not has_labels:
            missing.add("gradient")
            notes.append("gradient importance was not measured: the batches have no labels")
        if self.evaluate is None:
            missing.add("ablation")
            ways = ["pass evaluate", *["ask for the ablation"] * has_labels]
            flags = ["--evaluate with --task", *["--parts ablation, in a training --analyze_ablation"] * has_labels]
            notes.append(f"heads were not left out: {', or '.join(ways)} (on the command line {' or '.join(flags)})")
        return tuple(part for part in PARTS if part not in missing), notes


def check_parts(parts: Part | Iterable[Part] | None) -> tuple[Part, ...] | None:
    """Return the requested parts, one or several, as a tuple; None stays None."""
    if parts is None:
        return None
    names = (parts,) if isinstance(parts, str) else tuple(parts)
    for part in names:
        check_choice("part", part, PARTS)
    if not names:
        raise ArgumentError(f"parts is empty: name some of {', '.join(PARTS)}")
    return names
