"""A grid for weights: blocks along the input, one half-precision scale a block, codes of few bits.

The grid is symmetric: a weight is its code times the scale of its block. A block has 32 inputs, codes of b bits run
from -2^(b-1) to 2^(b-1) - 1, and scales may be negative. With eight bits a block is a whole row, since engines multiply
in integers only where all inputs of an output share a scale, and codes run from -127 to 127. ONNX Runtime and OpenVINO
hold such weights as they are, and so does GGUF (Q4_0, Q8_0); CTranslate2 finds the codes of eight bits again. A weight
takes b + 1/2 bits, and 8 bits in a row. `fitting.weight_grid` puts weights there.

A module whose weight lies on a grid holds it in float32, where products of codes and scales are exact, and the bits in
an attribute. Codes and scales are found again from the weight itself.

Shapes: D outputs, n inputs, K blocks.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from collab_heads.base.option_values import BITS
from collab_heads.layers.layout import is_quantised, weight_of

BLOCK = 32
OF_ROWS = 8  # bits with one scale a row
WEIGHT_BITS = "collab_weight_bits"  # attribute of a module: the bits of its weight on the grid
BYTE = 8
PACKED = 1 << 20  # weights that are packed at once, about
SEEN = 4  # rows that are tried first: weights that were trained are on no grid


@dataclass(frozen=True)
class GridWeights:
    """The weights of a linear map, or of an embedding, on a grid.

    Attributes:
        codes: [D, n], int8.
        scales: [D, K], float16; see `num_blocks`.
        bits: the bits of a code.
    """

    codes: Tensor
    scales: Tensor
    bits: int

    @property
    def num_bytes(self) -> int:
        """The bytes that codes and scales take when they are packed."""
        return grid_bytes(*shape_of(self.codes), self.bits)

    def weight(self) -> Tensor:
        """Return the weights [D, n] in float32, in which products of codes and scales are exact."""
        return self.codes * over_blocks(self.scales, self.codes.shape[1])

    def packed(self) -> Tensor:
        """Return the codes in as few bytes as they need: [D, ceil(n / 32) * 4 * bits], uint8.

        A code counts from the smallest one. Eight codes of a row make `bits` bytes, the first code in the lowest bits
        of the first byte. Rows are filled up to multiples of 32 codes.
        """
        at_once = rows_at_once(self.codes.shape[1])
        return torch.cat([self.packed_rows(rows) for rows in self.codes.split(at_once)])

    def packed_rows(self, codes: Tensor) -> Tensor:
        stored = (filled(codes).to(torch.int16) + (1 << (self.bits - 1))).to(torch.uint8)
        groups = stored.unflatten(1, (-1, BYTE))[..., None]  # [rows, groups, 8 codes, 1]
        streams = groups >> torch.arange(self.bits, dtype=torch.uint8, device=codes.device) & 1
        return as_numbers(streams.flatten(-2).unflatten(-1, (self.bits, BYTE))).flatten(1)

    @classmethod
    def unpacked(cls, packed: Tensor, scales: Tensor, inputs: int) -> "GridWeights":
        """Return the weights whose codes `packed` holds; shapes tell the bits.

        Args:
            packed: as `packed` returned them.
            scales: [D, K], float16.
            inputs: n.

        Raises:
            ValueError: if the shapes do not fit each other.
        """
        whole = math.ceil(inputs / BLOCK) * BLOCK
        bits = packed.shape[-1] * BYTE // whole
        shapes = (len(scales), whole * bits // BYTE), (len(packed), num_blocks(inputs, bits))
        if bits not in BITS or (packed.shape, scales.shape) != shapes:
            raise ValueError(
                f"codes {list(packed.shape)} and scales {list(scales.shape)} are not those of weights with {inputs} "
                f"inputs on a grid of {', '.join(map(str, BITS))} bits"
            )
        made = [codes_in(rows, bits)[:, :inputs] for rows in packed.split(rows_at_once(inputs))]
        return cls(torch.cat(made).contiguous(), scales, bits)

    @classmethod
    def of(cls, weight: Tensor, bits: int) -> "GridWeights | None":
        """Return codes and scales whose products are these weights, bit for bit; None if there are none.

        Args:
            weight: [D, n], float32.
            bits: the bits of a code.
        """
        if not weight.numel():
            return None
        if not torch.isfinite(weight).all() or (len(weight) > SEEN and cls.of(weight[:SEEN], bits) is None):
            return None
        blocks = in_blocks(weight.detach(), bits).flatten(0, 1)  # [D * K, inputs of a block]
        extreme = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
        scales, codes = torch.zeros_like(extreme, dtype=torch.float16), torch.zeros_like(blocks, dtype=torch.int8)
        left = extreme.flatten().nonzero().flatten()
        for code in sorted((each for each in codes_of(bits) if each), key=abs, reverse=True):
            scale = (extreme[left] / code).half()
            found = nearest_codes(blocks[left], scale, bits)
            fit = (found * scale.float() == blocks[left]).all(-1)
            scales[left[fit]], codes[left[fit]] = scale[fit], found[fit].to(torch.int8)
            left = left[~fit]
            if not len(left):
                break
        if len(left):
            return None
        shape = len(weight), -1
        return cls(codes.view(shape)[:, : weight.shape[1]].contiguous(), scales.view(shape), bits)


def rows_at_once(inputs: int) -> int:
    """Return how many rows are packed at once: eight bits of a weight take eight bytes meanwhile."""
    return max(PACKED // max(inputs, 1), 1)


def as_numbers(streams: Tensor) -> Tensor:
    """Turn bits [..., b], the lowest first, into numbers [...], uint8."""
    places = (1 << torch.arange(streams.shape[-1], device=streams.device)).to(torch.uint8)
    return (streams * places).sum(-1, dtype=torch.uint8)


def codes_in(packed: Tensor, bits: int) -> Tensor:
    """Return the codes of packed rows [D, bytes]: [D, ceil(n / 32) * 32], int8."""
    streams = packed.unflatten(1, (-1, bits))[..., None] >> torch.arange(BYTE, dtype=torch.uint8, device=packed.device)
    stored = as_numbers((streams & 1).flatten(-2).unflatten(-1, (BYTE, bits))).flatten(1)
    return (stored.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)


def codes_of(bits: int) -> range:
    """Return the codes of so many bits."""
    return range((bits == OF_ROWS) - (1 << (bits - 1)), 1 << (bits - 1))


def nearest_codes(weight: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Return the codes whose products with the scales are nearest to weights; 0 where the scale is 0."""
    codes = codes_of(bits)
    return (weight / scales).nan_to_num(0.0, 0.0, 0.0).round().clamp(codes[0], codes[-1])


def over_blocks(scales: Tensor, inputs: int) -> Tensor:
    """Repeat the scale of a block for each of its inputs: [D, K] -> [D, n], float32."""
    size = BLOCK if scales.shape[1] > 1 else inputs
    return scales.float().repeat_interleave(size, dim=1)[:, :inputs]


def in_blocks(weight: Tensor, bits: int) -> Tensor:
    """Cut [D, n] into [D, K, 32], with zeros after the last input; with eight bits into [D, 1, n]."""
    return weight[:, None] if bits == OF_ROWS else filled(weight).unflatten(1, (-1, BLOCK))


def filled(matrix: Tensor) -> Tensor:
    """Fill rows up with zeros: [D, n] -> [D, a multiple of 32]."""
    return nn.functional.pad(matrix, (0, -matrix.shape[1] % BLOCK))


def num_blocks(inputs: int, bits: int) -> int:
    """Return the number of blocks of a row."""
    return 1 if bits == OF_ROWS else math.ceil(inputs / BLOCK)


def shape_of(matrix: Tensor) -> tuple[int, int]:
    outputs, inputs = matrix.shape
    return outputs, inputs


def grid_bytes(outputs: int, inputs: int, bits: int) -> int:
    """Return the bytes of weights [D, n]: packed codes and scales, or floating-point numbers of 16 bits and more."""
    if bits not in BITS:
        return outputs * inputs * bits // BYTE
    codes = math.ceil(inputs / BLOCK) * BLOCK * bits // BYTE
    return outputs * (codes + num_blocks(inputs, bits) * torch.float16.itemsize)


def bits_of(module: nn.Module) -> int | None:
    """Return the bits of the weight of a module that was put on a grid; None for any other, or without a weight."""
    weight = getattr(module, "weight", None)
    return vars(module).get(WEIGHT_BITS) if isinstance(weight, Tensor) and weight.numel() else None


def leave_grids(model: nn.Module) -> None:
    """Forget that weights of a model lie on grids: they stay as they are, and are stored in full."""
    for module in model.modules():
        vars(module).pop(WEIGHT_BITS, None)


def on_grid(model: nn.Module) -> Iterator[tuple[str, nn.Module, GridWeights | None]]:
    """Yield the modules of a model that were put on a grid: name, module, and its weights, None if they have left it.

    A weight that several modules share is yielded once, with the first of them.
    """
    bits = {id(module.weight): found for module in model.modules() if (found := bits_of(module)) is not None}
    for name, module in model.named_modules():
        if (found := bits.pop(id(getattr(module, "weight", None)), None)) is not None:
            weight = weight_of(module)
            is_plain = weight.dtype == torch.float32 and not (is_quantised(weight) or weight.is_meta)
            yield name, module, GridWeights.of(weight, found) if is_plain else None
