"""Cross-entropy from the last hidden states, without ever holding all logits."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lanewise.models.spec import IGNORE

CHUNK = 2**21  # logits held at a time, at least MIN_ROWS rows of them
MIN_ROWS = 128


class _CrossEntropySum(torch.autograd.Function):
    """Gradients are formed in the forward, chunk by chunk, while the logits are at hand: the same three matrix
    products as usual, but no logits survive and no log-softmax is read back. Backward only scales them."""

    @staticmethod
    def forward(ctx: Any, x_SH: Tensor, weight_VH: Tensor, labels_S: Tensor) -> Tensor:
        dtype = torch.promote_types(x_SH.dtype, torch.float32)
        rows = max(CHUNK // weight_VH.shape[0], MIN_ROWS)
        total = x_SH.new_zeros((), dtype=dtype)
        dx_SH = torch.empty_like(x_SH) if ctx.needs_input_grad[0] else None
        dw_VH = torch.zeros_like(weight_VH, dtype=dtype) if ctx.needs_input_grad[1] else None
        for start in range(0, len(labels_S), rows):
            part = slice(start, start + rows)
            ignored = (labels_S[part] == IGNORE)[:, None]
            labels = labels_S[part, None].masked_fill(ignored, 0)
            logp = F.log_softmax(F.linear(x_SH[part], weight_VH), dim=-1, dtype=dtype)
            total -= logp.gather(1, labels).masked_fill(ignored, 0).sum()
            if dx_SH is None and dw_VH is None:
                continue
            # d(-log p[label]) / d logits = softmax - one-hot. Ignored rows are cut out at width H, not at width V.
            g = logp.exp_().scatter_add_(1, labels, logp.new_full((), -1).expand(labels.shape)).to(x_SH.dtype)
            if dx_SH is not None:
                dx_SH[part] = (g @ weight_VH).masked_fill_(ignored, 0)
            if dw_VH is not None:
                dw_VH += g.T @ x_SH[part].masked_fill(ignored, 0)
        ctx.save_for_backward(dx_SH, None if dw_VH is None else dw_VH.to(weight_VH.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        dx_SH, dw_VH = (None if d is None else (d * scale).to(d.dtype) for d in ctx.saved_tensors)
        return dx_SH, dw_VH, None


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(torch.ones_like(loss))
        return x.clone()  # not a view: what a pipeline's stage hands on must be one that can be cut off its graph

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        return g, ctx.saved_tensors[0]


def carry(x: Tensor, loss: Tensor) -> Tensor:
    """x, whose backward differentiates `loss` as well: for a loss that is known before the last part of the model."""
    y: Tensor = _Carry.apply(x, loss)
    return y


def cross_entropy_sum(x_BTH: Tensor, weight_VH: Tensor, labels_BT: Tensor) -> Tensor:
    """Sum over valid labels of -log softmax(x weight^T)[label], in nats: an fp32 scalar, 0 if none is valid.

    Softmax and sums are in fp32 whatever the inputs are; ignored labels (-100) give no loss and a zero gradient.
    """
    total: Tensor = _CrossEntropySum.apply(x_BTH.flatten(0, -2), weight_VH, labels_BT.flatten())
    return total
