"""Four bits of bitsandbytes on a CPU, whose kernels do not take all widths that changed models have."""

import functools
import re
from typing import Any

import torch
from transformers import PreTrainedModel

from collab_heads.errors import UnsupportedModelError

WIDE_KERNEL = "support_avx512bf16_for_cpu"  # attribute of bitsandbytes' Linear4bit
ROWS = 32  # of the weight [out, in] that the kernel takes at once
TRIED = 64  # rows of the weights that are tried out: with fewer, some wrong widths look right


def leave_wide_kernel(module: Any) -> None:
    """Make a Linear of bitsandbytes skip its AVX-512 kernel if its weight does not consist of whole blocks, in place.

    Otherwise its first forward pass fails: "N must be divisible by block_n", or a shape with a 0.

    Args:
        module: any module of a changed model.
    """
    if getattr(module, WIDE_KERNEL, False):
        rows, columns = module.out_features, module.in_features
        if rows % ROWS or columns % module.weight.blocksize:
            setattr(module, WIDE_KERNEL, False)


def check_four_bits(model: PreTrainedModel) -> None:
    """Check that the weights of a changed model that were quantised to four bits while it loaded are read rightly.

    bitsandbytes 0.50 is wrong on CPUs with AVX-512, at multiples of 16 that are not multiples of its block of 64
    weights. Few stock models have such widths. Whether the installed version is wrong is tried out.

    Raises:
        UnsupportedModelError: if some are not; the first one is named, with its width.
    """
    wrong = {}
    for path, module in model.named_modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is None or module.weight.device.type != "cpu":
            continue
        if not reads_right(state.shape[-1], state.blocksize, state.quant_type):
            wrong[path] = state.shape[-1]
    if not wrong:
        return
    from bitsandbytes import __version__

    path, width = next(iter(wrong.items()))
    names = sorted({re.split(r"(?:^|\.)\d+\.", each)[-1] for each in wrong})  # the ends of paths, without layers
    raise UnsupportedModelError(
        f"{path} reads {width} numbers, and on this CPU bitsandbytes {__version__} does not give weights of this width "
        f"back from four bits ({len(wrong)} of the modules have such widths): leave them as they are with "
        f"BitsAndBytesConfig(..., llm_int8_skip_modules={names}), load the model in eight bits or on a GPU, or "
        "compress it with multiple_of=64"
    )


@functools.lru_cache
def reads_right(width: int, blocksize: int, kind: str) -> bool:
    """Return True if bitsandbytes gives weights back that four bits hold exactly: +s or -s, with an s for each block.

    Args:
        width: the width of the input of a Linear.
        blocksize: the number of weights that share a scale.
        kind: "nf4" or "fp4".
    """
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    numbers = torch.arange(TRIED * width)
    signs = 1 - 2 * (numbers * numbers % 7 % 2)
    weight = (signs * (1 + numbers // blocksize % 100)).view(TRIED, width).float()
    return torch.equal(dequantize_4bit(*quantize_4bit(weight, quant_type=kind, blocksize=blocksize)), weight)
