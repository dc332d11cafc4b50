"""Weights in four bits on a CPU: bitsandbytes' kernel for AVX512-BF16 takes whole blocks only."""

from typing import Any

WIDE_KERNEL = "support_avx512bf16_for_cpu"  # attribute of bitsandbytes' Linear4bit
ROWS = 32  # of the weight [out, in] that the kernel takes at once


def leave_wide_kernel(module: Any) -> None:
    """Let a Linear of bitsandbytes compute as on other CPUs where its weight is not made of whole blocks, in place.

    Without this its first forward pass fails: "N must be divisible by block_n", or a shape with a 0.

    Args:
        module: any module of a changed model.
    """
    if getattr(module, WIDE_KERNEL, False):
        rows, columns = module.out_features, module.in_features
        if rows % ROWS or columns % module.weight.blocksize:
            setattr(module, WIDE_KERNEL, False)
