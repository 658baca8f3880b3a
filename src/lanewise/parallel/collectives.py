"""What the ranks of a replica exchange in forward and backward, as functions autograd can go through.

Sums are added in the order of the ranks, never along a ring: a ring's order depends on where an element lies.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lanewise.lanes import wire


@torch.compiler.disable
def gathered(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """The ranks' tensors of equal shape, joined along `dim` in the order of the ranks."""
    ranks = dist.get_world_size(group)
    out = x.new_empty(ranks, *x.shape)
    out[dist.get_rank(group)] = x
    for work in wire.gather(out.view(-1), group, tag=0):
        work.wait()
    return torch.cat(out.unbind(), dim)


@torch.compiler.disable
def scattered_sum(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """The sum over the ranks, of which each gets its equal piece along `dim`."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    mine = torch.stack(x.chunk(ranks, dim))
    theirs = torch.empty_like(mine)
    theirs[rank] = mine[rank]
    peers = list(wire.others(rank, ranks))
    sends = [wire.Message(mine[peer], peer, 0) for peer in peers]
    for work in wire.exchange(sends, [wire.Message(theirs[peer], peer, 0) for peer in peers], group):
        work.wait()
    return theirs.sum(0)


class _Gather(torch.autograd.Function):
    """Forward: pieces become the whole on every rank. Each rank's use of it yields a part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return gathered(x, group, dim)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return scattered_sum(g, ctx.group, ctx.dim), None, None


class _ScatterSum(torch.autograd.Function):
    """Forward: partial sums become pieces of the whole sum. The other's inverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return scattered_sum(x, group, dim)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return gathered(g, ctx.group, ctx.dim), None, None


def gather(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    y: Tensor = _Gather.apply(x, group, dim)
    return y


def scatter_sum(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    y: Tensor = _ScatterSum.apply(x, group, dim)
    return y


def total(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Integers summed over the ranks: exact in any order."""
    assert not counts.is_floating_point()
    counts = counts.clone()
    dist.all_reduce(counts, group=group)
    return counts
