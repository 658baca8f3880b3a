"""Expert parallel: each rank has some of the experts, and the rows go where their experts are.

No row is dropped and none is added: how many go where is told first, so any load works, also none.
"""

from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lanewise.lanes import wire
from lanewise.parallel.collectives import gathered


class _AllToAll(torch.autograd.Function):
    """Rows to and from each rank, as many as `sends` and `receives` say. The gradient takes the way back."""

    @staticmethod
    def forward(ctx: Any, x_PH: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sends, ctx.receives, ctx.group = sends, receives, group
        return _exchanged(x_PH, sends, receives, group)

    @staticmethod
    def backward(ctx: Any, g_QH: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(g_QH, ctx.receives, ctx.sends, ctx.group), None, None, None


def _exchanged(x_PH: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup) -> Tensor:
    rank, peers = dist.get_rank(group), list(wire.others(dist.get_rank(group), len(sends)))
    y_QH = x_PH.new_empty(sum(receives), *x_PH.shape[1:])
    mine, theirs = x_PH.contiguous().split(sends), y_QH.split(receives)
    theirs[rank].copy_(mine[rank])
    out = [wire.Message(mine[peer], peer, 0) for peer in peers]
    for work in wire.exchange(out, [wire.Message(theirs[peer], peer, 0) for peer in peers], group):
        work.wait()
    return y_QH


class _Permute(torch.autograd.Function):
    """Rows in another order; the gradient of a gather is then a gather too, by the inverse permutation."""

    @staticmethod
    def forward(ctx: Any, x_QH: Tensor, order_Q: Tensor, inverse_Q: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_Q)
        return x_QH[order_Q]

    @staticmethod
    def backward(ctx: Any, g_QH: Tensor) -> tuple[Tensor, None, None]:
        (inverse_Q,) = ctx.saved_tensors
        return g_QH[inverse_Q], None, None


def dispatched(
    x_PH: Tensor, sizes: list[int], group: dist.ProcessGroup
) -> tuple[Tensor, list[int], Callable[[Tensor], Tensor]]:
    """As `models.seams.Seams.dispatched`: the rows for this rank's experts, from all ranks of `group`, by expert."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    counts_RE = gathered(torch.tensor([sizes], device=x_PH.device), group, 0).tolist()
    firsts = [r * len(sizes) // ranks for r in range(ranks + 1)]
    sends = [sum(sizes[a:b]) for a, b in pairwise(firsts)]
    mine = [counts_E[firsts[rank] : firsts[rank + 1]] for counts_E in counts_RE]
    receives = [sum(counts) for counts in mine]

    # Rows arrive by rank and, within that, by expert; they are wanted by expert and, within that, by rank.
    sizes_Q = [count for counts in mine for count in counts]
    starts = [0, *accumulate(sizes_Q)]
    experts = len(mine[0])
    order = [range(starts[i], starts[i + 1]) for e in range(experts) for i in range(e, len(sizes_Q), experts)]
    order_Q = torch.tensor([row for rows in order for row in rows], dtype=torch.int64, device=x_PH.device)
    inverse_Q = order_Q.argsort()
    x_QH = _Permute.apply(_AllToAll.apply(x_PH, sends, receives, group), order_Q, inverse_Q)
    back = partial(_back, sends=sends, receives=receives, group=group, order_Q=order_Q, inverse_Q=inverse_Q)
    return x_QH, [sum(column) for column in zip(*mine, strict=True)], back


def _back(
    y_QH: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup, order_Q: Tensor, inverse_Q: Tensor
) -> Tensor:
    y_PH: Tensor = _AllToAll.apply(_Permute.apply(y_QH, inverse_Q, order_Q), receives, sends, group)
    return y_PH
