"""Routed experts: stacked weights, tokens sorted by expert, one matrix product per expert and projection.

Every gather here has a gather as its gradient (the two are each other's inverse permutation), so that nothing is
summed in an order that could vary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lanewise.config import DeepSeekModel
from lanewise.models.feedforward import swiglu
from lanewise.models.seams import ALONE, Seams
from lanewise.models.spec import Cut, Declared, ParamSpec


class Experts(Declared):
    """E SwiGLU experts. Stacked, an expert that gets no token still gets a gradient: zero."""

    seams: Seams = ALONE

    def __init__(self, config: DeepSeekModel) -> None:
        super().__init__()
        E, F, H = config.experts, config.expert_hidden, config.hidden
        self.count = E

        def stack(name: str, outputs: int, inputs: int, inner: int) -> torch.nn.Parameter:
            cuts = {"ep": Cut(0, E), "tp": Cut(inner, F)}
            return self.declare(ParamSpec(name, (E, outputs, inputs), "expert", "normal", config.init_std, cuts=cuts))

        self.gate, self.up, self.down = stack("gate", F, H, 1), stack("up", F, H, 1), stack("down", H, F, 2)

    def forward(
        self,
        x_SH: Tensor,
        experts_SK: Tensor,
        weights_SK: Tensor,
        beside: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Sum over each token's experts of weight * expert(x), plus beside(x), computed while rows travel: [S, H]."""
        order_P = experts_SK.flatten().argsort(stable=True)  # pairs (token, choice), sorted by expert
        place_SK = order_P.argsort().view(experts_SK.shape)  # where each pair went
        sizes = torch.bincount(experts_SK.flatten(), minlength=self.count).tolist()
        arrive, sizes, back = self.seams.dispatched(_Send.apply(x_SH, order_P, place_SK), sizes)
        shared_SH = beside(x_SH) if beside is not None else None
        x_PH = arrive()
        inner_PF = swiglu(_Grouped.apply(x_PH, self.gate, sizes), _Grouped.apply(x_PH, self.up, sizes))
        y_SKH = _Return.apply(back(_Grouped.apply(inner_PF, self.down, sizes)), order_P, place_SK)
        y_SH = (y_SKH * weights_SK[..., None]).sum(1).to(x_SH.dtype)
        return y_SH if shared_SH is None else y_SH + shared_SH


class _Send(torch.autograd.Function):
    """A row of x for each pair, in the experts' order."""

    @staticmethod
    def forward(ctx: Any, x_SH: Tensor, order_P: Tensor, place_SK: Tensor) -> Tensor:
        ctx.save_for_backward(place_SK)
        return x_SH[order_P // place_SK.shape[1]]

    @staticmethod
    def backward(ctx: Any, g_PH: Tensor) -> tuple[Tensor, None, None]:
        (place_SK,) = ctx.saved_tensors
        return g_PH[place_SK].sum(1), None, None


class _Return(torch.autograd.Function):
    """Pairs back in the tokens' order."""

    @staticmethod
    def forward(ctx: Any, y_PH: Tensor, order_P: Tensor, place_SK: Tensor) -> Tensor:
        ctx.save_for_backward(order_P)
        return y_PH[place_SK]

    @staticmethod
    def backward(ctx: Any, g_SKH: Tensor) -> tuple[Tensor, None, None]:
        (order_P,) = ctx.saved_tensors
        return g_SKH.flatten(0, 1)[order_P], None, None


class _Grouped(torch.autograd.Function):
    """y = x w[e]^T for consecutive groups of rows, `sizes[e]` of them for expert e. The weights' gradient is written
    once, each expert into its own slice."""

    @staticmethod
    def forward(ctx: Any, x_PI: Tensor, w_EOI: Tensor, sizes: list[int]) -> Tensor:
        ctx.save_for_backward(x_PI, w_EOI)
        ctx.sizes = sizes
        y_PO = x_PI.new_empty(len(x_PI), w_EOI.shape[1])
        for x, w, y in zip(x_PI.split(sizes), w_EOI, y_PO.split(sizes), strict=True):
            torch.mm(x, w.T, out=y)
        return y_PO

    @staticmethod
    def backward(ctx: Any, g_PO: Tensor) -> tuple[Tensor, Tensor, None]:
        x_PI, w_EOI = ctx.saved_tensors
        dx_PI, dw_EOI = torch.empty_like(x_PI), torch.empty_like(w_EOI)
        groups = (x_PI.split(ctx.sizes), w_EOI, g_PO.split(ctx.sizes), dx_PI.split(ctx.sizes), dw_EOI)
        for x, w, g, dx, dw in zip(*groups, strict=True):
            torch.mm(g, w, out=dx)
            torch.mm(g.T, x, out=dw)  # zeros where the expert has no row
        return dx_PI, dw_EOI, None
