"""Put the weights of sites and of tables on grids of few bits (`layers.weight_grid`).

A plan measures what rounding does. The final weights are those of GPTQ, after all fits: site by site, in the order in
which they run, on what the smaller model before the site puts out. Tables (embeddings, and linear layers outside of the
sites) are rounded, before them.

Shapes: D outputs, n inputs.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_heads.base.numerics import add_products_, float64, mirror_
from collab_heads.compression.parts.part import Fit
from collab_heads.compression.parts.shape import Shape
from collab_heads.errors import NonFiniteError
from collab_heads.fitting.weight_grid import gptq, nearest_on_grid
from collab_heads.layers.fused import FusedPart
from collab_heads.layers.layout import weight_of, write_weight
from collab_heads.layers.weight_grid import WEIGHT_BITS, GridWeights
from collab_heads.model.open_layers import OpenFeedForward, OpenLayerSite, OpenPart, OpenTable
from collab_heads.running.batches import EnoughSeen, run_batches, sides

NAME = "bits"  # of what is measured, beside the names of parts
GRID_LEAVES = 0.36  # of the squared error of rounding that GPTQ and the refit after it leave (MiniLM: 3 bits)
LAST = "output"  # the name of the last projection
OF_KEYS = ("key", "value", "query_key.shared_key", "query_key.content_bias")  # projections of the key side
SAMPLED = 256  # rows of a matrix, about, whose rounding error stands for that of all


@dataclass(frozen=True)
class GridFit(Fit):
    """The weights of a site, or of a table, on grids.

    Attributes:
        names: of its projections, see `projections_of`.
        weights: of each.
    """

    names: Sequence[str]
    weights: Sequence[GridWeights]

    def put_into(self, site, state):
        modules = projections_of(site)
        for name, found in zip(self.names, self.weights, strict=True):
            write_weight(modules[name], found.weight())
            for module in site.modules if isinstance(site, OpenTable) else (modules[name],):
                setattr(module, WEIGHT_BITS, found.bits)
        return state


def projections_of(site: OpenPart) -> dict[str, nn.Module]:
    """Return the modules whose weights can be put on a grid, by names of the site's own; each module once."""
    if isinstance(site, OpenTable):
        return {"table": site.output}
    if isinstance(site, OpenFeedForward):
        return {f"first.{number}": first for number, first in enumerate(site.first)} | {LAST: site.output}
    found: dict[str, nn.Module] = {}
    if site.query_key is None:
        found |= {name: whole_of(each) for name, each in zip(("query", "key"), site.projections, strict=True)}
    else:
        linear = ((name, each) for name, each in site.query_key.named_modules() if isinstance(each, nn.Linear))
        found |= {f"query_key.{name}": each for name, each in linear}
    found |= {"value": whole_of(site.value), LAST: site.output}
    names = {module: name for name, module in reversed(found.items())}  # one may make queries, keys and values
    return {name: module for name, module in found.items() if names[module] == name}


def whole_of(projection: nn.Module | FusedPart) -> nn.Module:
    return projection.whole if isinstance(projection, FusedPart) else projection


def rounding_errors(site: OpenPart, shape: Shape) -> dict[int, float]:
    """Return bits -> squared error of the weights of a site rounded to a grid, as a share of their squares.

    It is that of an even sample of the rows.
    """
    found = {}
    rows = [sampled(weight_of(module).detach()) for module in projections_of(site).values()]
    whole = sum(float(weight.square().sum()) for weight in rows)
    for bits in shape.bits:
        with naming(site.path):
            near = [nearest_on_grid(weight, bits).weight() for weight in rows]
        lost = sum(float((weight - each).square().sum()) for weight, each in zip(rows, near, strict=True))
        found[bits] = lost / whole if whole else 0.0
    return found


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Raise NonFiniteError with the name of a site before it."""
    try:
        yield
    except NonFiniteError as error:
        raise NonFiniteError(f"{what}: {error}") from error


def sampled(weight: Tensor) -> Tensor:
    return weight[:: math.ceil(len(weight) / SAMPLED)]


def rounded(site: OpenPart, bits: int) -> GridFit:
    """Return the fit of the nearest points of the grid.

    Raises:
        NonFiniteError: if a weight has none; the site is named.
    """
    return on_grid(site, bits, {})


def on_grid(site: OpenPart, bits: int, seconds: Mapping[str, Tensor], names: Sequence[str] | None = None) -> GridFit:
    """Return the fit of weights on a grid: of GPTQ where the second moments of the inputs are known, else rounded.

    Args:
        site: the site as it is to be stored.
        bits: the bits of a weight.
        seconds: name of a projection -> [n, n].
        names: of the projections; None for all.
    """
    modules, weights = projections_of(site), []
    names = [*modules] if names is None else names
    for name in names:
        weight = weight_of(modules[name]).detach()
        with naming(f"{site.path}, {name}"):
            found = GridWeights.of(weight, bits)  # it may lie there already
            if found is None:
                found = gptq(weight, seconds[name], bits) if name in seconds else nearest_on_grid(weight, bits)
        weights.append(found)
    return GridFit(names, weights)


class InputSums:
    """Sums of the outer products of what the projections of a site read, without padding.

    Args:
        site: the site as it is now.
        calls: the calls of the site in one forward pass, which ends with the last of them.
        names: the names of the projections; None for all.
    """

    def __init__(self, site: OpenLayerSite, calls: int, names: Sequence[str] | None = None):
        self.site, self.calls, self.seen, self.names = site, calls, 0, names
        self.masks: dict[str, Tensor | None] = {}  # of the current inputs
        self.modules = projections_of(site)
        self.read: dict[str, Tensor] = {}  # what projections read in the call that is under way
        self.same: dict[str, str] = {}  # name of a projection -> that of the first one that reads the same
        self.sums: dict[str, Tensor] = {}

    def hear(self, name: str, states: Tensor) -> None:
        """Take what a projection reads, tokens and then positions, if any; the last projection completes a call."""
        reads_tokens = name not in self.read
        first = next((other for other, read in self.read.items() if read is states), name)
        self.read[name] = states
        if self.names is not None and name not in self.names:
            pass
        elif self.same.setdefault(name, first) == name:
            rows = states.flatten(0, -2)
            if reads_tokens and (mask := self.masks.get(self.side_of(name))) is not None:
                rows = rows[mask.flatten().to(rows.device)]
            if name not in self.sums:
                self.sums[name] = float64(rows.new_zeros(0)).new_zeros(rows.shape[1], rows.shape[1])
            add_products_(self.sums[name], rows.float())
        if name == LAST:
            self.read.clear()
            self.seen += 1
            if self.seen % self.calls == 0:
                raise EnoughSeen

    def side_of(self, name: str) -> str:
        """Return the name of the mask of the tokens that a projection reads."""
        query, key = sides(self.site.site)
        return key if name in OF_KEYS else query

    def of(self, model: PreTrainedModel, examples: Sequence[Mapping]) -> dict[str, Tensor]:
        """Run a model on examples; return name of a projection -> [n, n]."""
        with ExitStack() as stack:
            for name, module in self.modules.items():
                hook = module.register_forward_pre_hook(lambda _, args, name=name: self.hear(name, args[0]))
                stack.callback(hook.remove)
            run_batches(model, examples, self.masks, "putting weights on grids")
        sums = {name: mirror_(each) for name, each in self.sums.items()}
        return {name: sums[first] for name, first in self.same.items() if first in sums}
