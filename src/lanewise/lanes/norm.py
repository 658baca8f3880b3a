"""The gradient norm: fp64, over fixed blocks in fixed order, each parameter counted once."""

import torch
from torch import Tensor

SLICE = 2**18  # elements squared at a time: 2 MB of fp64, inside the cache


def block_squares(gradient: Tensor, block: int) -> Tensor:
    """Sum of squares of each block: [n] fp32 -> [n // block] fp64.

    A block's bits depend on its own elements only: rows are reduced one by one whatever their number.
    """
    rows = gradient.view(-1, block)
    step = max(1, SLICE // block)
    parts = [part.double().square_().sum(dim=1) for part in rows.split(step)]
    return torch.cat(parts) if parts else gradient.new_zeros(0, dtype=torch.float64)
