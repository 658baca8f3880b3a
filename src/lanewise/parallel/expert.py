"""Expert parallel: each rank has some of the experts, and the rows go where their experts are.

No row is dropped and none is added: how many go where is told first, so any load works, also none.
"""

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lanewise.lanes import wire
from lanewise.parallel.collectives import gathered


class _Trip:
    """Rows under way to and from each rank, as many as `sends` and `receives` say. Gradients take the way back."""

    def __init__(self, sends: list[int], receives: list[int], group: dist.ProcessGroup) -> None:
        self.sends, self.receives, self.group = sends, receives, group

    def start(self, x_PH: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        """Where the rows will be once `arrived` has returned."""
        rank, peers = dist.get_rank(self.group), list(wire.others(dist.get_rank(self.group), len(sends)))
        self.rows = x_PH.new_empty(sum(receives), *x_PH.shape[1:])
        mine, theirs = x_PH.contiguous().split(sends), self.rows.split(receives)
        theirs[rank].copy_(mine[rank])
        out = [wire.Message(mine[peer], peer, 0) for peer in peers]
        self.works = wire.exchange(out, [wire.Message(theirs[peer], peer, 0) for peer in peers], self.group)
        return self.rows

    def arrived(self) -> Tensor:
        for work in self.works:
            work.wait()
        rows = self.rows
        del self.rows, self.works
        return rows


class _Leave(torch.autograd.Function):
    """The two ends of a trip. Autograd goes through what was computed last first: what lies between the two ends in the
    forward lies between them in the backward, too, and is computed while the gradients travel."""

    @staticmethod
    def forward(ctx: Any, x_PH: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        return trip.start(x_PH, trip.sends, trip.receives)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.trip.arrived(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_QH: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        return trip.arrived().view_as(y_QH)

    @staticmethod
    def backward(ctx: Any, g_QH: Tensor) -> tuple[Tensor, None]:
        ctx.trip.start(g_QH, ctx.trip.receives, ctx.trip.sends)
        return g_QH, None  # what autograd hands to the other end, which takes what has arrived instead


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
) -> tuple[Callable[[], Tensor], list[int], Callable[[Tensor], Tensor]]:
    """As `models.seams.Seams.dispatched`: the rows for this rank's experts, from all ranks of `group`, by expert."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    counts_RE = gathered(torch.tensor([sizes], device=x_PH.device), group, 0).tolist()
    firsts = [r * len(sizes) // ranks for r in range(ranks + 1)]
    sends = [sum(sizes[a:b]) for a, b in pairwise(firsts)]
    mine = [counts_E[firsts[rank] : firsts[rank + 1]] for counts_E in counts_RE]
    receives = [sum(counts) for counts in mine]
    trip = _Trip(sends, receives, group)
    under_way = _Leave.apply(x_PH, trip)

    # Rows arrive by rank and, within that, by expert; they are wanted by expert and, within that, by rank.
    sizes_Q = [count for counts in mine for count in counts]
    starts = [0, *accumulate(sizes_Q)]
    experts = len(mine[0])
    order = [range(starts[i], starts[i + 1]) for e in range(experts) for i in range(e, len(sizes_Q), experts)]
    order_Q = torch.tensor([row for rows in order for row in rows], dtype=torch.int64, device=x_PH.device)
    inverse_Q = order_Q.argsort()

    def arrive() -> Tensor:
        x_QH: Tensor = _Permute.apply(_Arrive.apply(under_way, trip), order_Q, inverse_Q)
        return x_QH

    def back(y_QH: Tensor) -> Tensor:
        home = _Trip(receives, sends, group)
        y_PH: Tensor = _Arrive.apply(_Leave.apply(_Permute.apply(y_QH, inverse_Q, order_Q), home), home)
        return y_PH

    return arrive, [sum(column) for column in zip(*mine, strict=True)], back
