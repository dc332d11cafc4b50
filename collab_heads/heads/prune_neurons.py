"""prune_neurons: remove neurons of feed-forward blocks from the weights of a model."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from transformers import PreTrainedModel

from collab_heads.base.arguments import checking_arguments
from collab_heads.base.numerics import few_threads
from collab_heads.base.option_values import FeedForwardRole
from collab_heads.base.progress import one_bar, progress_bar
from collab_heads.base.report import Cell, Report, change, loss_in_words
from collab_heads.calibration.calibrate import CalibratedSites
from collab_heads.calibration.input_moments import InputMoments
from collab_heads.errors import ArgumentError, UnsupportedModelError
from collab_heads.fitting.head_regression import most_costly
from collab_heads.fitting.neuron_regression import NeuronRegression, refit_errors
from collab_heads.fitting.widths import widths_asked
from collab_heads.model.apply_state import OutputWeights, keep_neurons
from collab_heads.model.open_layers import OpenFeedForward, OpenLayers
from collab_heads.model.opened import opened
from collab_heads.model.refusals import check_feed_forwards
from collab_heads.model.site_size import FeedForwardGeometry, size_of
from collab_heads.running.batches import NoticingFew

MULTIPLE = 8  # to which shares of neurons are rounded up, for the kernels of matrix products
Kept = int | float


@dataclass(frozen=True)
class PrunedBlock:
    """The effect of pruning on one feed-forward block.

    Attributes:
        path, role: the path of the module that holds it, and its role.
        neurons_before, neurons_after: number of neurons.
        parameters_before, parameters_after: parameters of its projections.
        share_lost: the mean squared error of the block's output with the refitted last projection, on the batches, as a
            share of the variance of that output.
    """

    path: str
    role: FeedForwardRole
    neurons_before: int
    neurons_after: int
    parameters_before: int
    parameters_after: int
    share_lost: float


@dataclass(frozen=True)
class PruneNeuronsReport(Report):
    """The result of `prune_neurons`.

    Attributes:
        blocks: one entry per block that lost neurons, in model order.
        model_parameters_before, model_parameters_after: of the whole model.
    """

    TOTALS, ENTRIES = ("removed",), "blocks"
    blocks: tuple[PrunedBlock, ...]
    model_parameters_before: int
    model_parameters_after: int

    @property
    def removed(self) -> int:
        """The number of neurons removed."""
        return sum(block.neurons_before - block.neurons_after for block in self.blocks)

    def columns(self) -> dict[str, Cell]:
        return {
            "block": "{.path}",
            "role": "{.role}",
            "neurons": "{0.neurons_before} -> {0.neurons_after}",
            "parameters": "{0.parameters_before:,} -> {0.parameters_after:,}",
            "output lost": "{.share_lost:.2%}",
        }

    def closing(self) -> str:
        parameters = change(self.model_parameters_before, self.model_parameters_after)
        return f"{self.removed:,} neurons removed; model parameters {parameters}"

    def remarks(self) -> list[str]:
        return [loss_in_words(sum(block.share_lost for block in self.blocks) / max(1, len(self.blocks)))]


@checking_arguments
@torch.inference_mode(False)  # new parameters are to be trained
@torch.no_grad()
@one_bar("prune_neurons", (("calibrating", 1), ("choosing neurons", 1)))
def prune_neurons(
    model: PreTrainedModel, batches: Iterable[Mapping], *, keep: Kept | Mapping[str, Kept]
) -> PruneNeuronsReport:
    """Remove neurons of feed-forward blocks in place: rows of the first projections, columns of the last one.

    From each block the neurons go that the others reconstruct best, one after the other, and the last projection is
    refitted by least squares, so that those that stay reconstruct the output of all. No labels are needed. `compress`
    does the same, and also chooses how many neurons each block keeps. The pruned model saves and loads like any other.
    On an error the model is left unchanged. Prune before making the optimizer, and before DDP, FSDP, PEFT or
    `torch.compile`.

    Examples:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
        >>> model = BertModel(BertConfig(**sizes))
        >>> batches = [{"input_ids": torch.arange(200).view(8, 25)} for _ in range(4)]  # (batch, tokens) each
        >>> report = prune_neurons(model, batches, keep=0.25)
        >>> model.encoder.layer[0].intermediate.dense.weight.shape  # (neurons, D): a quarter of the rows
        torch.Size([64, 64])

    Args:
        model: a supported transformers model, original or changed.
        batches: input dicts as the model takes them, without labels (256 to 2,048 sentences: more reduce the error).
        keep: what each block keeps: an int is a number of neurons, a float in (0, 1] a share of those that it has now,
            rounded up to a multiple of 8; or role ("enc-ffn", "dec-ffn") or path -> one of these. A block that keeps no
            neuron puts out its mean.

    Returns:
        Neurons and parameters before and after, per block; `print` it.

    Raises:
        UnsupportedModelError: if there is no adapter for the model, it does not say where feed-forward blocks are, or
            the model is wrapped.
        ArgumentError: on a role or path that does not exist, or an impossible number.
        ModelStateError: if a block is quantised, shared with another module, or of an unknown class.
        CalibrationError: if there are no batches, or the model cannot take them.
        NonFiniteError: if weights, or what neurons put out, contain NaN or inf.
    """
    with opened(model, capability="neurons", changes=True, of="layers") as layers:
        return pruned(layers, batches, keep)


def pruned(layers: OpenLayers, batches: Iterable[Mapping], keep: Kept | Mapping[str, Kept]) -> PruneNeuronsReport:
    """Remove neurons of an opened model as `prune_neurons` does."""
    model, adapter = layers.model, layers.adapter
    blocks = [block for block in layers.feed_forwards if block.num_neurons]
    if not blocks:
        raise UnsupportedModelError(
            f"{type(adapter).__name__} does not say where feed-forward blocks are (`feed_forwards`)"
            if not adapter.feed_forwards
            else "the model has no neurons left"
        )
    named = [block.site for block in blocks]
    asked = widths_asked(named, named, keep, "keep")
    counts = {block.path: number_kept(asked[block.path], block) for block in blocks if block.path in asked}
    chosen = [block for block in blocks if counts.get(block.path, block.num_neurons) < block.num_neurons]
    check_feed_forwards(model, chosen)
    fits = fitted(model, chosen, list(NoticingFew(batches)), counts)
    before = model.num_parameters()
    # Nothing has changed up to here; nothing can fail from here on.
    states, reports = {}, []
    for block in chosen:
        (kept, refit, lost), was = fits[block.path], FeedForwardGeometry.of(block)
        states[block.path] = keep_neurons(block, block.state, kept, refit)
        now = FeedForwardGeometry.of(block)
        sizes = was.neurons, now.neurons, size_of(was).parameters, size_of(now).parameters
        reports.append(PrunedBlock(block.path, block.role, *sizes, share_lost=lost))
    layers.write(states)
    return PruneNeuronsReport(tuple(reports), before, model.num_parameters())


def number_kept(asked: Kept, block: OpenFeedForward) -> int:
    """Return the number of neurons that a block keeps.

    Raises:
        ArgumentError: if it is out of range, a bool, or of another type.
    """
    where, has = f"keep {asked!r} for {block.path}", block.num_neurons
    if isinstance(asked, bool) or not isinstance(asked, Real):
        raise ArgumentError(f"{where}: expected a number of neurons, or a share in (0, 1]")
    if isinstance(asked, Integral):
        if not 0 <= asked <= has:
            raise ArgumentError(f"{where}: it has {has} neurons: expected 0 to {has}")
        return int(asked)
    if not (math.isfinite(asked) and 0 < asked <= 1):
        raise ArgumentError(f"{where}: a float is a share of its {has} neurons and must be in (0, 1]")
    return min(math.ceil(math.ceil(float(asked) * has) / MULTIPLE) * MULTIPLE, has)


def fitted(
    model: PreTrainedModel, blocks: list[OpenFeedForward], batches: list[Mapping], counts: Mapping[str, int]
) -> dict[str, tuple[list[int], OutputWeights, float]]:
    """Return the neurons that stay, the last projection for them, and its error, by the path of the block."""
    if not blocks:
        return {}
    found, seen = {}, CalibratedSites(model, [], [], blocks, batches)
    for block in progress_bar(blocks, desc="choosing neurons"):
        with few_threads(block.num_neurons):  # names for calibrations would keep them in memory
            found[block.path] = fitted_block(block, seen.take(block.path).outputs[block.path], counts[block.path])
    return found


def fitted_block(block: OpenFeedForward, moments: InputMoments, count: int) -> tuple[list[int], OutputWeights, float]:
    """Return the neurons of a block that stay, the last projection for them, and its error."""
    regression = NeuronRegression.of_block(block, moments)
    kept = most_costly(regression.removal_costs(), count)
    errors = refit_errors(regression, torch.tensor(kept, dtype=torch.long), [count], moments)
    return kept, regression.output(kept), errors[count]
