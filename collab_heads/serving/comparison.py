"""Run an exported model and its original on the same inputs: how far their outputs differ, and the time of both."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel

from collab_heads.base.numerics import keeping_threads
from collab_heads.base.progress import progress_bar
from collab_heads.errors import ModelStateError, NonFiniteError
from collab_heads.running.batches import naming_batch, output_mask
from collab_heads.serving.example_inputs import first_row, padded, without_labels

NEW_TOKENS, ROUNDS = 8, 5
GREEDY: dict[str, Any] = {"do_sample": False, "num_beams": 1, "return_dict_in_generate": True}
GREEDY |= {"output_logits": True, "output_scores": True, "min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS}


class Comparison(NamedTuple):
    """The differences of an exported model from its original; the numbers are those of `ExportReport`."""

    difference: float
    agreeing: float | None
    margin: float
    seconds_before: float
    seconds_after: float


@dataclass
class Differences:
    """The differences of an exported model from its original, in what has been compared so far.

    Attributes:
        largest: the largest difference of each output.
        scale: the largest value of each output of the original.
        values: the number of values that were compared.
        same: the number of tokens that both chose.
        tokens: the number of tokens that the original chose.
        margin: how far, where a row first has another token, the original's own is ahead: the largest difference of
            their scores.
    """

    largest: dict[str, float] = field(default_factory=dict)
    scale: dict[str, float] = field(default_factory=dict)
    values: int = 0
    same: int = 0
    tokens: int = 0
    margin: float = 0.0

    def add(self, name: str, expected: Tensor, found: object, scale: float | None = None) -> None:
        """Compare an output.

        Args:
            name: its name.
            expected: that of the original.
            found: that of the exported model.
            scale: the largest value of the output, if `expected` is a part of it.

        Raises:
            NonFiniteError: if the original puts out NaN or inf.
            ModelStateError: if the exported model has no such output, or one of another shape, or NaN or inf in it.
        """
        check_output(name, expected)
        if not isinstance(found, Tensor):
            raise ModelStateError(f"the exported model has no output {name}, which PyTorch has: nothing was written")
        if found.shape != expected.shape:
            raise ModelStateError(
                f"the exported model puts out {name} of shape {tuple(found.shape)} where PyTorch's is "
                f"{tuple(expected.shape)}: nothing was written"
            )
        a, b = expected.float(), found.float()
        is_finite = a.isfinite()
        if not (b.isfinite() == is_finite).all() or not torch.equal(a[~is_finite], b[~is_finite]):
            raise ModelStateError(
                f"the exported model puts out NaN or inf in {name}, and PyTorch does not: nothing was written. Export "
                "in float32 (model.float()), or choose another target"
            )
        if is_finite.any():
            a, b = a[is_finite], b[is_finite]
            self.largest[name] = max(self.largest.get(name, 0.0), float((a - b).abs().max()))
            self.scale[name] = max(self.scale.get(name, 0.0), float(a.abs().max()) if scale is None else scale)
            self.values += a.numel()

    def add_tokens(self, expected: Tensor, found: Tensor, scores: Sequence[Tensor]) -> None:
        """Compare the tokens that both chose greedily.

        Args:
            expected: those of the original, [B, T].
            found: those of the exported model, [B, T]; -1 for one that is none of the vocabulary.
            scores: of the original at every step, [B, V] each.

        Raises:
            ModelStateError: if there are fewer or more tokens, or the original could not choose one.
        """
        if expected.shape != found.shape:
            raise ModelStateError(
                f"the exported model decodes tokens of shape {tuple(found.shape)} where PyTorch's are of shape "
                f"{tuple(expected.shape)}: nothing was written"
            )
        equal = expected == found
        self.same, self.tokens = self.same + int(equal.sum()), self.tokens + equal.numel()
        for row in (~equal).any(1).nonzero().flatten().tolist():
            step = int(equal[row].int().argmin())  # what follows continues another text
            own, other = int(expected[row, step]), int(found[row, step])
            ahead = scores[step][row, own] - scores[step][row, other] if other >= 0 else torch.tensor(torch.inf)
            if not ahead.isfinite():
                raise ModelStateError(
                    f"the exported model chooses token {other} where PyTorch may not, and chooses {own}: nothing was "
                    "written. Compare what both are told to suppress or to force (model.generation_config)"
                )
            self.margin = max(self.margin, float(ahead))

    def comparison(self, before: float, after: float) -> Comparison:
        """Return the differences as shares, with the seconds of both.

        Raises:
            ModelStateError: if nothing was compared.
        """
        if not self.values:
            raise ModelStateError("no output could be compared with PyTorch's: nothing was written. Pass other batches")
        difference = max(largest / (self.scale[name] or 1.0) for name, largest in self.largest.items())
        agreeing, scale = self.same / self.tokens if self.tokens else None, max(self.scale.values()) or 1.0
        return Comparison(difference, agreeing, self.margin / scale, before, after)


@contextmanager
def naming_outputs(model: PreTrainedModel) -> Iterator[None]:
    """Have a model return its outputs by name while the context is open, also where its config says otherwise."""
    configs = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    before = [config.return_dict for config in configs]
    try:
        for config in configs:
            config.return_dict = True
        yield
    finally:
        for config, was in zip(configs, before, strict=True):
            config.return_dict = was


@torch.no_grad()
def check_examples(model: PreTrainedModel, batches: Sequence[Mapping]) -> None:
    """Run a model on the batches that its exported model will be compared on.

    Raises:
        CalibrationError: if the model cannot take one, or decode after it.
        NonFiniteError: if it puts out NaN or inf.
    """
    for index, batch in enumerate(progress_bar(variants(model, batches), total=len(batches) + 2, desc="checking")):
        inputs = without_labels(batch)
        with naming_batch(model, index if index < len(batches) else 0, inputs):
            if model.can_generate():  # not by a family's own `generate`, which may begin again
                outputs = cast(Any, GenerationMixin).generate(model, **source_of(inputs), **GREEDY)
                check_output("logits", torch.stack(outputs.logits))
            else:
                for name, tensor in floats(model(**inputs)):
                    check_output(name, counted(model, inputs, name, tensor))


def check_output(name: str, tensor: Tensor) -> None:
    """Raise NonFiniteError if an output of the original contains NaN or inf; the logit of a token may be -inf."""
    if tensor.isnan().any() or tensor.isposinf().any():
        raise NonFiniteError(
            f"the model itself puts out NaN or inf in {name}: nothing was written. Load it again, take a checkpoint "
            "from before, or run it in float32 (model.float())"
        )


@torch.no_grad()
def compare(model: Any, served: Any, batches: Sequence[Mapping], *, generates: bool) -> Comparison:
    """Compare an exported model with its original on some batches; the first one is timed."""
    found = Differences()
    for batch in progress_bar(variants(model, batches), total=len(batches) + 2, desc="comparing"):
        inputs = without_labels(batch)
        if generates:
            source = source_of(inputs)
            compare_generation(found, greedy(model, source), greedy(served, source))
        else:
            compare_outputs(found, model, inputs, model(**inputs), served(**inputs))
    first = without_labels(batches[0])
    run = greedy if generates else call
    return found.comparison(
        *in_turns([partial(run, each, source_of(first) if generates else first) for each in (model, served)])
    )


def variants(model: Any, batches: Sequence[Mapping]) -> Iterator[Mapping]:
    """Yield batches, the first row of the first one alone, and all of it with padding.

    A graph may have taken the number of rows for a constant, or have no mask.
    """
    yield from batches
    yield first_row(batches[0])
    yield padded(model, batches[0])


def compare_outputs(found: Differences, model: Any, inputs: Mapping, expected: Mapping, others: Mapping) -> None:
    """Compare the tensors in two outputs; padding does not count."""
    for name, tensor in floats(expected):
        other = others.get(name)
        if isinstance(other, Tensor) and other.shape == tensor.shape:
            other = counted(model, inputs, name, other)
            tensor = counted(model, inputs, name, tensor)
        found.add(name, tensor, other)


def counted(model: Any, inputs: Mapping, name: str, tensor: Tensor) -> Tensor:
    """Return what counts of an output: of one for each token, all but padding."""
    mask = output_mask(model, inputs) if tensor.ndim == 3 and name in ("logits", "last_hidden_state") else None
    return tensor if mask is None else tensor[mask]


def floats(outputs: Mapping) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of outputs that hold floating point numbers, with their names."""
    for name, tensor in outputs.items():
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            yield name, tensor


def compare_generation(found: Differences, expected: Any, other: Any) -> None:
    """Compare greedy decoding: logits of a row count until both have chosen different tokens."""
    a, b = (each.sequences[:, -len(each.logits) :] for each in (expected, other))  # the tokens after a prompt
    found.add_tokens(a, b, expected.scores)
    alike = torch.ones(len(a), dtype=torch.bool)
    for step, (one, two) in enumerate(zip(expected.logits, other.logits, strict=True)):
        if alike.any():
            found.add("logits", one[alike], two[alike])
        alike = alike & (a[:, step] == b[:, step])


def greedy(model: Any, inputs: Mapping) -> Any:
    """Decode some tokens greedily; the logits and the scores of every step come along."""
    return model.generate(**inputs, **GREEDY)


def call(model: Any, inputs: Mapping) -> Any:
    """Run a model on a batch."""
    return model(**inputs)


def source_of(inputs: Mapping) -> dict[str, Any]:
    """Return the inputs that a model generates from: without the text that the decoder would read."""
    return {name: value for name, value in inputs.items() if not name.startswith("decoder_")}


def in_turns(calls: Sequence[Callable[[], object]], rounds: int = ROUNDS) -> list[float]:
    """Return the median seconds of some calls, made in turns, with one thread of PyTorch; the first turn is not timed.

    Args:
        calls: the functions.
        rounds: the turns that are timed.
    """
    seconds = [[0.0] * rounds for _ in calls]
    with keeping_threads():
        torch.set_num_threads(1)
        for turn in progress_bar(range(-1, rounds), desc="timing"):
            for number, call in enumerate(calls):
                started = time.perf_counter()
                call()
                seconds[number][max(turn, 0)] = time.perf_counter() - started
    return [statistics.median(each) for each in seconds]
