"""What a swap did, per site: for people (`str`) and for machines (`to_dict`)."""

import dataclasses
from dataclasses import dataclass

from collab_heads.base.display import text_table
from collab_heads.collaborative.kinds import FITS
from collab_heads.collaborative.widths import HEAD_MULTIPLE
from collab_heads.sites.site import Role
from collab_heads.sites.state import QueryKeyKind


@dataclass(frozen=True)
class SiteReport:
    """One swapped site.

    Attributes:
        path: the site.
        role: "enc-self", "dec-self" or "dec-enc".
        kind: of query/key projection, "shared" or "per_head".
        dim: R, the width of the query/key projection over all heads.
        dim_asked: what was asked for; differs where the kind rounds up.
        dim_exact: H * d_k, the width that needs no approximation.
        relative_error: of the scores on the calibration inputs, or of the weights without calibration.
        sweeps: of alternating least squares; 0 where none were needed.
        output_error_before, output_error: relative error of the site's output on the calibration inputs, before and
            after the refinement; None without one.
        parameters_before, parameters_after: of the query/key projections; where values changed, of the value and output
            projections, too.
        cache_before, cache_after: elements cached per token.
        seconds: to fit the site.
        dim_value: width of the values over all heads; None, as the following, where values are left as they were.
        dim_value_asked: what was asked for; differs where it was rounded up.
        dim_value_exact: H * d_v before.
        variance_lost: share of the variance of the site's output that narrower values lose: predicted from what its
            heads put out on the calibration inputs, with the original attention; without calibration for white inputs.
            Of a site whose W_O has no bias, or that has gates, it is a share of the mean square.
    """

    path: str
    role: Role
    kind: QueryKeyKind
    dim: int
    dim_asked: int
    dim_exact: int
    relative_error: float
    sweeps: int
    output_error_before: float | None
    output_error: float | None
    parameters_before: int
    parameters_after: int
    cache_before: int
    cache_after: int
    seconds: float
    dim_value: int | None = None
    dim_value_asked: int | None = None
    dim_value_exact: int | None = None
    variance_lost: float | None = None


@dataclass(frozen=True)
class SwapReport:
    """What `swap_to_collaborative` did.

    Attributes:
        sites: one report per swapped site, in model order.
        calibrated: whether errors were weighted by calibration moments.
        seconds: in all, calibration included.
        model_parameters_before, model_parameters_after: of the whole model.
    """

    sites: tuple[SiteReport, ...]
    calibrated: bool
    seconds: float
    model_parameters_before: int
    model_parameters_after: int

    def to_dict(self) -> dict:
        """All numbers, ready for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        error = "score error" if self.calibrated else "weight error"
        has_values = any(site.dim_value is not None for site in self.sites)
        header = ["site", "role", "kind", "width", error, "output error", "q/k parameters", "cache/token", "seconds"]
        if has_values:
            header[6:7] = ["values", "variance lost", "parameters"]
        before, after = self.model_parameters_before, self.model_parameters_after
        last = (
            f"model parameters {before:,} -> {after:,} ({after / before - 1:+.1%}), "
            f"{self.seconds:.1f} s{'' if self.calibrated else ', no calibration'}"
        )
        return "\n".join(
            [text_table(header, [table_row(site, has_values) for site in self.sites], last), *self.notes()]
        )

    def notes(self) -> list[str]:
        """What a reader should know: widths that were rounded up, caches that grew."""
        notes = []
        for kind in dict.fromkeys(site.kind for site in self.sites):
            sites = [site for site in self.sites if site.kind == kind]
            if rounded := [site for site in sites if site.dim != site.dim_asked]:
                pairs = ", ".join(sorted({f"{site.dim_asked} to {site.dim}" for site in rounded}))
                notes.append(f"note: {FITS[kind].width_rule}; rounded up: {pairs}")
            if grown := [site for site in sites if site.cache_after > site.cache_before]:
                more = f"{len(grown)} site(s) cache more per token than the original"
                notes.append(f"note: {more}: {FITS[kind].cache_rule}")
        if rounded := [site for site in self.sites if site.dim_value != site.dim_value_asked]:
            pairs = ", ".join(sorted({f"{site.dim_value_asked} to {site.dim_value}" for site in rounded}))
            notes.append(f"note: widths of values are multiples of {HEAD_MULTIPLE} per head; rounded up: {pairs}")
        return notes


def table_row(site: SiteReport, has_values: bool) -> tuple[str, ...]:
    """The cells of one site, with two about its values if asked for."""
    values = ("-", "-")
    if site.dim_value is not None:
        values = (f"{site.dim_value}/{site.dim_value_exact}", f"{site.variance_lost:.4f}")
    return (
        site.path,
        site.role,
        site.kind,
        f"{site.dim}/{site.dim_exact}",
        f"{site.relative_error:.4f}",
        "-" if site.output_error is None else f"{site.output_error_before:.4f} -> {site.output_error:.4f}",
        *(values if has_values else ()),
        f"{site.parameters_before:,} -> {site.parameters_after:,}",
        f"{site.cache_before} -> {site.cache_after}",
        f"{site.seconds:.2f}",
    )
