"""Run the calibration batches once, and keep of every site what its fit needs."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.collaborative.input_moments import InputMoments, listening, listening_to_heads
from collab_heads.model.attention_calls import Call, recording_calls
from collab_heads.model.batches import run_batches
from collab_heads.model.open_site import OpenSite
from collab_heads.model.portions import portions


class Calibrations(NamedTuple):
    """What calibration saw of a model.

    Attributes:
        query_key: path -> what the fit of a query/key projection needs.
        heads: path -> moments of what the heads put out, where values are to be narrowed.
    """

    query_key: dict[str, "SiteCalibration"]
    heads: dict[str, InputMoments]


@dataclass(frozen=True)
class SiteCalibration:
    """What calibration saw of one site.

    Attributes:
        query: moments of the query-side inputs.
        key: of the key-side inputs.
        calls: the calls of its module, where they were recorded.
    """

    query: InputMoments
    key: InputMoments
    calls: Sequence[Call] = ()


def calibrate(
    model: PreTrainedModel,
    sites: Sequence[OpenSite],
    recorded: Sequence[OpenSite],
    narrowed: Sequence[OpenSite],
    batches: Iterable[Mapping],
) -> Calibrations:
    """Run calibration batches through an unchanged model, without gradients, in evaluation mode.

    Args:
        model: it is left as it was.
        sites: whose input moments are taken.
        recorded: those of them whose calls are kept, too.
        narrowed: the sites, collaborative or not, of whose heads' outputs moments are taken.
        batches: input dicts as the model takes them; tensors are moved to the model's device. An encoder-decoder needs
            decoder inputs or labels.

    Raises:
        CalibrationError: if there are no batches, the model cannot take one, a mask does not fit, a site saw nothing,
            or its calls cannot be recorded.
        NonFiniteError: if an input of a site contains NaN or inf; the site is named.
    """
    masks: dict[str, Tensor | None] = {}
    cut = functools.partial(portions, is_encoder_decoder=model.config.is_encoder_decoder)
    with (
        listening(sites, masks) as listeners,
        listening_to_heads(narrowed, masks) as head_listeners,
        recording_calls(model, recorded, masks) as recorder,
    ):
        run_batches(model, batches, masks, "calibrating", cut=cut)
    moments = {listener.site.path: listener.moments() for listener in listeners}
    return Calibrations(
        {path: SiteCalibration(*both, recorder.calls_of(path)) for path, both in moments.items()},
        {listener.site.path: listener.moments() for listener in head_listeners},
    )
