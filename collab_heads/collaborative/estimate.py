"""Estimate the time and the memory of a swap from the speed of one forward pass.

The constants were measured on encoders, decoders and an encoder-decoder from 256 to 768 wide.
"""

from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel

from collab_heads.base.estimates import Estimate
from collab_heads.calibration.calibrate import RECORDED
from collab_heads.collaborative.plan import SitePlan, ValuePlan
from collab_heads.fitting.forecast import FitForecast
from collab_heads.layers.layout import widths
from collab_heads.running.batches import check_batches
from collab_heads.running.speed import measure_speed
from collab_heads.sites.state import DIVIDED

GAP = 0.35  # of a pass: the outputs of the sites on the recorded calls, which the refinement starts from
SHARED = 1.5  # the refinement of a shared projection, in that of separate heads
DECOMPOSED = 500  # products by R D^2 of the decomposition of a shared projection
VALUES = 72  # products by D^3 of narrower values
BALANCED = 1.3  # of the fits: with the errors at a few widths


def estimate_swap(
    model: PreTrainedModel,
    batches: Sequence[Mapping],
    plans: Sequence[SitePlan],
    value_plans: Sequence[ValuePlan],
    refine_steps: int,
    *,
    is_balanced: bool,
) -> Estimate | None:
    """Estimate what a calibrated swap takes; None on GPUs, and for batches that are no texts.

    Args:
        model: the model.
        batches: input dicts as the model takes them.
        plans: those of the query/key projections.
        value_plans: those of narrower values.
        refine_steps: steps of the refinement of a site.
        is_balanced: whether widths are spread over the sites by their errors.

    Raises:
        CalibrationError: if there are no batches, or the model cannot take one.
    """
    if model.device.type != "cpu" or (speed := measure_speed(model, check_batches(batches))) is None:
        return None
    narrowed, written = [plan for plan in plans if not plan.is_exact], [plan.site for plan in value_plans]
    forecast = FitForecast(model, [plan.site for plan in narrowed], written, speed)
    shared, product = [plan for plan in narrowed if plan.kind not in DIVIDED], speed.product_alone
    fits = forecast.refinement(refine_steps) * (len(narrowed) + (SHARED - 1) * len(shared))
    fits += product * DECOMPOSED * sum(plan.dim * widths(plan.site.output)[1] ** 2 for plan in shared)
    recorded = GAP * speed.seconds * min(1.0, RECORDED / speed.rows) * bool(narrowed and refine_steps)
    values = product * VALUES * sum(widths(site.output)[1] ** 3 for site in written)
    seconds = forecast.calibration() + recorded + fits * (BALANCED if is_balanced else 1.0) + values
    return Estimate(seconds, forecast.memory(), torch.get_num_threads())
