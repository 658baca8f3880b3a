"""SwiGLU feed-forward (arXiv:2002.05202)."""

import torch.nn.functional as F
from torch import Tensor, nn

from lanewise.models.linear import Linear
from lanewise.models.spec import Cut


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int, std: float) -> None:
        super().__init__()
        self.gate = Linear(width, inner, std, tp=Cut(0, inner))
        self.up = Linear(width, inner, std, tp=Cut(0, inner))
        self.down = Linear(inner, width, std, tp=Cut(1, inner))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(swiglu(self.gate(x), self.up(x)))
        return y
