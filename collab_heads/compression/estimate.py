"""Estimate the time and the memory of a compression from the speed of one forward pass.

The runs are known: each site is measured with a few changes, each by a pass over some held-out examples from its
block on, and is refitted on the examples to fit to. What a fit takes grows with the third power of its width. The
constants were measured on encoders from 256 to 1,024 wide.

Shapes: D width of the model, n of what a last projection reads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from collab_heads.base.estimates import Estimate
from collab_heads.base.numerics import ONE_THREAD
from collab_heads.compression.choosing import choose_sites
from collab_heads.compression.fitting import FEWEST as FEWEST_PORTIONS
from collab_heads.compression.fitting import MOST_TOKENS, TOKENS
from collab_heads.compression.measurements import FEWEST, HELD_OUT, MEASURED, PROBED
from collab_heads.compression.options import PlanOptions
from collab_heads.compression.parts.table import PARTS
from collab_heads.compression.sensitivities import REFINED_SITES
from collab_heads.fitting.forecast import FLOAT32, FitForecast
from collab_heads.layers.layout import widths
from collab_heads.model.open_layers import OpenLayers, OpenLayerSite, OpenSite
from collab_heads.running.portions import PORTION
from collab_heads.running.speed import Speed, measure_speed

PROBE, REFIT = 0.66, 3.7  # passes over the model, of a probe that begins at a block, and of all refits together
# products of the fits of a site: of attention by D^3 and D^2, of a block by n^3 and n^2; seconds besides
ATTENTION, BLOCK, BESIDE = (225, 54_000), (8, 7_200), 0.1


def estimate_compression(
    layers: OpenLayers, batches: Sequence[Mapping], options: PlanOptions, *, fits: bool
) -> Estimate | None:
    """Estimate what a plan, and the fits of one budget, will take; None where they do what no constant here describes.

    Args:
        layers: the layers of the model.
        batches: input dicts as the model takes them, with what a decoder reads.
        options: the options of the plan.
        fits: whether one budget is fitted after the plan.

    Raises:
        CollabHeadsError: if the options name what the model does not have.
    """
    if options.has_bits or options.of == "time" or layers.model.device.type != "cpu":
        return None
    sites = choose_sites(layers, options.sites, options.counted_parts)
    if (speed := measure_speed(layers.model, batches)) is None:
        return None
    forecast = Forecast(layers.model, sites, options, speed)
    seconds = forecast.plan() + (forecast.fits() if fits else 0.0)
    return Estimate(seconds, forecast.memory(), torch.get_num_threads())


@dataclass(frozen=True)
class Forecast:
    """The seconds and bytes that the parts of a compression take.

    Attributes:
        model: the model.
        sites: those that may change.
        options: the options of the plan.
        speed: of the model on the batches.
    """

    model: PreTrainedModel
    sites: Sequence[OpenLayerSite]
    options: PlanOptions
    speed: Speed

    @property
    def narrowed(self) -> list[OpenSite]:
        """The sites whose queries and keys may become narrower."""
        has_part = "query_key" in self.options.parts
        return [site for site in self.sites if has_part and isinstance(site, OpenSite)]

    @property
    def held_out(self) -> float:
        """The share of the examples that are held out."""
        return 1 / max(HELD_OUT, self.speed.rows / MEASURED)

    @property
    def fitted(self) -> FitForecast:
        """The time and memory of the calibration and the fits."""
        return FitForecast(self.model, self.narrowed, self.sites, self.speed)

    def refinement(self) -> float:
        """Return the seconds in which the queries and keys of a site are refined."""
        return self.fitted.refinement(self.options.refine_steps)

    def plan(self) -> float:
        """Return the seconds of a plan: calibration, and for every site quick fits and probes."""
        speed, refined = self.speed, REFINED_SITES * bool(self.options.refine_steps and self.narrowed)
        probes = refined + sum(
            1 + part.is_steep
            for site in self.sites
            for name, part in PARTS.items()
            if name in self.options.parts and (name == "neurons") != isinstance(site, OpenSite)
        )
        probed = min(self.held_out, max(PROBED / speed.positions, FEWEST / speed.rows))
        passes = 4 * speed.batches / speed.rows + PROBE * probes * probed
        quick = sum(map(self.fit, self.sites)) + refined * self.refinement()
        return self.fitted.calibration() * (1 + self.held_out) + speed.seconds * passes + quick

    def fits(self) -> float:
        """Return the seconds of the fits of a budget, of the refits after them, and of what measures their errors."""
        most = max(min(MOST_TOKENS, TOKENS / len(self.sites)), FEWEST_PORTIONS * PORTION)
        passes = REFIT * min(1.0, most / self.speed.positions) + 4 * self.held_out
        return self.speed.seconds * passes + len(self.narrowed) * self.refinement()

    def fit(self, site: OpenLayerSite) -> float:
        """Return the seconds of all fits of a site but the refinement: those of the plan, and those of a budget."""
        if isinstance(site, OpenSite):
            (cube, square), width, beside = ATTENTION, widths(site.output)[1], BESIDE
        else:
            (cube, square), width, beside = BLOCK, widths(site.output)[0], 0.0
        product = self.speed.product if widths(site.output)[0] > ONE_THREAD else self.speed.product_alone
        return beside + product * (cube * width**3 + square * width**2)

    def memory(self) -> float:
        """Return the bytes at the peak, beyond those that are held now."""
        fitted = sum(parameter.nbytes for site in self.sites for parameter in parameters_of(site)) / 2
        has_logits = self.model.get_output_embeddings() is not None
        outputs = self.model.config.get_text_config().vocab_size if has_logits else self.fitted.width(1)
        kept = FLOAT32 * outputs * (self.held_out * self.speed.positions + PORTION)
        return self.fitted.memory() + fitted + 2 * self.fitted.states * self.speed.rows + kept


def parameters_of(site: OpenLayerSite) -> set[torch.nn.Parameter]:
    """Return the parameters of a site."""
    return {parameter for module in site.modules for parameter in module.parameters()}
