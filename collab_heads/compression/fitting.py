"""Fit the choices of a plan, and measure the error of the model's output with them; the model stays as it is.

The fits of `parts` see the original model. Each makes up for what its own site lost, and knows nothing of the errors of
the sites before it. So every last projection (W_O, or the last one of a feed-forward block) is then fitted again, in
the order in which the sites run. It reads what the smaller model gives it. Its target is what the module after it reads
in the original, with the residual connection added: so it also makes up for the errors before it, as far as what is
left of the site allows. Where weights get few bits, the other projections are on their grids by then, and the last one
follows: it makes up for them, too. As in GPTQ (Frantar et al. 2023, arXiv:2210.17323) and K-prune (Park et al. 2024,
arXiv:2308.03449), no labels are needed.

With y the output of a site, s what the next module reads, and s0 what it reads in the original, the target of y is
y + s0 - s. Where the next module reads y alone (a norm of the output, in Gemma 3), this is the original output; where y
is scaled before it is added (DINOv2), the difference is divided by the scale. A norm follows in all families, so a
token counts by one over the variance of s0.

Shapes: n the width of what a last projection reads, D width of the model.
"""

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.base.memory import give_back_memory
from collab_heads.base.numerics import add_products_, few_threads, float64, solve_positive
from collab_heads.base.progress import progress_bar
from collab_heads.compression.bits import LAST, InputSums, on_grid, projections_of, rounded
from collab_heads.compression.measurements import Measurements
from collab_heads.compression.parts.part import Fit, RefittedOutput, install
from collab_heads.compression.parts.shape import Choice
from collab_heads.compression.parts.table import fit_site
from collab_heads.compression.probe import Probe
from collab_heads.layers.layout import weight_of, widths
from collab_heads.model.apply_state import OutputWeights, undone
from collab_heads.model.open_layers import OpenLayers, OpenLayerSite
from collab_heads.running.batches import EnoughSeen, run_batches
from collab_heads.running.blocks import BlockStarts
from collab_heads.running.portions import portions, whole
from collab_heads.running.residual_readers import Reader, find_readers, token_weights, watching


def fit_choices(
    measured: Measurements, choices: Mapping[str, Choice], elsewhere: Probe | None = None
) -> dict[str, list[Fit]]:
    """Fit choices for sites: path -> fits of every site that changes; the model stays as it is.

    The last projections are then refitted in the order of the sites, and weights put on grids (`fitted_in_order`). The
    refits are kept if they reduce the error of the output on the examples that are held out, and on others with them.
    With bits, this is asked only where there are others.

    Args:
        measured: the measurements of the model.
        choices: path -> choice, for all sites that may change.
        elsewhere: measures the error on examples of another kind.
    """
    layers, options, fitted = measured.layers, measured.options.fit, {}
    for site in progress_bar([each for each in measured.sites if choices[each.path].sizes], desc="fitting sites"):
        path, shape, choice = site.path, measured.shapes[site.path], choices[site.path].in_float
        found = measured.kept.find(path, {path: choice})
        if found is None:
            with few_threads(widths(site.output)[0]):  # a name for the calibration would keep it in memory
                found = fit_site(layers, path, shape, choice, measured.fitted.take(path), options)
            measured.kept.add(path, {path: choice}, found)
            give_back_memory()
        fitted[path] = found
    refitted, plain = fitted_in_order(measured, fitted, choices), fitted
    if any(choice.bits is not None for choice in choices.values()):
        if refitted and elsewhere is None:  # the plain one takes half as long again; it was worse where it was tried
            return refitted
        plain = fitted_in_order(measured, fitted, choices, refits=False)
    probes = [measured.probe, *([] if elsewhere is None else [elsewhere])]
    if refitted and square(measured, refitted, probes) < square(measured, plain, probes):
        return refitted
    return plain


def square(measured: Measurements, fitted: Mapping[str, Sequence[Fit]], probes: Sequence[Probe]) -> float:
    return sum(fitted_error(measured, fitted, probe) ** 2 for probe in probes)


def fitted_error(measured: Measurements, fitted: Mapping[str, Sequence[Fit]], probe: Probe | None = None) -> float:
    """Install some fits, measure the error of the model's output, and remove them again.

    Args:
        measured: the measurements of the model.
        fitted: path -> fits, as `fit_choices` returns them.
        probe: what measures the error; None for that of the measurements.
    """
    give_back_memory()  # of the fits, and of an installation before
    with undone(measured.layers, measured.changing) as tried:
        install(tried, fitted)
        give_back_memory()
        return (probe or measured.probe).error()


RIDGES = (1e-2, 1e-1, 1.0, 10.0, 100.0)  # around the present weights, as shares of the mean square of what they read
TOKENS = 400_000  # times sites, at most, about: 14,000 tokens in place of 6,700 gain nothing in SmolLM2
MOST_TOKENS = 32_768  # about
VALIDATED = 8  # one portion of so many chooses the ridge; fewer portions say too little
FEWEST = 3 * VALIDATED  # portions to fit to, if there are so many, however long they are
TARGETS = 16 * 2**20  # bytes of targets held at a time, of one site at least; without starts, a group is a whole pass

logger = logging.getLogger(__name__)


def fitted_in_order(
    measured: Measurements,
    fitted: Mapping[str, Sequence[Fit]],
    choices: Mapping[str, Choice],
    *,
    refits: bool = True,
) -> dict[str, list[Fit]]:
    """Refit last projections after some fits, and put weights on grids; the model is unchanged afterwards.

    Args:
        measured: the measurements of the model.
        fitted: path -> fits of every site that changes its sizes.
        choices: path -> choice, which the fits are of; weights go to grids where it has bits.
        refits: whether last projections are refitted.

    Returns:
        The same fits, each followed by a `RefittedOutput` where this reduces the error on examples that it was not
        fitted to, and by `GridFit`s. Sites that keep their sizes, after the first one that changes, may have them, too.
        Empty if nothing is changed, or if there are too few examples for refits.
    """
    bits = {path: choice.bits for path, choice in choices.items() if choice.bits is not None}
    if not (fitted or bits):
        return {}
    model, kept, found = measured.model, measured.kept, {path: [*fits] for path, fits in fitted.items()}
    measured.fitted.release()
    examples, tokens = examples_of(measured)
    if refits and len(examples) < VALIDATED:
        logger.info("the last projections are not refitted in order: there are too few calibration examples")
        return {}
    readers = {each.site.path: each for each in find_readers(model, measured.sites, examples[0])} if refits else {}
    sites = [each.site for each in readers.values()]
    sites += [site for site in measured.sites if site.path in bits and site.path not in readers]
    while sites and sites[0].path not in fitted.keys() | bits.keys():
        del sites[0]  # it reads what it reads in the original
    for table in measured.tables:
        if table.path in bits:
            found[table.path] = [rounded(table, bits[table.path])]
    original, smaller = (BlockStarts(model, sites, examples, whole) for _ in range(2))
    is_changed, name = bool(bits), "{}, refitted" if refits else "{}, on a grid"
    for group in progress_bar(grouped(sites, tokens), desc="refitting in order"):
        known = {site.path: kept.find(name.format(site.path), choices) for site in group}
        if None in known.values():
            of_group = [readers[site.path] for site in group if site.path in readers]
            targets = targets_of(model, of_group, examples, original) if of_group else {}
            with undone(measured.layers, measured.changing) as tried:
                install(tried, {path: fits for path, fits in found.items() if smaller.runs(path, known)})
                for path, fits in known.items():
                    if fits is not None:
                        install(tried, {path: fits})
                        continue
                    turn, reader = Turn(measured, tried, path, examples, smaller), readers.get(path)
                    wanted = None if reader is None else targets.pop(reader.output)
                    fits = known[path] = turn.fitted(bits.get(path), reader, wanted)
                    kept.add(name.format(path), choices, fits)
                del tried, turn  # a model's worth of weights
                give_back_memory()
        for path, fits in known.items():
            if fits:
                found.setdefault(path, []).extend(fits)
                is_changed = True
    return found if is_changed else {}


@dataclass
class Turn:
    """The turn of a site: everything before it in the model is as it will be.

    Attributes:
        measured: the measurements of the model.
        tried: the layers with the fits before.
        path: the path of the site.
        examples: portions.
        starts: starts on the examples.
        fits: of the site in its turn, so far; they are installed.
    """

    measured: Measurements
    tried: OpenLayers
    path: str
    examples: Sequence[Mapping]
    starts: BlockStarts
    fits: list[Fit] = field(default_factory=list)

    def fitted(self, bits: int | None, reader: Reader | None, targets: Sequence[Tensor] | None) -> list[Fit]:
        """Put the first projections on a grid, refit the last one, and put it on a grid, too.

        Args:
            bits: of the grid; None for none.
            reader: the reader of the site; None to refit nothing.
            targets: portion -> [tokens, D], what the reader reads in the original.
        """
        if bits is not None:
            self.put_on_grid(bits, of_last=False if reader else None)
        if reader is not None and targets is not None:
            projection = self.measured.model.get_submodule(reader.output)
            with self.starts.at(self.path):
                output = refit(self.measured.model, reader, self.examples, targets)
            if output is not None:
                self.add(RefittedOutput(output.rounded(projection)))
            if bits is not None:
                self.put_on_grid(bits, of_last=True)
        return self.fits

    def put_on_grid(self, bits: int, *, of_last: bool | None) -> None:
        """Put the weights of projections on a grid: of the last one, of the others, or, for None, of all."""
        site = self.tried.at(self.path)
        names = [name for name in projections_of(site) if of_last is None or (name == LAST) == of_last]
        sums = InputSums(site, self.measured.work[self.path].calls, names)
        with self.starts.at(self.path):
            seconds = sums.of(self.measured.model, self.examples)
        with few_threads(widths(site.output)[0]):
            self.add(on_grid(site, bits, seconds, names))

    def add(self, fit: Fit) -> None:
        """Add a fit, and install it."""
        self.fits.append(fit)
        give_back_memory()
        install(self.tried, {self.path: [fit]})


def examples_of(measured: Measurements) -> tuple[list[Mapping], int]:
    """Return portions of the examples that are fitted to, a sample if there are many, and about how many tokens.

    They are in random order, always the same: the portions of a batch are sorted by length.
    """
    is_encoder_decoder = measured.model.config.is_encoder_decoder
    tokens = max(work.queries // work.calls for work in measured.work.values())
    limit = min(MOST_TOKENS, TOKENS // len(measured.work))
    batches = measured.fitted.batches
    total = sum(1 for batch in batches for _ in portions(batch, is_encoder_decoder))
    count = min(total, max(math.ceil(total * limit / max(tokens, 1)), FEWEST))
    order = torch.randperm(total, generator=torch.Generator().manual_seed(0)).tolist()[:count]
    cut = (portion for batch in batches for portion in portions(batch, is_encoder_decoder))
    wanted = set(order)
    chosen = {number: portion for number, portion in enumerate(cut) if number in wanted}
    return [chosen[number] for number in order], tokens * count // total


def grouped(sites: Sequence[OpenLayerSite], tokens: int) -> list[list[OpenLayerSite]]:
    """Cut sites into groups whose targets take at most `TARGETS` bytes."""
    size = torch.float32.itemsize * tokens * max((widths(site.output)[1] for site in sites), default=1)
    count = max(TARGETS // max(size, 1), 1)
    return [[*sites[start : start + count]] for start in range(0, len(sites), count)]


def targets_of(
    model: PreTrainedModel, readers: Sequence[Reader], examples: Sequence[Mapping], starts: BlockStarts
) -> dict[str, list[Tensor]]:
    """Run the original; return what readers read: name of the last projection -> portion -> [tokens, D].

    `starts` are its starts on the examples; the run begins at the block of the first reader, and ends at the last one.
    """
    found: dict[str, list[Tensor]] = {reader.output: [] for reader in readers}
    masks: dict[str, Tensor | None] = {}
    with starts.at(readers[0].site.path), ExitStack() as stack:
        for reader in readers:

            def see(inputs: Tensor, put_out: Tensor, read: Tensor, reader: Reader = reader) -> None:
                found[reader.output].append(reader.real(read, masks))
                if reader is readers[-1]:
                    raise EnoughSeen

            stack.enter_context(watching(model, reader, see))
        run_batches(model, examples, masks, "running the original")
    return found


@dataclass
class Sums:
    """Sums over tokens for a regression of what is missing, y, on x = [u; 1], u what a last projection reads.

    Attributes:
        second: [n + 1, n + 1], float64, of x x^T, on and above the diagonal.
        right: [n + 1, D], float64, of x y^T.
    """

    second: Tensor
    right: Tensor

    @classmethod
    def zeros(cls, width: int, dim: int, like: Tensor) -> "Sums":
        """Return the sums over no tokens.

        Args:
            width: n.
            dim: D.
            like: a tensor on the device of the model.
        """
        empty = float64(like.new_zeros(0))
        return cls(empty.new_zeros(width + 1, width + 1), empty.new_zeros(width + 1, dim))

    def add(self, rows: Tensor, missing: Tensor) -> None:
        """Add tokens: x [tokens, n + 1] and y [tokens, D]."""
        rows = float64(rows)  # products in less may not be positive definite
        add_products_(self.second, rows)
        self.right.addmm_(rows.mT, float64(missing))

    def solve(self, ridge: float, has_bias: bool) -> Tensor:
        """Return the change of the weights, with that of the bias as a last row: [n + 1, D].

        Args:
            ridge: how small it stays, as a share of the mean square of u. That of the bias is free.
            has_bias: whether there is a bias; without it, its row is zero.
        """
        free, found = slice(None) if has_bias else slice(-1), torch.zeros_like(self.right)
        second = self.second[free, free].clone()
        squares = second.diagonal()[: len(found) - 1]
        if len(squares):
            squares += ridge * squares.mean().clamp(min=torch.finfo(squares.dtype).tiny ** 0.5)
        found[free] = solve_positive(second, self.right[free])
        return found


def refit(
    model: PreTrainedModel, reader: Reader, examples: Sequence[Mapping], targets: Sequence[Tensor]
) -> OutputWeights | None:
    """Refit one last projection; None where this does not reduce the error on portions that it is not fitted to.

    Args:
        model: the model, in which everything before the site is as it will be.
        reader: of the site.
        examples: portions.
        targets: portion -> [tokens, D], what the reader reads in the original.
    """
    sums: list[Sums] = []
    held: list[tuple[Tensor, Tensor]] = []  # rows, and what is missing, that choose the ridge
    masks: dict[str, Tensor | None] = {}
    left = list(targets)

    def see(inputs: Tensor, _: Tensor, read: Tensor) -> None:
        used, states = (reader.real(each, masks).to(inputs.device) for each in (inputs, read))
        number, original, scale = len(targets) - len(left), left.pop(0).to(used), reader.scale.to(used)
        root = token_weights(original).sqrt()[:, None]
        missing = ((original - states) / scale).where(scale != 0, 0.0) * root  # of the output
        rows = torch.cat([used, used.new_ones(len(used), 1)], dim=1) * root
        if number % VALIDATED == VALIDATED - 1:
            held.append((rows, missing))
        else:
            if not sums:
                sums.append(Sums.zeros(used.shape[1], missing.shape[1], used))
            sums[0].add(rows, missing)
        raise EnoughSeen

    with watching(model, reader, see):
        run_batches(model, examples, masks, "refitting")
    if not sums or not held:
        return None
    if not (sums[0].second.diagonal().isfinite().all() and sums[0].right.isfinite().all()):
        return None  # half precision may overflow in the smaller model
    output = model.get_submodule(reader.output)
    has_bias = output.bias is not None
    with few_threads(len(sums[0].second)):
        error_with = functools.cache(lambda ridge: error(sums[0].solve(ridge, has_bias), held))
        ridge = nearby_least(RIDGES, error_with)
        if not error_with(ridge) < error(torch.zeros_like(sums[0].right), held):
            return None
        for rows, missing in held:
            sums[0].add(rows, missing)
        change = sums[0].solve(ridge, has_bias)
    weight = change[:-1].mT
    bias = change[-1].clone()  # a view would keep all of it in memory
    return OutputWeights(weight + float64(weight_of(output).detach()) if weight.numel() else weight, bias)


def nearby_least(values: Sequence[float], error_with: Callable[[float], float]) -> float:
    """Return the value with the least error, from the middle on, on the side where the error falls."""
    index = len(values) // 2
    for step in (-1, 1):
        while 0 <= index + step < len(values) and error_with(values[index + step]) < error_with(values[index]):
            index += step
    return values[index]


def error(change: Tensor, held: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the sum of squares that is missing in some rows after a change of weights, [n + 1, D] in float64."""
    return sum(float((float64(missing) - float64(rows) @ change).square().sum()) for rows, missing in held)
