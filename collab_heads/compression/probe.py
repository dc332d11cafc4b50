"""How far the output of a model moves when its attention is changed, on examples that no fit has seen."""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.errors import CalibrationError, NonFiniteError
from collab_heads.model.batches import run_batches
from collab_heads.model.open_site import OpenSite
from collab_heads.model.outputs import Output, read_output
from collab_heads.model.portions import portions

ELEMENTS = 8 * 2**20  # of the output of a portion that are kept; of more an even sample of its rows


class Probe:
    """What a model puts out on some batches, as it was when the probe was made.

    Args:
        model: the model, as it is to be compared with.
        batches: input dicts as the model takes them.
        sites: whose tokens are counted.

    Attributes:
        longest: the most tokens that a site attends to, without padding after them.

    Raises:
        CalibrationError: if there are no batches, the model cannot take one, or what it puts out does not vary.
        NonFiniteError: if it puts out NaN or inf.
    """

    def __init__(self, model: PreTrainedModel, batches: Sequence[Mapping], sites: Sequence[OpenSite]):
        self.model, self.batches, self.longest = model, batches, 0

        def note_length(_: object, args: tuple[Tensor, ...]) -> None:
            self.longest = max(self.longest, args[0].shape[1])

        handles = [site.value.register_forward_pre_hook(note_length) for site in sites]
        try:
            self.kept = self.outputs()
        finally:
            for handle in handles:
                handle.remove()
        for output in self.kept:  # a probability may be 0, its logarithm -inf
            if not torch.isfinite(output.rows.exp() if output.is_distribution else output.rows).all():
                raise NonFiniteError("the model puts out NaN or inf on the calibration batches")
        self.square = Output(torch.cat([output.rows for output in self.kept]), self.kept[0].is_distribution).square()
        if not self.square:
            raise CalibrationError(
                f"the model puts out the same for the {sum(len(output.rows) for output in self.kept)} calibration "
                "examples or tokens that are held out (one example in eight): pass more examples, which differ"
            )

    def error(self) -> float:
        """How far the model is from what it was: relative, 0 for the same.

        For numbers and states the root mean square of the change, as a share of how they vary; for distributions the
        root of 2 KL, the root mean square of the change of log-odds.
        """
        gaps = [float(kept.squared_gap(output)) for kept, output in zip(self.kept, self.outputs(), strict=True)]
        return math.sqrt(max(sum(gaps), 0.0) / self.square)

    def portions(self, batch: Mapping) -> Iterator[Mapping]:
        """A batch in portions that give outputs with names, whatever the model's config says."""
        for portion in portions(batch, self.model.config.is_encoder_decoder):
            yield {**portion, "return_dict": True}

    def outputs(self) -> list[Output]:
        """What the model puts out now, for one portion of a batch after the other."""
        found: list[Output] = []

        def hook(model: PreTrainedModel, args: tuple, inputs: Mapping, outputs: Mapping) -> None:
            found.append(sampled(read_output(model, inputs, outputs)))

        handle = self.model.register_forward_hook(hook, with_kwargs=True)
        masks: dict[str, Tensor | None] = {}
        try:
            run_batches(self.model, self.batches, masks, "measuring", cut=self.portions)
        finally:
            handle.remove()
        return found


def sampled(output: Output) -> Output:
    """The part of an output that is kept."""
    stride = math.ceil(output.rows.numel() / ELEMENTS)
    return Output(output.rows[::stride].clone(), output.is_distribution) if stride > 1 else output
