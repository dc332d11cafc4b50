"""bitsandbytes as it will be once it reads four bits of every width rightly."""

from math import prod
from types import SimpleNamespace

import torch


def mend(monkeypatch):
    """Let bitsandbytes read all weights of a matrix as one row: a row is read rightly, whatever its width."""
    stock = torch.ops.bitsandbytes.dequantize_4bit.default

    def mended(packed, absmax, blocksize, quant_type, shape, dtype):
        return stock(packed, absmax, blocksize, quant_type, (1, prod(shape)), dtype).reshape(shape)

    monkeypatch.setattr(torch.ops.bitsandbytes, "dequantize_4bit", SimpleNamespace(default=mended))
