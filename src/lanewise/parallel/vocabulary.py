"""The two ends of a model whose vocabulary is cut over ranks. No rank ever holds all logits of a token."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lanewise.models.loss import CHUNK, MIN_ROWS
from lanewise.models.spec import IGNORE
from lanewise.parallel.collectives import gathered


def embedded_part(tokens_BT: Tensor, weight_VH: Tensor, first: int) -> Tensor:
    """The embeddings of those tokens that are in this rank's rows [first, first + V), zero for the others."""
    local_BT = tokens_BT - first
    elsewhere_BT = (local_BT < 0) | (local_BT >= len(weight_VH))
    x_BTH = F.embedding(local_BT.masked_fill(elsewhere_BT, 0), weight_VH)
    return x_BTH.masked_fill(elsewhere_BT[..., None], 0)


class _CrossEntropySum(torch.autograd.Function):
    """As `models.loss`, whose comments hold here too, with the rows of the weight cut over `group`.

    For each token the ranks tell each other three numbers: their largest logit, the sum of exponentials relative to
    it, and the label's logit if they have it. x's gradient is the part that comes from this rank's rows.
    """

    @staticmethod
    def forward(
        ctx: Any, x_SH: Tensor, weight_VH: Tensor, labels_S: Tensor, first: int, group: dist.ProcessGroup
    ) -> Tensor:
        dtype = torch.promote_types(x_SH.dtype, torch.float32)
        rows = max(CHUNK // weight_VH.shape[0], MIN_ROWS)
        total = x_SH.new_zeros((), dtype=dtype)
        dx_SH = torch.empty_like(x_SH) if ctx.needs_input_grad[0] else None
        dw_VH = torch.zeros_like(weight_VH, dtype=dtype) if ctx.needs_input_grad[1] else None
        for start in range(0, len(labels_S), rows):
            part = slice(start, start + rows)
            ignored = (labels_S[part] == IGNORE)[:, None]
            local = labels_S[part, None] - first
            elsewhere = (local < 0) | (local >= len(weight_VH))
            local = local.masked_fill(elsewhere, 0)
            logits = F.linear(x_SH[part], weight_VH).to(dtype)
            of_label = logits.gather(1, local).masked_fill(elsewhere, 0)
            largest = logits.amax(1, keepdim=True)
            exp = logits.sub_(largest).exp_()
            told = torch.cat((largest, exp.sum(1, keepdim=True), of_label), dim=1)
            largest_RS1, sum_RS1, label_RS1 = gathered(told[None], group, 0).split(1, dim=-1)
            top = largest_RS1.amax(0)
            sums = (sum_RS1 * (largest_RS1 - top).exp()).sum(0)
            total += (sums.log() + top - label_RS1.sum(0)).masked_fill(ignored, 0).sum()
            if dx_SH is None and dw_VH is None:
                continue
            p = exp.mul_((largest - top).exp() / sums)
            g = p.scatter_add_(1, local, elsewhere.to(dtype) - 1).to(x_SH.dtype)
            if dx_SH is not None:
                dx_SH[part] = (g @ weight_VH).masked_fill_(ignored, 0)
            if dw_VH is not None:
                dw_VH += g.T @ x_SH[part].masked_fill(ignored, 0)
        ctx.save_for_backward(dx_SH, None if dw_VH is None else dw_VH.to(weight_VH.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        dx_SH, dw_VH = (None if d is None else (d * scale).to(d.dtype) for d in ctx.saved_tensors)
        return dx_SH, dw_VH, None, None, None


def cross_entropy_sum(
    x_BTH: Tensor, weight_VH: Tensor, labels_BT: Tensor, first: int, group: dist.ProcessGroup
) -> Tensor:
    """`models.loss.cross_entropy_sum` where each rank of `group` has the rows from `first` of the output weight.

    Every rank gets the loss, and as x's gradient the part that comes from its rows.
    """
    total: Tensor = _CrossEntropySum.apply(x_BTH.flatten(0, -2), weight_VH, labels_BT.flatten(), first, group)
    return total
