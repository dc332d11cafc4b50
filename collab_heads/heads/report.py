"""Reports on the heads of a model, per site: for people (`str`) and for machines (`to_dict`)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from collab_heads.base.report import Cell, Report, cache_column, change, loss_in_words


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
class GateReport(Report):
    """The gates of a model.

    Attributes:
        sites: the sites with gates, in model order.
    """

    TOTALS = ("heads", "open", "expected_open", "decided")
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

    def columns(self) -> dict[str, Cell]:
        return {
            "site": "{.path}",
            "role": "{.role}",
            "open": lambda site: f"{len(site.open)}/{site.heads}",
            "expected": "{.expected_open:.1f}",
            "decided": "{.decided}",
            "heads": lambda site: listed(site.open),
        }

    def closing(self) -> str:
        return f"{self.open} of {self.heads} heads open, {self.expected_open:.1f} expected in training"


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
class AlphaReport(Report):
    """The alphas of a model.

    Attributes:
        sites: the sites with alphas, in model order.
    """

    sites: tuple[MixedSite, ...]

    def columns(self) -> dict[str, Cell]:
        return {
            "site": "{.path}",
            "role": "{.role}",
            "heads": "{.heads}",
            "nuclear norm": "{.nuclear_norm:.4f}",
            "from identity": "{.distance:.4f}",
        }

    def closing(self) -> str:
        return f"{len(self.sites)} sites mix their heads"


@dataclass(frozen=True)
class PrunedSite:
    """The effect of pruning on one site.

    Attributes:
        path, role: the site.
        heads_before, heads_after: number of heads.
        kept: the original numbers of the heads that are left.
        parameters_before, parameters_after: parameters of all four projections.
        cache_before, cache_after: elements cached per token; 0 in encoders.
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
class PruneReport(Report):
    """The result of `prune_heads`.

    Attributes:
        sites: one entry per site that lost heads or gates, in model order.
        model_parameters_before, model_parameters_after: of the whole model.
    """

    TOTALS = ("removed",)
    sites: tuple[PrunedSite, ...]
    model_parameters_before: int
    model_parameters_after: int

    @property
    def removed(self) -> int:
        """The number of heads removed."""
        return sum(site.heads_before - site.heads_after for site in self.sites)

    @property
    def lost(self) -> float | None:
        """The mean of `share_lost` over the sites; None without calibration."""
        shares = [site.share_lost for site in self.sites if site.share_lost is not None]
        return sum(shares) / len(shares) if shares else None

    def columns(self) -> dict[str, Cell]:
        return {
            "site": "{.path}",
            "role": "{.role}",
            "heads": "{0.heads_before} -> {0.heads_after}",
            "parameters": "{0.parameters_before:,} -> {0.parameters_after:,}",
            **cache_column(self.sites),
            "kept": lambda site: listed(site.kept),
        }

    def closing(self) -> str:
        refitted = "" if self.lost is None else f"; W_O refitted: {self.lost:.1%} of what sites add is lost on average"
        parameters = change(self.model_parameters_before, self.model_parameters_after)
        return f"{self.removed} heads removed; model parameters {parameters}{refitted}"

    def remarks(self) -> list[str]:
        return [loss_in_words(self.lost or 0.0)]


@dataclass(frozen=True)
class FoldReport(Report):
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

    def lines(self) -> list[str]:
        zeros = sum(map(len, self.restored.values()))
        narrow = "" if self.head_width is None else f"heads of width {self.head_width} stay; "
        narrow += f"{sum(self.neurons.values()):,} removed neurons, too; " if self.neurons else ""
        narrow += "" if self.head_count is None else f"every layer has {self.head_count} heads now; "
        counts = sorted({*self.neuron_counts.values()})
        narrow += f"feed-forward blocks have {' or '.join(map(str, counts))} neurons now; " if counts else ""
        return [
            f"gates of {len(self.gates)} sites and alphas of {len(self.alphas)} folded into W_O, "
            f"{zeros} removed heads restored as zeros; {narrow}"
            f"model parameters {self.model_parameters_before:,} -> {self.model_parameters_after:,}: "
            "plain transformers loads it"
        ]


def listed(heads: Sequence[int]) -> str:
    return " ".join(map(str, heads)) or "none"
