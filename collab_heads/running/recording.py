"""Record the attention weights and outputs of heads during ordinary forward passes."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from collab_heads.contract.adapter import AttentionAdapter
from collab_heads.contract.registry import get_adapter
from collab_heads.errors import UnsupportedModelError
from collab_heads.model.open_layers import OpenLayers
from collab_heads.model.refusals import check_wrapper
from collab_heads.running.batches import attention_backend
from collab_heads.sites.site import AttentionSite

logger = logging.get_logger("transformers.collab_heads")  # below transformers' own: its verbosity counts

Callback = Callable[[AttentionSite, Tensor], None]


@contextmanager
def recording(
    model: PreTrainedModel,
    *,
    weights: Callback | None = None,
    outputs: Callback | None = None,
) -> Iterator[None]:
    """Call back at every site that has heads, in every forward pass of the model while the context is open.

    Works for changed sites as for stock ones. A module that serves several layers (ALBERT) calls back once per layer.
    Once a callback has returned, no tensor is kept here. In training mode the weights are those after dropout.

    Only the eager backend returns weights. If `weights` is given, the model uses that backend while the context is open
    (slower, with [B, H, T, S] in memory) and logs this at the level "info". Afterwards, also on an error, the model has
    its own backend again, and no hook is left.

    Args:
        model: a supported transformers model, original or collaborative, gated, mixed, pruned.
        weights: called with the site and its attention weights [B, H, T, S]: H heads, T query tokens, S key tokens.
        outputs: called with the site and the outputs of its heads [B, T, H, d_v], as they enter the output projection:
            before gates and alphas.

    Raises:
        UnsupportedModelError: if there is no adapter for the model, it is wrapped, or a site returns no weights.
    """
    check_wrapper(model)
    adapter = get_adapter(model)
    backend = nullcontext() if weights is None else eager_backend(model)
    handles = []
    with backend:
        try:
            for site in OpenLayers.of(model, adapter).with_heads:
                if weights is not None:
                    if adapter.weights_argument is not None:
                        asks = asking_hook(adapter.weights_argument)
                        handles.append(site.module.register_forward_pre_hook(asks, with_kwargs=True))
                    handles.append(site.module.register_forward_hook(weights_hook(adapter, site.site, weights)))
                if outputs is not None:
                    handles.append(site.output.register_forward_pre_hook(outputs_hook(site.site, outputs)))
            yield
        finally:
            for handle in handles:
                handle.remove()


def eager_backend(model: PreTrainedModel):
    """Use the eager backend for the model and its stacks; their own backends are restored at the end."""
    backends = {m.config._attn_implementation for m in model.modules() if isinstance(m, PreTrainedModel)} - {"eager"}
    if backends:
        logger.info(
            f"{type(model).__name__} uses the eager attention backend instead of {', '.join(sorted(backends))} while "
            "its attention weights are recorded"
        )
    return attention_backend(model, "eager", accepted=("eager",))


def asking_hook(argument: str):
    """Return a forward pre-hook that sets the argument by which an attention module returns its weights."""

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        given = [*inspect.signature(module.forward).parameters][: len(args)]
        if argument not in given:
            return args, {**kwargs, argument: True}
        place = given.index(argument)
        return (*args[:place], True, *args[place + 1 :]), kwargs

    return hook


def weights_hook(adapter: AttentionAdapter, site: AttentionSite, callback: Callback):
    """Return a forward hook for the attention module of a site that passes its weights to the callback."""

    def hook(module: Any, inputs: tuple, output: tuple) -> None:
        weights = output[adapter.weights_at]
        if not isinstance(weights, Tensor) or weights.ndim != 4 or weights.shape[1] != site.num_heads:
            returned = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
            raise UnsupportedModelError(
                f"{site.path} returned no attention weights of {site.num_heads} heads but {returned}, with the eager "
                f"backend: see weights_at and weights_argument of {type(adapter).__name__}"
            )
        callback(site, weights)

    return hook


def outputs_hook(site: AttentionSite, callback: Callback):
    """Return a forward pre-hook for the output projection of a site that passes the heads to the callback."""

    def hook(projection: nn.Module, inputs: tuple) -> None:
        callback(site, inputs[0].unflatten(-1, (site.num_heads, -1)))

    return hook
