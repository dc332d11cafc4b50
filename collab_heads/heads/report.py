"""Reports on the heads of a model, per site: for people (`str`) and for machines (`to_dict`)."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from collab_heads.base.display import loss_in_words, text_table


@dataclass(frozen=True)
class GatedSite:
    """The gates of one site.

    Attributes:
        path, role: the site.
        heads: number of heads.
        open: the numbers of its open heads, by the rule of evaluation (original numbers).
        expected_open: expected number of non-zero gates in training.
        decided: number of gates whose probability to be non-zero is below 0.05 or above 0.95.
    """

    path: str
    role: str
    heads: int
    open: tuple[int, ...]
    expected_open: float
    decided: int


@dataclass(frozen=True)
class GateReport:
    """The gates of a model.

    Attributes:
        sites: the sites with gates, in model order.
    """

    sites: tuple[GatedSite, ...]

    @property
    def heads(self) -> int:
        """The number of heads at all gated sites."""
        return sum(site.heads for site in self.sites)

    @property
    def open(self) -> int:
        """The number of open heads."""
        return sum(len(site.open) for site in self.sites)

    @property
    def expected_open(self) -> float:
        """The expected number of non-zero gates in training."""
        return sum(site.expected_open for site in self.sites)

    @property
    def decided(self) -> int:
        """The number of gates whose probability to be non-zero is below 0.05 or above 0.95."""
        return sum(site.decided for site in self.sites)

    def to_dict(self) -> dict:
        """Return all numbers, ready for JSON."""
        totals = {"heads": self.heads, "open": self.open, "expected_open": self.expected_open, "decided": self.decided}
        return totals | dataclasses.asdict(self)

    def __str__(self) -> str:
        rows = [
            (s.path, s.role, f"{len(s.open)}/{s.heads}", f"{s.expected_open:.1f}", str(s.decided), listed(s.open))
            for s in self.sites
        ]
        last = f"{self.open} of {self.heads} heads open, {self.expected_open:.1f} expected in training"
        return text_table(("site", "role", "open", "expected", "decided", "heads"), rows, last)


@dataclass(frozen=True)
class MixedSite:
    """The alpha matrix of one site.

    Attributes:
        path, role: the site.
        heads: number of heads that it mixes, H.
        nuclear_norm: sum of its singular values; H for the identity.
        distance: Frobenius norm of its difference to the identity.
    """

    path: str
    role: str
    heads: int
    nuclear_norm: float
    distance: float


@dataclass(frozen=True)
class AlphaReport:
    """The alphas of a model.

    Attributes:
        sites: the sites with alphas, in model order.
    """

    sites: tuple[MixedSite, ...]

    def to_dict(self) -> dict:
        """Return all numbers, ready for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        rows = [(s.path, s.role, str(s.heads), f"{s.nuclear_norm:.4f}", f"{s.distance:.4f}") for s in self.sites]
        last = f"{len(self.sites)} sites mix their heads"
        return text_table(("site", "role", "heads", "nuclear norm", "from identity"), rows, last)


@dataclass(frozen=True)
class PrunedSite:
    """The effect of pruning on one site.

    Attributes:
        path, role: the site.
        heads_before, heads_after: number of heads.
        kept: the original numbers of the heads that are left.
        parameters_before, parameters_after: parameters of all four projections.
        cache_before, cache_after: elements cached per token.
        share_lost: with calibration, the mean squared error of the site's output with the refitted W_O, as a share of
            the mean square of that output; None without.
    """

    path: str
    role: str
    heads_before: int
    heads_after: int
    kept: tuple[int, ...]
    parameters_before: int
    parameters_after: int
    cache_before: int
    cache_after: int
    share_lost: float | None = None


@dataclass(frozen=True)
class PruneReport:
    """The result of `prune_heads`.

    Attributes:
        sites: one entry per site that lost heads or gates, in model order.
        model_parameters_before, model_parameters_after: of the whole model.
    """

    sites: tuple[PrunedSite, ...]
    model_parameters_before: int
    model_parameters_after: int

    @property
    def removed(self) -> int:
        """The number of heads removed."""
        return sum(site.heads_before - site.heads_after for site in self.sites)

    def to_dict(self) -> dict:
        """Return all numbers, ready for JSON."""
        return {"removed": self.removed} | dataclasses.asdict(self)

    def __str__(self) -> str:
        rows = [
            (
                s.path,
                s.role,
                f"{s.heads_before} -> {s.heads_after}",
                f"{s.parameters_before:,} -> {s.parameters_after:,}",
                f"{s.cache_before} -> {s.cache_after}",
                listed(s.kept),
            )
            for s in self.sites
        ]
        before, after = self.model_parameters_before, self.model_parameters_after
        last = f"{self.removed} heads removed; model parameters {before:,} -> {after:,} ({after / before - 1:+.1%})"
        shares = [site.share_lost for site in self.sites if site.share_lost is not None]
        words = ""
        if shares:
            lost = sum(shares) / len(shares)
            last += f"; W_O refitted: {lost:.1%} of what sites add is lost on average"
            words = loss_in_words(lost)
        table = text_table(("site", "role", "heads", "parameters", "cache/token", "kept"), rows, last)
        return "\n".join(filter(None, [table, words]))


@dataclass(frozen=True)
class FoldReport:
    """The result of `fold_heads`.

    Attributes:
        gates: sites whose gates were multiplied into W_O.
        alphas: sites whose alphas were multiplied into W_O.
        restored: path -> removed heads that were restored as zeros.
        model_parameters_before, model_parameters_after: of the whole model.
        head_width: the width of all heads, where narrower heads stayed narrow; None where there were none.
        head_count: the number of heads of every layer, where the config now says fewer than before; else None.
        neurons: path of a feed-forward block -> number of removed neurons that were restored as zeros.
        neuron_counts: path of a feed-forward block -> its number of neurons, where the config now says fewer than
            before.
    """

    gates: tuple[str, ...]
    alphas: tuple[str, ...]
    restored: dict[str, tuple[int, ...]]
    model_parameters_before: int
    model_parameters_after: int
    head_width: int | None = None
    head_count: int | None = None
    neurons: dict[str, int] = field(default_factory=dict)
    neuron_counts: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict:
        """Return all numbers, ready for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        zeros = sum(map(len, self.restored.values()))
        narrow = "" if self.head_width is None else f"heads of width {self.head_width} stay; "
        narrow += f"{sum(self.neurons.values()):,} removed neurons, too; " if self.neurons else ""
        narrow += "" if self.head_count is None else f"every layer has {self.head_count} heads now; "
        counts = sorted({*self.neuron_counts.values()})
        narrow += f"feed-forward blocks have {' or '.join(map(str, counts))} neurons now; " if counts else ""
        return (
            f"gates of {len(self.gates)} sites and alphas of {len(self.alphas)} folded into W_O, "
            f"{zeros} removed heads restored as zeros; {narrow}"
            f"model parameters {self.model_parameters_before:,} -> {self.model_parameters_after:,}: "
            "plain transformers loads it"
        )


def listed(heads: Sequence[int]) -> str:
    """Return head numbers as text, or "none"."""
    return " ".join(map(str, heads)) or "none"
