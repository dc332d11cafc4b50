"""The measures of a budget, and the cost of a site by each of them.

The work of a site, its tokens and pairs of tokens, is counted as torch computes it. Padding counts, and so do the pairs
that a mask rules out in causal attention or outside of a window. A decoder reads its inputs in a batch all at once,
without a cache.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from collab_heads.base.option_values import MEASURES as MEASURES
from collab_heads.base.option_values import FeedForwardRole, Measure, ModelShape, Role, TableRole
from collab_heads.compression.parts.shape import Choice, Shape
from collab_heads.compression.parts.table import size_with
from collab_heads.errors import CalibrationError
from collab_heads.layers.fused import FusedPart
from collab_heads.model.open_layers import OpenFeedForward, OpenLayerSite
from collab_heads.running.batches import num_rows, run_batches, select
from collab_heads.running.speed import operation_counter

UNITS: Mapping[Measure, str] = {
    "parameters": "parameters of layers",
    "bytes": "bytes of layers",
    "operations": "multiplications of layers on the calibration batches",
    "cache": "cached elements of layers on the calibration batches",
    "time": "seconds of layers per batch",
}


@dataclass(frozen=True)
class Workload:
    """The work of one site on some batches.

    Attributes:
        calls: its calls in one forward pass: more than one if layers share it.
        queries: tokens that attend, in all calls.
        keys: tokens that keys and values are computed from, in all calls; in cross-attention those of the source.
        pairs: pairs of a token that attends and one that is attended to, in all calls.
        cached: tokens whose keys and values are kept in generation, in all calls. Models that do not generate are
            counted as if they did.
    """

    calls: int
    queries: int
    keys: int
    pairs: int
    cached: int = 0


@dataclass(frozen=True)
class SiteUse:
    """The use of a site, on which its cost depends.

    Attributes:
        shape: the shape of the site.
        role: its role.
        work: its tokens and pairs of tokens on the calibration batches.
    """

    shape: Shape
    role: Role | FeedForwardRole | TableRole
    work: Workload


def parameters(use: SiteUse, choice: Choice) -> float:
    """Count the parameters of the projections, which all calls of a site share."""
    return size_with(use.shape, choice).parameters


def stored_bytes(use: SiteUse, choice: Choice) -> float:
    """Count the bytes of the projections in a checkpoint."""
    return size_with(use.shape, choice).bytes


def gguf_bytes(use: SiteUse, choice: Choice) -> float:
    """Count the bytes of the projections in a file for llama.cpp, which has three bits in the room of four.

    Blocks of 32 weights have a scale there, also with eight bits, and each bit more of a weight takes the same room.
    """
    if choice.bits is None:
        return stored_bytes(use, choice)
    three, four = (stored_bytes(use, replace(choice, bits=bits)) for bits in (3, 4))
    return three + (max(choice.bits, 4) - 3) * (four - three)


def operations(use: SiteUse, choice: Choice) -> float:
    """Count the multiplications of matrix products: projections, scores, the weighted sum of values, feed-forward.

    Element-wise products (scale, mixing, rotations) do not count, nor do the zeros with which a fused kernel pads the
    narrower of keys and values.
    """
    size, work = size_with(use.shape, choice), use.work
    return work.queries * size.per_query + work.keys * size.per_key + work.pairs * size.per_pair


def cache(use: SiteUse, choice: Choice) -> float:
    """Count the elements that a site caches."""
    return use.work.cached * size_with(use.shape, choice).cache


# Time is measured on the machine and for the inputs at hand: see `latency`.
COUNTED: Mapping[Measure, Callable[[SiteUse, Choice], float]] = {
    "parameters": parameters,
    "bytes": stored_bytes,
    "operations": operations,
    "cache": cache,
}


def counted(of: Measure, shape: ModelShape | None) -> Callable[[SiteUse, Choice], float] | None:
    """Return how a measure counts a site in a model of a shape; None if it is timed."""
    return gguf_bytes if (of, shape) == ("bytes", "gguf") else COUNTED.get(of)


def count_work(
    model: PreTrainedModel, batches: Sequence[Mapping], sites: Sequence[OpenLayerSite], *, reached: bool = True
) -> dict[str, Workload]:
    """Count the work of sites on batches.

    Only one example of each batch is run: the others are as long.

    Args:
        model: the model, which is not changed.
        batches: input dicts as the model takes them.
        sites: the sites whose work is counted.
        reached: whether every site must be reached.

    Returns:
        path -> workload.

    Raises:
        CalibrationError: if no batch reaches a site, and each must be.
    """
    tokens: dict[str, list[tuple[int, int]]] = {}  # path -> rows and tokens, of keys and of queries in turns

    def listen(path: str, module: nn.Module | FusedPart) -> None:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            states = args[0] if args[0].ndim > 2 else args[0][None]  # a layer may take all tokens in a row
            tokens.setdefault(path, []).append((states.shape[0], states.shape[1]))

        handles.append(module.register_forward_pre_hook(hook))

    found = {site.path: Workload(0, 0, 0, 0) for site in sites}
    keeps = {site.path: kept_tokens(model, site) for site in sites}
    handles: list = []
    for site in sites:
        for module in site.token_modules:
            listen(site.path, module)

    def first(batch: Mapping) -> Iterator[Mapping]:
        rows = num_rows(batch)
        tokens.clear()
        yield batch if rows is None else select(batch, slice(0, 1))
        for path, seen in tokens.items():
            found[path] = added(found[path], seen, 1 if rows is None else rows, keeps[path])

    try:
        run_batches(model, batches, {}, "counting", cut=first)
    finally:
        for handle in handles:
            handle.remove()
    if missing := [path for path, work in found.items() if reached and not work.calls]:
        raise CalibrationError(f"{missing[0]} saw no tokens: give batches that reach it")
    return found


def other_operations(model: PreTrainedModel, batches: Sequence[Mapping], sites: Sequence[OpenLayerSite]) -> int:
    """Count the multiplications of all matrix products and convolutions of a model outside of some sites.

    Only one example of each batch is run: the others are as long.
    """
    counter = operation_counter()
    total = begun = times = depth = 0  # inside of how many modules of sites

    def enter(*_: object) -> None:
        nonlocal begun, depth
        if not depth:
            begun = counter.get_total_flops()
        depth += 1

    def leave(*_: object) -> None:
        nonlocal total, depth
        depth -= 1
        if not depth:
            total -= times * (counter.get_total_flops() - begun)

    inside = {module for site in sites for module in site.modules}
    handles = [module.register_forward_pre_hook(enter) for module in inside]
    handles += [module.register_forward_hook(leave) for module in inside]
    try:
        for batch in batches:
            rows = num_rows(batch)
            example, times = (batch, 1) if rows is None else (select(batch, slice(0, 1)), rows)
            with counter:
                run_batches(model, [example], {}, "counting")
            total += times * counter.get_total_flops()
    finally:
        for handle in handles:
            handle.remove()
    return total // 2  # it counts additions, too


def kept_tokens(model: PreTrainedModel, site: OpenLayerSite) -> Callable[[int], int]:
    """Return how many of some tokens a site caches in generation: a function of their number.

    The layers of transformers' cache answer it for a decoder, whose window may slide. Feed-forward blocks cache
    nothing, nor does the encoder of an encoder-decoder, which runs once.
    """
    if isinstance(site, OpenFeedForward) or (model.config.is_encoder_decoder and site.role == "enc-self"):
        return lambda tokens: 0

    def of_layer(tokens: int) -> int:
        layers = DynamicCache(config=model.config).layers
        if site.site.layer >= len(layers):  # a decoder may have more layers than its config says
            return tokens
        layer = cast(DynamicLayer, layers[site.site.layer])
        layer.update(*torch.zeros(2, 1, 1, tokens, 1))
        return cast(Tensor, layer.keys).shape[-2]

    return of_layer if site.role == "dec-self" else lambda tokens: tokens


def added(work: Workload, seen: Sequence[tuple[int, int]], times: int, kept: Callable[[int], int]) -> Workload:
    """Add the work of one more forward pass to a workload.

    Args:
        work: the workload so far.
        seen: rows and tokens of the keys and of the queries of every call, in turns.
        times: how often `seen` counts.
        kept: how many of some tokens are cached, see `kept_tokens`.
    """
    queries, keys, pairs, cached = work.queries, work.keys, work.pairs, work.cached
    for (_, sources), (rows, targets) in zip(seen[::2], seen[1::2], strict=True):
        queries += times * rows * targets
        keys += times * rows * sources
        pairs += times * rows * targets * sources
        cached += times * rows * kept(sources)
    return Workload(max(work.calls, len(seen) // 2), queries, keys, pairs, cached)
