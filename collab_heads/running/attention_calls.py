"""Record the inputs of attention, masks and biases included, at transformers' attention interface.

While a model is recorded, its stock modules run under a backend of ours: transformers' own sdpa, which also records the
mask and the position bias. Where a family has attention of its own (MPNet), its adapter reads them from the arguments
of a call. The inputs of the query and key projections come from hooks. Together with the weights of the site, these
inputs determine its scores, and so its output.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from collab_heads.errors import CalibrationError
from collab_heads.model.open_layers import OpenSite
from collab_heads.running.batches import attention_backend, sides

BACKEND = "collab_heads_recording"
SAMPLE_BYTES = 512 * 2**20  # of all recorded inputs together; beyond it half of the portions are dropped
SIDES = ("query", "key")
GOLDEN = 0.6180339887498949  # its multiples, modulo 1, fill the interval evenly and never repeat


@dataclass(frozen=True)
class Call:
    """The inputs of one call of an attention module.

    Attributes:
        query_inputs: [B, T, D_q].
        key_inputs: [B, S, D_k]; in self-attention the same tensor.
        biases: the tensors that are added to the scores, masks included; they broadcast to [B, H, T, S].
        used: [B, T] bool, the query tokens that are not padding; None for all.
        positions: cosines and sines [B or 1, T, d_k] where positions are rotations; else None.
    """

    query_inputs: Tensor
    key_inputs: Tensor
    biases: tuple[Tensor, ...]
    used: Tensor | None
    positions: tuple[Tensor, Tensor] | None = None

    def of_heads(self, kept: Sequence[int], num_heads: int) -> "Call":
        """Return the call for some of the heads: only their parts of a position bias are kept."""
        chosen = list(kept)
        biases = [
            bias[:, chosen] if bias.ndim == 4 and bias.shape[1] == num_heads > 1 else bias for bias in self.biases
        ]
        return replace(self, biases=tuple(biases))


class Recorder:
    """A recorder of calls per site. It keeps an even sample of the calls if there are more than it may hold.

    Args:
        sites: the sites to record.
        limit: bytes of the recorded inputs, beyond which half of the portions of the batches are dropped.

    Attributes:
        calls: path -> portion -> the calls in it; a module that serves several layers is called several times.
        share: the share of the portions that are kept. They are spread unevenly on purpose: if every second portion
            were dropped and all batches had two portions, it would always be the same half, such as the short
            sentences.
    """

    def __init__(self, sites: Sequence[OpenSite], limit: int = SAMPLE_BYTES):
        self.limit, self.portion, self.share = limit, -1, 1.0
        self.calls: dict[str, dict[int, list[Call]]] = {site.path: {} for site in sites}
        self.bytes: dict[int, dict[int, int]] = {}  # portion -> id of a tensor, which several calls may share -> size

    def start_portion(self) -> None:
        """Start the next portion; if too much is held, drop half of the portions."""
        self.portion += 1
        while sum(sum(sizes.values()) for sizes in self.bytes.values()) > self.limit and len(self.bytes) > 1:
            self.share /= 2
            by_portion: list[dict[int, Any]] = [self.bytes, *self.calls.values()]
            for portions in by_portion:
                for portion in [portion for portion in portions if not self.keeps(portion)]:
                    del portions[portion]

    def keeps(self, portion: int) -> bool:
        """Return True if a portion belongs to the sample; the first one always does."""
        return portion * GOLDEN % 1 < self.share

    def add(self, path: str, call: Call) -> None:
        """Keep a call if its portion belongs to the sample."""
        if self.keeps(self.portion):
            self.calls[path].setdefault(self.portion, []).append(call)
            tensors = call.query_inputs, call.key_inputs, *call.biases
            self.bytes.setdefault(self.portion, {}).update({id(tensor): tensor.nbytes for tensor in tensors})

    def calls_of(self, path: str) -> list[Call]:
        """Return the calls of a site, in the order in which they were made; empty if the site is not recorded.

        Raises:
            CalibrationError: if the site is recorded and no call of it was seen.
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
        masks: holds the token masks of the current inputs, see `run_batches`.
        limit: the most bytes to hold.
    """
    recorder = Recorder(sites, limit)
    handles = [model.register_forward_pre_hook(lambda *_: recorder.start_portion())]
    try:
        with attention_backend(model, BACKEND, accepted=(BACKEND,)) if sites else nullcontext():
            for site in sites:
                inputs: dict[str, Any] = {}
                handles += on_inputs(site, inputs.__setitem__)
                handles.append(
                    site.module.register_forward_pre_hook(partial(begin_call, inputs, site), with_kwargs=True)
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


def on_inputs(site: OpenSite, hear: Callable[[str, Tensor], None]) -> list[RemovableHandle]:
    """Call back with what the query and the key projection of a site read, once each in every call of it.

    The first input of a projection in a call is the tokens; some families project positions with it afterwards.

    Args:
        site: a site that is not swapped.
        hear: called with "query" or "key" and the input, [B, T, D].

    Returns:
        The handles of the hooks.
    """
    heard: set[str] = set()

    def begin(*_: object) -> None:
        heard.clear()

    def read(side: str, _: nn.Module, args: tuple) -> None:
        if side not in heard:
            heard.add(side)
            hear(side, args[0])

    handles = [site.module.register_forward_pre_hook(begin)]
    for side, projection in zip(SIDES, site.projections, strict=True):
        handles.append(projection.register_forward_pre_hook(partial(read, side)))
    return handles


def begin_call(inputs: dict[str, Any], site: OpenSite, module: nn.Module, args: tuple, kwargs: dict) -> None:
    """Forget the call before, and keep the rotations that an attention module gets, if any (a forward pre-hook)."""
    inputs.clear()
    if site.adapter.positions is not None:
        arguments = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        inputs["positions"] = arguments.get(site.adapter.positions)


def read_call(
    site: OpenSite, inputs: dict[str, Any], record: Callable, module: nn.Module, args: tuple, kwargs: dict, _: object
) -> None:
    """Record a call by its arguments, after its projections have been called (a forward hook)."""
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
    """Add the current call to the recorder.

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


# Recorded attention module -> the function to call with the number of keys and the biases of the scores.
RECORDED: WeakKeyDictionary[nn.Module, Callable[[int, tuple[Tensor, ...]], None]] = WeakKeyDictionary()


def recorded_attention(module, query, key, value, attention_mask, position_bias=None, **kwargs):
    """Run sdpa after reporting mask and position bias to the recorder of the module: our backend."""
    if module in RECORDED:
        biases = tuple(bias for bias in (attention_mask, position_bias) if bias is not None)
        RECORDED[module](key.shape[2], biases)
    return sdpa_attention_forward(module, query, key, value, attention_mask, position_bias=position_bias, **kwargs)


AttentionInterface.register(BACKEND, recorded_attention)
AttentionMaskInterface.register(BACKEND, eager_mask)  # additive, and never left out where attention is causal
