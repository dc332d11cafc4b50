"""Record what attention computes with, where families hand it over: at transformers' attention interface.

While a model is recorded, its stock modules run under a backend of ours: transformers' own sdpa, which also notes the
mask and the position bias. Where a family has attention of its own (MPNet), its adapter reads them off the arguments of
a call. The inputs of the query and key projections come from hooks. With the weights of the site these are all that its
scores, and so its output, are made of.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from collab_heads.errors import CalibrationError
from collab_heads.model.batches import attention_backend, sides
from collab_heads.model.open_site import OpenSite

BACKEND = "collab_heads_recording"
SAMPLE_BYTES = 512 * 2**20  # of all recorded inputs together; beyond it half of the portions are let go
GOLDEN = 0.6180339887498949  # its multiples, modulo 1, fill the interval evenly and repeat with no period


@dataclass(frozen=True)
class Call:
    """What one call of an attention module computed with.

    Attributes:
        query_inputs: [B, T, D_q].
        key_inputs: [B, S, D_k]; in self-attention the same tensor.
        biases: what is added to the scores, masks included: tensors that broadcast to [B, H, T, S].
        used: [B, T] bool, the query tokens that are no padding; None for all.
        positions: cosines and sines [B or 1, T, d_k] where positions are rotations; else None.
    """

    query_inputs: Tensor
    key_inputs: Tensor
    biases: tuple[Tensor, ...]
    used: Tensor | None
    positions: tuple[Tensor, Tensor] | None = None

    def of_heads(self, kept: Sequence[int], num_heads: int) -> "Call":
        """The call as some of its heads see it: a position bias has a part for each."""
        chosen = list(kept)
        biases = [
            bias[:, chosen] if bias.ndim == 4 and bias.shape[1] == num_heads > 1 else bias for bias in self.biases
        ]
        return replace(self, biases=tuple(biases))


class Recorder:
    """Collects calls per site; if they are more than it may hold, it keeps an even sample of them.

    Args:
        sites: the sites to record.
        limit: bytes of the recorded inputs, beyond which half of the portions of the batches are let go.

    Attributes:
        calls: path -> portion -> the calls in it; a module that serves several layers is called several times.
        share: of the portions, those that are kept. They are spread unevenly on purpose: were every second portion
            dropped, it would be the same half of every batch of two portions, such as the one with short sentences.
    """

    def __init__(self, sites: Sequence[OpenSite], limit: int = SAMPLE_BYTES):
        self.limit, self.portion, self.share = limit, -1, 1.0
        self.calls: dict[str, dict[int, list[Call]]] = {site.path: {} for site in sites}
        self.bytes: dict[int, dict[int, int]] = {}  # portion -> id of a tensor, which several calls may share -> size

    def start_portion(self) -> None:
        """Say that what follows belongs to the next portion; if too much is held, let half of the portions go."""
        self.portion += 1
        while sum(sum(sizes.values()) for sizes in self.bytes.values()) > self.limit and len(self.bytes) > 1:
            self.share /= 2
            by_portion: list[dict[int, Any]] = [self.bytes, *self.calls.values()]
            for portions in by_portion:
                for portion in [portion for portion in portions if not self.keeps(portion)]:
                    del portions[portion]

    def keeps(self, portion: int) -> bool:
        """Whether a portion is one of the sample; the first one always is."""
        return portion * GOLDEN % 1 < self.share

    def add(self, path: str, call: Call) -> None:
        """Keep a call, if its portion is one of the sample."""
        if self.keeps(self.portion):
            self.calls[path].setdefault(self.portion, []).append(call)
            tensors = call.query_inputs, call.key_inputs, *call.biases
            self.bytes.setdefault(self.portion, {}).update({id(tensor): tensor.nbytes for tensor in tensors})

    def calls_of(self, path: str) -> list[Call]:
        """The calls of a site, in the order in which they were made; none if it is not recorded.

        Raises:
            CalibrationError: if it should have been recorded and no call of it was seen.
        """
        if path in self.calls and not self.calls[path]:
            raise CalibrationError(
                f"{path} does not hand its attention to transformers' attention interface "
                "(ALL_ATTENTION_FUNCTIONS), so what it computes cannot be recorded: pass refine_steps=0 and leave "
                "allocation='uniform', which calibrate without it"
            )
        return [call for calls in self.calls.get(path, {}).values() for call in calls]


@contextmanager
def recording_calls(
    model: PreTrainedModel,
    sites: Sequence[OpenSite],
    masks: Mapping[str, Tensor | None],
    limit: int = SAMPLE_BYTES,
) -> Iterator[Recorder]:
    """Record the calls of sites while the context is open.

    Args:
        model: an unchanged model.
        sites: those to record, not swapped.
        masks: holds the token masks of the inputs under way, see `run_batches`.
        limit: bytes to hold at most.
    """
    recorder = Recorder(sites, limit)
    handles = [model.register_forward_pre_hook(lambda *_: recorder.start_portion())]
    try:
        with attention_backend(model, BACKEND, accepted=(BACKEND,)) if sites else nullcontext():
            for site in sites:
                inputs: dict[str, Any] = {}
                for side, projection in zip(("query", "key"), site.projections, strict=True):
                    handles.append(projection.register_forward_pre_hook(partial(keep_input, inputs, side)))
                handles.append(
                    site.module.register_forward_pre_hook(partial(keep_positions, inputs, site), with_kwargs=True)
                )
                record = partial(record_call, recorder, site, inputs, masks)
                if site.adapter.uses_interface:
                    RECORDED[site.module] = record
                else:
                    hook = partial(read_call, site, inputs, record)
                    handles.append(site.module.register_forward_hook(hook, with_kwargs=True))
            yield recorder
    finally:
        for site in sites:
            RECORDED.pop(site.module, None)
        for handle in handles:
            handle.remove()


def keep_input(inputs: dict[str, Any], side: str, projection: nn.Module, args: tuple) -> None:
    """A hook that keeps what a projection is called with."""
    inputs[side] = args[0]


def keep_positions(inputs: dict[str, Any], site: OpenSite, module: nn.Module, args: tuple, kwargs: dict) -> None:
    """A hook that keeps the rotations that an attention module is called with, where its family has some."""
    if site.adapter.positions is not None:
        arguments = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        inputs["positions"] = arguments.get(site.adapter.positions)


def read_call(
    site: OpenSite, inputs: dict[str, Any], record: Callable, module: nn.Module, args: tuple, kwargs: dict, _: object
) -> None:
    """A hook that records a call by its arguments, once its projections have been called."""
    arguments = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    record(inputs["key"].shape[1], site.adapter.score_biases(module, arguments))


def record_call(
    recorder: Recorder,
    site: OpenSite,
    inputs: dict[str, Any],
    masks: Mapping[str, Tensor | None],
    keys: int,
    biases: tuple[Tensor, ...],
) -> None:
    """Add the call that is under way.

    Raises:
        CalibrationError: if it attends to more keys than its inputs make, or to keys of an earlier call.
    """
    query, key = inputs.pop("query", None), inputs.pop("key", None)
    if query is None or key is None or key.shape[1] != keys:
        raise CalibrationError(
            f"{site.path} attends to {keys} keys that its inputs do not make, as with a cache: give calibration "
            "batches without past_key_values"
        )
    used = masks.get(sides(site.site)[0])
    recorder.add(site.path, Call(query, key, biases, used, inputs.pop("positions", None)))


# Attention modules that are being recorded -> what is called with the number of keys and the biases of their scores.
RECORDED: WeakKeyDictionary[nn.Module, Callable[[int, tuple[Tensor, ...]], None]] = WeakKeyDictionary()


def recorded_attention(module, query, key, value, attention_mask, position_bias=None, **kwargs):
    """The backend: sdpa, after a listener was told of mask and position bias."""
    if module in RECORDED:
        biases = tuple(bias for bias in (attention_mask, position_bias) if bias is not None)
        RECORDED[module](key.shape[2], biases)
    return sdpa_attention_forward(module, query, key, value, attention_mask, position_bias=position_bias, **kwargs)


AttentionInterface.register(BACKEND, recorded_attention)
AttentionMaskInterface.register(BACKEND, eager_mask)  # additive, and never left out where attention is causal
