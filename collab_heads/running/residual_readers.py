"""Find where sites add to the residual stream of a model, whatever its family, and watch this place."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_heads.model.open_layers import OpenLayerSite
from collab_heads.running.batches import EnoughSeen, num_rows, run_batches, select, sides
from collab_heads.running.portions import portions

PASSIVE = (nn.Dropout, nn.Identity)  # in evaluation mode they put out what they read
SCALES = "LayerScale"  # in the names of classes that multiply what they read by a number per dimension (DINOv2)
SAME = 0.05  # of a change of a site's output: how far the change of what reads it may differ (bfloat16 rounds by 0.004)
FLAT = 0.01  # of the median variance: tokens with less count as if they had so much

See = Callable[[Tensor, Tensor, Tensor], None]


@dataclass(frozen=True)
class Reader:
    """The module that reads the output of a site, with the residual connection added.

    Attributes:
        site: the site, as it was opened.
        output: the name of its last projection in the model.
        name: the name of the module: a norm, in all families so far.
        scale: [D], by which the output is multiplied before it is added; 1 in most families.
    """

    site: OpenLayerSite
    output: str
    name: str
    scale: Tensor

    def real(self, states: Tensor, masks: Mapping[str, Tensor | None]) -> Tensor:
        """Return the tokens that count, in float32: [B, T, width] or [B * T, width] -> [tokens, width]."""
        mask, states = masks.get(sides(self.site.site)[0]), states.flatten(0, -2)
        return (states if mask is None else states[mask.flatten().to(states.device)]).float()


def find_readers(model: PreTrainedModel, sites: Sequence[OpenLayerSite], example: Mapping) -> list[Reader]:
    """Find the readers of sites, in the order in which the sites run; the model is not changed.

    A reader is the first module, without parts of its own, that reads states of the shape of the site's output after
    it. What it reads must change exactly as the output does, up to a factor per dimension; this is tried out. Sites
    that have no such reader, or that run more than once in a forward pass, are left out.

    Args:
        model: the model.
        sites: sites of the model.
        example: inputs as the model takes them; the first row is enough.
    """
    if num_rows(example):
        example = select(example, slice(1))
    names = {module: name for name, module in model.named_modules()}
    last = {names[site.output]: site for site in sites}
    found = []
    with tracing(model, last) as trace:
        run_batches(model, [example], {}, "finding readers")
        read = dict(trace.read)
        for output in [name for name in trace.run if trace.run.count(name) == 1 and name in read]:
            reader, states = read[output]
            noise = torch.randn(states.shape, generator=torch.Generator().manual_seed(0)).to(states)
            trace.change(output, change := noise * states.std())
            run_batches(model, [example], {}, "finding readers")
            again, changed = trace.read[output]
            seen = changed - states
            scale = (seen * change).sum(0) / change.square().sum(0)
            if again == reader and (seen - scale * change).norm() <= SAME * seen.norm() and bool(scale.any()):
                is_plain = bool(((scale - 1).abs() <= SAME).all())
                found.append(Reader(last[output], output, reader, torch.ones_like(scale) if is_plain else scale))
    return found


class Trace:
    """A record of the last forward pass.

    Attributes:
        run: the names of the last projections of sites, in the order in which they ran.
        read: name of a last projection -> the name of the module that read states of the shape of its output next, and
            these states, [tokens, D], in float32.
        waiting: name of a last projection -> the shape of its output, [tokens, D], before such a module was seen.
        added: what is added to the output of one last projection: its name, and states [tokens, D]; or None.
    """

    def __init__(self) -> None:
        self.run: list[str] = []
        self.read: dict[str, tuple[str, Tensor]] = {}
        self.waiting: dict[str, torch.Size] = {}
        self.added: tuple[str, Tensor] | None = None

    def change(self, output: str, states: Tensor) -> None:
        """Add states to the output of a last projection in the next forward pass, which ends at its reader."""
        self.waiting.clear()
        self.added = output, states

    def leave(self, name: str, put_out: Tensor) -> Tensor | None:
        """Note the output of a last projection; return it with what is added."""
        self.run.append(name)
        self.waiting[name] = put_out.flatten(0, -2).shape
        return put_out + self.added[1].to(put_out).view_as(put_out) if self.added and self.added[0] == name else None

    def enter(self, name: str, args: tuple) -> None:
        """Note what a module reads, if it has the shape of an output that was not read yet."""
        states = args[0] if args else None
        if isinstance(states, Tensor) and states.ndim > 1:
            tokens = states.flatten(0, -2)  # OPT takes them in a row
            for output in [each for each, shape in self.waiting.items() if shape == tokens.shape and each != name]:
                del self.waiting[output]
                self.read[output] = name, tokens.float().clone()
                if self.added and self.added[0] == output:
                    raise EnoughSeen


@contextmanager
def tracing(model: PreTrainedModel, outputs: Mapping[str, object]) -> Iterator[Trace]:
    """Trace forward passes while the context is open; `outputs` has the names of last projections."""
    trace, handles = Trace(), []
    for name, module in model.named_modules():
        passes_on = isinstance(module, PASSIVE) or SCALES in type(module).__name__
        if not any(module.children()) and not passes_on:
            handles.append(module.register_forward_pre_hook(lambda _, args, name=name: trace.enter(name, args)))
        if name in outputs:
            handles.append(module.register_forward_hook(lambda _, args, out, name=name: trace.leave(name, out)))
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def watching(model: PreTrainedModel, reader: Reader, see: See) -> Iterator[None]:
    """Watch one place while the context is open.

    Args:
        model: the model, perhaps with smaller sites.
        reader: of the site to watch.
        see: called with what the last projection reads [..., n], what it puts out, and what the reader reads [..., D].
    """
    seen: list[Tensor] = []

    def leave(_: nn.Module, args: tuple, put_out: Tensor) -> None:
        seen[:] = args[0], put_out

    def enter(_: nn.Module, args: tuple) -> None:
        if seen:
            inputs, put_out = seen
            seen.clear()
            see(inputs, put_out, args[0])

    handles = [
        model.get_submodule(reader.output).register_forward_hook(leave),
        model.get_submodule(reader.name).register_forward_pre_hook(enter),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def token_weights(states: Tensor) -> Tensor:
    """Return what a squared error counts in each token of a stream that a norm reads: 1 / variance.

    Args:
        states: [tokens, D].

    Returns:
        [tokens].
    """
    variances = states.var(-1)
    least = torch.finfo(variances.dtype).tiny ** 0.5  # of states that are all zeros
    return variances.clamp(min=max(FLAT * float(variances.median()), least)).reciprocal()


def stream_weights(
    model: PreTrainedModel, sites: Sequence[OpenLayerSite], batches: Sequence[Mapping]
) -> dict[str, float]:
    """Return what a squared error of a site's output, summed over its dimensions, counts in the stream that it enters.

    Args:
        model: the model, which is not changed.
        sites: sites of the model.
        batches: input dicts as the model takes them.

    Returns:
        path -> the mean over tokens of 1 / (D * variance of the stream), times the mean square of the factors by which
        the output is multiplied before it is added; of the sites whose output is read at one place.
    """
    weights: dict[str, list[Tensor]] = {}
    masks: dict[str, Tensor | None] = {}
    with ExitStack() as stack:
        for reader in find_readers(model, sites, batches[0]):
            of_site, scale = weights.setdefault(reader.site.path, []), reader.scale.float().square().mean()

            def see(_: Tensor, __: Tensor, read: Tensor, reader=reader, of_site=of_site, scale=scale) -> None:
                of_site.append(scale * token_weights(reader.real(read, masks)) / read.shape[-1])

            stack.enter_context(watching(model, reader, see))
        cut = functools.partial(portions, is_encoder_decoder=model.config.is_encoder_decoder)
        run_batches(model, batches, masks, "measuring the stream", cut=cut)
    return {path: float(torch.cat(of_site).mean()) for path, of_site in weights.items()}
