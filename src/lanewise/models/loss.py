"""Cross-entropy from the last hidden states, without ever holding all logits."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lanewise.models.spec import IGNORE

CHUNK = 2**21  # logits held at a time, at least MIN_ROWS rows of them
MIN_ROWS = 128


class Objective(NamedTuple):
    """What is minimised for a token besides -log p[label].

    smoothing: the part of the label's weight that all words share alike (arXiv:1512.00567).
    z: weight of the square of the log of softmax's denominator, which keeps logits near zero (arXiv:2204.02311).
    """

    smoothing: float = 0.0
    z: float = 0.0


PLAIN = Objective()


class Read(NamedTuple):
    """What R tokens' logits come to, over the whole vocabulary: -log p of the label, the same on average over all
    words, the log of the sum of exponentials; and p of the words that are here. In fp32 at least."""

    nll_R1: Tensor
    even_R1: Tensor
    log_sum_R1: Tensor
    p_RW: Tensor


class Words:
    """The rows of the output weight that are here: all `count` of them.

    first: the word of the first row. widest: the most rows that any rank has.
    """

    first = 0

    def __init__(self, count: int) -> None:
        self.count = self.widest = count

    def read(self, logits_RW: Tensor, rows_R1: Tensor, elsewhere_R1: Tensor, dtype: torch.dtype, plain: bool) -> Read:
        """rows: that of the label, unless it is elsewhere. plain: only nll and p are asked for."""
        logp_RW = F.log_softmax(logits_RW, dim=-1, dtype=dtype)
        nll = -logp_RW.gather(1, rows_R1)
        even, log_sum = (nll, nll) if plain else (-logp_RW.mean(1, keepdim=True), log_sum_exp(logits_RW, logp_RW))
        return Read(nll, even, log_sum, logp_RW.exp_())


def log_sum_exp(logits_RW: Tensor, logp_RW: Tensor) -> Tensor:
    """[R, 1], from what log-softmax has made of them: at the largest logit log p is small, and nothing is lost."""
    return logits_RW.amax(1, keepdim=True).to(logp_RW.dtype) - logp_RW.amax(1, keepdim=True)


class _CrossEntropySum(torch.autograd.Function):
    """Gradients are formed in the forward, chunk by chunk, while the logits are at hand: the same three matrix
    products as usual, but no logits survive and no log-softmax is read back. Backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any, x_SH: Tensor, weight_WH: Tensor, labels_S: Tensor, objective: Objective, words: Words
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(x_SH.dtype, torch.float32)
        rows = max(CHUNK // words.widest, MIN_ROWS)
        nll, more = (x_SH.new_zeros((), dtype=dtype) for _ in range(2))
        dx_SH = torch.empty_like(x_SH) if ctx.needs_input_grad[0] else None
        dw_WH = torch.zeros_like(weight_WH, dtype=dtype) if ctx.needs_input_grad[1] else None
        for start in range(0, len(labels_S), rows):
            part = slice(start, start + rows)
            ignored = (labels_S[part] == IGNORE)[:, None]
            local = labels_S[part, None] - words.first
            elsewhere = (local < 0) | (local >= len(weight_WH))
            local = local.masked_fill(elsewhere, 0)
            read = words.read(F.linear(x_SH[part], weight_WH), local, elsewhere, dtype, objective == PLAIN)
            nll += read.nll_R1.masked_fill(ignored, 0).sum()
            if objective != PLAIN:
                smoothed = objective.smoothing * (read.even_R1 - read.nll_R1)
                more += (smoothed + objective.z * read.log_sum_R1.square()).masked_fill(ignored, 0).sum()
            if dx_SH is None and dw_WH is None:
                continue
            # d(-log p[label]) / d logits = p - one-hot; d log_sum / d logits = p. Ignored rows are cut out at width H,
            # not at width W.
            g = read.p_RW
            if objective.z:
                g *= 1 + 2 * objective.z * read.log_sum_R1
            g.scatter_add_(1, local, (elsewhere.to(dtype) - 1) * (1 - objective.smoothing))
            if objective.smoothing:
                g -= objective.smoothing / words.count
            g = g.to(x_SH.dtype)
            if dx_SH is not None:
                dx_SH[part] = (g @ weight_WH).masked_fill_(ignored, 0)
            if dw_WH is not None:
                dw_WH += g.T @ x_SH[part].masked_fill(ignored, 0)
        ctx.save_for_backward(dx_SH, None if dw_WH is None else dw_WH.to(weight_WH.dtype))
        ctx.mark_non_differentiable(nll)
        return nll + more, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        dx_SH, dw_WH = (None if d is None else (d * scale).to(d.dtype) for d in ctx.saved_tensors)
        return dx_SH, dw_WH, None, None, None


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(torch.ones_like(loss))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        return g, ctx.saved_tensors[0]


def carry(x: Tensor, loss: Tensor) -> Tensor:
    """x, whose backward differentiates `loss` as well: for a loss that is known before the last part of the model."""
    y: Tensor = _Carry.apply(x, loss)
    return y


def cross_entropy_sum(
    x_BTH: Tensor,
    weight_WH: Tensor,
    labels_BT: Tensor,
    objective: Objective = PLAIN,
    words: Words | None = None,
) -> tuple[Tensor, Tensor]:
    """Sums over valid labels: of what `objective` minimises, and of -log softmax(x weight^T)[label] in nats alone,
    which is not differentiated: fp32 scalars, 0 if no label is valid.

    Softmax and sums are in fp32 whatever the inputs are; ignored labels (-100) give no loss and a zero gradient.
    words: which rows of the output weight `weight` has; by default all. If only some, x's gradient is the part that
    comes from them.
    """
    words = words or Words(len(weight_WH))
    loss, nll = _CrossEntropySum.apply(x_BTH.flatten(0, -2), weight_WH, labels_BT.flatten(), objective, words)
    return loss, nll
