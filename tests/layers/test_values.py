"""Narrower values: how a new model begins."""

import torch
from torch import nn

from collab_heads.layers.values import keep_value_rows


def test_leading_rows_and_columns_stay_and_lie_in_order():
    """In the order of rows: what is sent to other processes is memory."""
    value, output = nn.Linear(6, 8), nn.Linear(8, 6)
    rows, columns = value.weight.detach().clone(), output.weight.detach().clone()
    keep_value_rows(value, output, 4, 3)
    kept = [0, 1, 2, 4, 5, 6]
    assert torch.equal(value.weight, rows[kept]) and torch.equal(output.weight, columns[:, kept])
    assert all(parameter.is_contiguous() for parameter in (*value.parameters(), *output.parameters()))
