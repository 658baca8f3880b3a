"""SwiGLU feed-forward (arXiv:2002.05202)."""

import torch.nn.functional as F
from torch import Tensor, nn

from lanewise.models.linear import Linear


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int, std: float) -> None:
        super().__init__()
        self.gate = Linear(width, inner, std)
        self.up = Linear(width, inner, std)
        self.down = Linear(inner, width, std)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(swiglu(self.gate(x), self.up(x)))
        return y
