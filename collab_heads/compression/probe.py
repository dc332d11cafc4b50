"""Measure how far the output of a model moves when its attention changes, on examples that no fit has seen."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.errors import CalibrationError, NonFiniteError
from collab_heads.model.open_layers import OpenLayerSite, OpenSite
from collab_heads.running.batches import run_batches
from collab_heads.running.blocks import BlockStarts
from collab_heads.running.outputs import Output, fewer_logits, read_output, square_of
from collab_heads.running.portions import portions

ELEMENTS = 8 * 2**20  # of the output of a portion that are kept; of a larger one, an even sample of its rows


class Probe:
    """The outputs of a model on some batches when the probe was made, to compare later outputs with.

    Args:
        model: the model, unchanged.
        batches: input dicts as the model takes them.
        sites: the sites of attention whose tokens are counted.

    Attributes:
        longest: the largest number of tokens that a site attends to, without padding after them.

    Raises:
        CalibrationError: if there are no batches, the model cannot take one, or its output does not vary.
        NonFiniteError: if its output contains NaN or inf.
    """

    def __init__(self, model: PreTrainedModel, batches: Sequence[Mapping], sites: Sequence[OpenSite]):
        self.model, self.batches, self.longest = model, batches, 0

        def note_length(_: object, args: tuple[Tensor, ...]) -> None:
            self.longest = max(self.longest, args[0].shape[1])

        handles = [site.value.register_forward_pre_hook(note_length) for site in sites]
        try:
            self.kept: list[Output] = []
            self.run(self.kept.append)
        finally:
            for handle in handles:
                handle.remove()
        for output in self.kept:  # a probability may be 0, its logarithm -inf
            if not torch.isfinite(output.rows.exp() if output.is_distribution else output.rows).all():
                raise NonFiniteError("the model puts out NaN or inf on the calibration batches")
        self.square = square_of(self.kept)
        if not self.square:
            raise CalibrationError(
                f"the model puts out the same for the {sum(len(output.rows) for output in self.kept)} calibration "
                "examples or tokens that are held out (one example in eight): pass more examples, which differ"
            )

    def error(self) -> float:
        """Return the relative error of the model's present output: 0 if it is the same as when the probe was made.

        For numbers and states this is the root mean square of the change, relative to their standard deviation; for
        distributions it is the root of 2 KL: for small changes, the root mean square of the change of log-odds.
        """
        gaps: list[float] = []
        self.run(lambda output: gaps.append(float(self.kept[len(gaps)].squared_gap(output))))
        return math.sqrt(max(sum(gaps), 0.0) / self.square)

    def portions(self, batch: Mapping) -> Iterator[Mapping]:
        """Yield the portions of a batch, with `return_dict` set: outputs have names whatever the config says."""
        for portion in portions(batch, self.model.config.is_encoder_decoder):
            yield {**fewer_logits(self.model, portion, ELEMENTS), "return_dict": True}

    def starts(self, sites: Iterable[OpenLayerSite]) -> BlockStarts:
        """Return starts at the blocks of some sites: what comes before a change puts out what it did."""
        return BlockStarts(self.model, sites, self.batches, self.portions)

    def run(self, see: Callable[[Output], None]) -> None:
        """Run the model on all batches; `see` gets its present output for each portion."""

        def hook(model: PreTrainedModel, args: tuple, inputs: Mapping, outputs: Mapping) -> None:
            see(sampled(read_output(model, inputs, outputs)))

        handle = self.model.register_forward_hook(hook, with_kwargs=True)
        masks: dict[str, Tensor | None] = {}
        try:
            run_batches(self.model, self.batches, masks, "measuring", cut=self.portions)
        finally:
            handle.remove()


def sampled(output: Output) -> Output:
    """Return an output with at most about `ELEMENTS` elements: all rows, or an even sample."""
    stride = math.ceil(output.rows.numel() / ELEMENTS)
    return replace(output, rows=output.rows[::stride].clone()) if stride > 1 else output
