"""What replicas send each other: chunks from everyone to everyone, point to point, straight from and into place.

On gloo the library's own collectives are slower than this for what we need (64 MB in 8 buckets, two processes on one
machine: `all_to_all_single` 39 ms, this 25 ms; `all_gather_single` 100 ms, this 25 ms; a ring all-reduce 62 ms),
because they pass through copies. On NCCL an all-to-all is a group of sends and receives anyway; its all-gather knows
the topology and is used.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

# One name for it in all supported versions of torch: 2.13 renamed it, and warns at the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Message(NamedTuple):
    """A contiguous tensor and the rank in the group that it goes to or comes from. The tag tells apart messages that
    are under way between the same two ranks."""

    tensor: Tensor
    peer: int
    tag: int


def exchange(sends: Sequence[Message], receives: Sequence[Message], group: dist.ProcessGroup) -> list[dist.Work]:
    """Start all of these; no rank may be its own peer. Empty messages are not sent at all."""
    operations = [
        dist.P2POp(kind, message.tensor, group=group, group_peer=message.peer, tag=message.tag)
        for kind, messages in ((dist.irecv, receives), (dist.isend, sends))
        for message in messages
        if message.tensor.numel()
    ]
    return dist.batch_isend_irecv(operations) if operations else []


def others(rank: int, size: int) -> Iterator[int]:
    """The other ranks, each rank starting after itself, so that not all talk to the same one first."""
    return ((rank + distance) % size for distance in range(1, size))


def gather(full: Tensor, group: dist.ProcessGroup, tag: int) -> list[dist.Work]:
    """Start an all-gather in place: `full` [size * chunk] of which each rank has filled its own chunk."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    chunks = full.chunk(size) if full.numel() else ()
    if not chunks:
        return []
    if full.device.type != "cpu":
        work = _all_gather(full, chunks[rank], group=group, async_op=True)
        assert work is not None
        return [work]
    return exchange(
        [Message(chunks[rank], peer, tag) for peer in others(rank, size)],
        [Message(chunks[peer], peer, tag) for peer in others(rank, size)],
        group,
    )
