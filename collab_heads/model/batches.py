"""Run a model on calibration batches: checked, in evaluation mode, with a backend that fits, and left as it was."""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor
from transformers import PreTrainedModel

from collab_heads.bars import progress_bar
from collab_heads.errors import CalibrationError, CollabHeadsError
from collab_heads.model.backends import evaluating
from collab_heads.model.masks import token_masks
from collab_heads.model.modalities import check_modalities
from collab_heads.model.offloading import input_device


def check_batches(batches: Iterable[Mapping]) -> list[Mapping]:
    """Return batches as a list, or raise CalibrationError if there are none or they are no dicts."""
    return list(each_batch(batches))


def each_batch(batches: Iterable[Mapping]) -> Iterator[Mapping]:
    """Yield batches one by one, as they are asked for; raises what `check_batches` does, when it shows."""
    if not isinstance(batches, Iterable) or isinstance(batches, Mapping | str):
        raise CalibrationError(
            f"batches is a {type(batches).__name__}, expected an iterable of input dicts, "
            "such as [tokenizer(texts, return_tensors='pt', padding=True), ...]"
        )
    index = -1
    for index, batch in enumerate(batches):
        if not isinstance(batch, Mapping):
            raise CalibrationError(f"batch {index} is a {type(batch).__name__}, expected a dict of model inputs")
        for name, value in batch.items():
            if not isinstance(name, str):
                raise CalibrationError(f"batch {index}: {name!r:.80} is not the name of a model input")
            if isinstance(value, Tensor) and value.is_meta:
                raise CalibrationError(f"batch {index}: its {name} is on the meta device, without values")
        yield batch
    if index < 0:
        raise CalibrationError("batches is empty: pass 32 to 512 sentences as batches of model inputs")


def run_batches(
    model: PreTrainedModel,
    batches: Iterable[Mapping],
    masks: dict[str, Tensor | None],
    what: str,
    masks_of: Callable[[PreTrainedModel, Mapping], Mapping[str, Tensor | None]] | None = None,
    cut: Callable[[Mapping], Iterable[Mapping]] = lambda batch: (batch,),
) -> None:
    """Run the model on every batch, without gradients; one batch is held at a time.

    Args:
        model: the model.
        batches: checked as they come, see `each_batch`.
        masks: holds the token masks of the batch under way.
        what: said beside the progress bar.
        masks_of: what `masks` holds; None for `token_masks`.
        cut: batch -> the portions of it that are run one after the other.
    """
    total, masks_of = operator.length_hint(batches) or None, masks_of or token_masks
    device = input_device(model)
    with evaluating(model):
        for index, batch in enumerate(progress_bar(each_batch(batches), total=total, desc=what, leave=False)):
            inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
            try:
                check_modalities(model, inputs)
                for portion in cut(inputs):
                    masks.clear()
                    masks.update(masks_of(model, portion))
                    model(**portion)
            except CollabHeadsError:
                raise
            except Exception as error:  # whatever the model raises about its inputs, with the batch named
                raise CalibrationError(
                    f"{type(model).__name__} cannot take batch {index} with {sorted(inputs)}: {error}"
                ) from error
