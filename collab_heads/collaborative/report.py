"""The report of a swap, per site: a table to read (`str`) and numbers to store (`to_dict`)."""

from dataclasses import dataclass

from collab_heads.base.report import Cell, Report, cache_column, change
from collab_heads.fitting.kinds import FITS
from collab_heads.fitting.widths import HEAD_MULTIPLE
from collab_heads.sites.site import Role
from collab_heads.sites.state import QueryKeyKind


@dataclass(frozen=True)
class SiteReport:
    """The report of one swapped site.

    Attributes:
        path: the path of the site.
        role: "enc-self", "dec-self" or "dec-enc".
        kind: the kind of query/key projection: "shared", "per_head" or "rotary".
        dim: R, the width of the query/key projection over all heads.
        dim_asked: the requested width; it differs from `dim` if the kind rounds up.
        dim_exact: H * d_k, the width that needs no approximation.
        relative_error: error of the scores on the calibration inputs, or of the weights without calibration.
        sweeps: sweeps of alternating least squares; 0 if none were needed.
        output_error_before, output_error: relative error of the site's output on the calibration inputs, before and
            after the refinement; None without refinement.
        parameters_before, parameters_after: parameters of the query/key projections; if values changed, including those
            of the value and output projections.
        cache_before, cache_after: elements cached per token; 0 in encoders.
        seconds: time to fit the site.
        dim_value: width of the values over all value heads. It is None if values did not change, and so are all
            attributes below.
        dim_value_asked: the requested width; it differs from `dim_value` if it was rounded up.
        dim_value_exact: the width of the values before.
        variance_lost: share of the variance of the site's output that narrower values lose. It is predicted from the
            outputs of the heads on the calibration inputs with the original attention; without calibration, for white
            inputs. If W_O has no bias or the site has gates, it is a share of the mean square.
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
class SwapReport(Report):
    """The report of `swap_to_collaborative`.

    Attributes:
        sites: one report per swapped site, in model order.
        calibrated: whether errors were weighted by calibration moments.
        seconds: total time, including calibration.
        model_parameters_before, model_parameters_after: parameters of the whole model.
    """

    sites: tuple[SiteReport, ...]
    calibrated: bool
    seconds: float
    model_parameters_before: int
    model_parameters_after: int

    def columns(self) -> dict[str, Cell]:
        has_values = any(site.dim_value is not None for site in self.sites)
        values: dict[str, Cell] = {
            "values": lambda site: "-" if site.dim_value is None else f"{site.dim_value}/{site.dim_value_exact}",
            "variance lost": lambda site: "-" if site.dim_value is None else f"{site.variance_lost:.4f}",
        }
        return {
            "site": "{.path}",
            "role": "{.role}",
            "kind": "{.kind}",
            "width": "{0.dim}/{0.dim_exact}",
            "score error" if self.calibrated else "weight error": "{.relative_error:.4f}",
            "output error": output_error,
            **(values if has_values else {}),
            "parameters" if has_values else "q/k parameters": "{0.parameters_before:,} -> {0.parameters_after:,}",
            **cache_column(self.sites),
            "seconds": "{.seconds:.2f}",
        }

    def closing(self) -> str:
        parameters = change(self.model_parameters_before, self.model_parameters_after)
        return f"model parameters {parameters}, {self.seconds:.1f} s{'' if self.calibrated else ', no calibration'}"

    def remarks(self) -> list[str]:
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


def output_error(site: SiteReport) -> str:
    return "-" if site.output_error is None else f"{site.output_error_before:.4f} -> {site.output_error:.4f}"
