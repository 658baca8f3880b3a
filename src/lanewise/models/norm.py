"""RMSNorm (arXiv:1910.07467), statistics in fp32 whatever the weights are."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lanewise.models.spec import Declared, ParamSpec


class _RMSNorm(torch.autograd.Function):
    """Written out for the CPU: there torch's own backward takes twice the passes over memory (fp32: 3x our time).

    With r = 1/rms(x):  y = x r w,  dx = r (g w - x r^2 mean(g w x)),  dw = sum over rows of r g x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # once: a product of two dtypes would convert again
        size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        r = (size.square() / x.shape[-1] + eps).rsqrt()
        ctx.save_for_backward(x, weight, r)
        return (wide * r).mul_(weight.to(wide.dtype)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, r = ctx.saved_tensors
        wide, g, w = x.to(r.dtype), g.to(r.dtype), weight.to(r.dtype)
        gx_SH = (g * wide).flatten(0, -2)
        dw = r.flatten() @ gx_SH
        pull = (gx_SH @ w).view_as(r) * r.pow(3) / x.shape[-1]
        dx = (g * w).mul_(r).addcmul_(wide, pull, value=-1)
        return dx.to(x.dtype), dw.to(weight.dtype), None


class RMSNorm(Declared):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = self.declare(ParamSpec("weight", (width,), "norm", "ones"))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _RMSNorm.apply(x, self.weight, self.eps)
        return y
