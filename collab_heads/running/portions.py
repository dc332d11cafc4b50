"""Cut a calibration batch into portions of similar length, without the padding that a portion does not need.

Real batches hold sentences of many lengths: of 256 sentences of STS-B in batches of 32, over half of all positions are
padding. The results for real tokens do not depend on the padding after them, so this padding can be left out.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

PORTION = 384  # positions, padding included
ROWS_WITHOUT_TOKENS = 16  # rows per portion of images and audio, which have no positions here
# A mask -> the inputs whose second dimension has the same positions.
SIDES = {
    "attention_mask": ("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds"),
    "encoder_attention_mask": ("encoder_attention_mask", "encoder_hidden_states"),
    "decoder_attention_mask": ("decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds"),
}
TOKENS = ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds")
IGNORED = -100  # a label that does not count


def portions(batch: Mapping, is_encoder_decoder: bool, size: int = PORTION) -> Iterator[Mapping]:
    """Cut a batch into portions of at most `size` positions (or one example), the shortest examples first.

    Args:
        batch: model inputs. It stays whole if its tensors do not all have one row per example, or if it holds anything
            but tensors, numbers and strings.
        is_encoder_decoder: whether a decoder reads the labels.
        size: positions per portion, encoder and decoder together.

    Yields:
        Batches of the same inputs. Positions at the end that are padding in every row of the portion are cut off. The
        masks say which positions are padding; for the decoder of an encoder-decoder that gets only labels, the
        labels do.
    """
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    lengths = row_lengths(batch, is_encoder_decoder, size)
    if lengths is None:
        yield batch
        return
    for rows in cut(lengths, size):
        portion = {**batch, **{name: tensor[rows.to(tensor.device)] for name, tensor in tensors.items()}}
        yield without_padding(portion, is_encoder_decoder)


def whole(batch: Mapping) -> tuple[Mapping]:
    """Return a batch as its only portion."""
    return (batch,)


def row_lengths(batch: Mapping, is_encoder_decoder: bool, size: int = PORTION) -> Tensor | None:
    """Return the positions of every row, [B], of both sides together; None for a batch that stays whole.

    Args:
        batch: model inputs.
        is_encoder_decoder: whether a decoder reads the labels.
        size: positions per portion; rows of images and audio count as a part of it.
    """
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    counts = {len(tensor) if tensor.ndim else 0 for tensor in tensors.values()}
    simple = all(isinstance(batch[name], int | float | str | None) for name in batch if name not in tensors)
    if len(counts) != 1 or counts == {0} or not simple:
        return None
    lengths = torch.zeros(counts.pop(), dtype=torch.long)
    for _, used in sides(batch, is_encoder_decoder):
        lengths += ends(used)
    if not lengths.any():
        lengths += length_of_rows(tensors) or max(size // ROWS_WITHOUT_TOKENS, 1)
    return lengths


def length_of_rows(tensors: Mapping[str, Tensor]) -> int:
    """Return the number of positions of the rows of a batch without masks; 0 if it holds no tokens."""
    held = (tensors[name] for name in TOKENS if name in tensors)
    return sum(tensor.shape[1] for tensor in held if tensor.ndim > 1)


def without_padding(batch: Mapping, is_encoder_decoder: bool) -> dict:
    """Return a batch without the positions at the end that are padding in every row."""
    found = dict(batch)
    for names, used in list(sides(batch, is_encoder_decoder)):
        longest = max(int(ends(used).max()), 1)
        found |= {name: found[name][:, :longest].contiguous() for name in names}
    return found


def cut(lengths: Tensor, size: int) -> Iterator[Tensor]:
    """Sort examples by length [B] and cut them into portions whose number times longest length stays within `size`.

    Yields:
        The indices of the examples of a portion; an example longer than `size` is a portion by itself.
    """
    order = lengths.argsort(stable=True)
    start = 0
    for stop in range(1, len(order) + 1):
        if stop == len(order) or (stop + 1 - start) * lengths[order[stop]] > size:
            yield order[start:stop]
            start = stop


def sides(batch: Mapping, is_encoder_decoder: bool) -> Iterator[tuple[Sequence[str], Tensor]]:
    """Group the inputs that have the same positions.

    Yields:
        The names of the inputs of a group, and which of their positions are used: [B, T] bool.
    """
    matrices = {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.ndim > 1}
    for mask, names in SIDES.items():
        if mask in matrices and matrices[mask].ndim == 2:
            labelled = mask == ("decoder_attention_mask" if is_encoder_decoder else "attention_mask")
            labelled &= "labels" in matrices and not matrices["labels"].is_floating_point()  # those are of examples
            beside = [name for name in (*names, *["labels"] * labelled) if name in matrices]
            # a mask without such inputs belongs to images, which have no dimension of positions
            if len(beside) > 1 and len({matrices[name].shape[1] for name in beside}) == 1:
                yield beside, matrices[mask] != 0
    if is_encoder_decoder and "labels" in matrices and not any(name.startswith("decoder_") for name in matrices):
        yield ["labels"], matrices["labels"] != IGNORED


def ends(used: Tensor) -> Tensor:
    """Return the index after the last used position of every row, 0 where none is used: [B, T] -> [B]."""
    positions = torch.arange(1, used.shape[1] + 1, device=used.device)
    return (used * positions).amax(1).cpu()
