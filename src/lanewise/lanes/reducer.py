"""From microbatch gradients to the canonical sum, while backward still runs.

Within a lane the microbatches' gradients add up in order, in fp32; across lanes along the canonical tree. A replica
adds up the tree nodes that lie inside its range of lanes and the exchange does the rest:

    all-to-all (each copy gets its chunk of everyone else's nodes) -> tree sum of the chunks

Where a replica's ranks each have a part of the gradient (`Copies`), they take part in the same exchange: a tree for
each part, then the sum of the parts.

On the wire this is the first half of a ring all-reduce. The second half, the all-gather, belongs to the optimizer:
with ZeRO-1/2 it carries updated weights, with ZeRO-0 the reduced gradient.

A bucket leaves as soon as its last gradient has arrived, and buckets leave in the same order on every replica, or
their collectives would not match.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lanewise.lanes.assignment import lanes_of
from lanewise.lanes.flat import Bucket, local
from lanewise.lanes.tree import TreeSum, cover
from lanewise.lanes.wire import Message, exchange, others


class Reducer:
    """Sums gradients over microbatches and lanes.

    For each lane, in order, run its microbatches' backward passes, each inside `begin` ... `end`; then `finish`
    returns one reduced chunk per bucket.

    free_early: give gradient buffers back to the allocator after each exchange (ZeRO-2) instead of keeping them.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        lanes: int,
        microbatches: int,
        replicas: int,
        replica: int,
        free_early: bool,
    ) -> None:
        self.lanes, self.microbatches = lanes, microbatches
        self.mine = lanes_of(replica, replicas, lanes)
        nodes = [cover(r.start, r.stop, lanes) for r in (lanes_of(other, replicas, lanes) for other in range(replicas))]
        self.sums = [_BucketSum(bucket, lanes, nodes, free_early) for bucket in buckets]
        self._launched = 0
        for bucket_sum in self.sums:
            for index in bucket_sum.trainable:
                place = bucket_sum.bucket.places[index]
                place.parameter.register_post_accumulate_grad_hook(self._hook(bucket_sum, index))

    def _hook(self, bucket_sum: "_BucketSum", index: int) -> Callable[[Tensor], None]:
        def arrived(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            if bucket_sum.take(index, local(gradient)):
                self._launch()

        return arrived

    def begin(self, lane: int, k: int) -> None:
        """Before the forward of microbatch `k` of `lane`."""
        for bucket_sum in self.sums:
            bucket_sum.begin(lane, first=k == 0, last=k == self.microbatches - 1, final=lane == self.mine[-1])

    def end(self) -> None:
        """After that microbatch's backward: parameters it did not use get a zero gradient."""
        for bucket_sum in self.sums:
            bucket_sum.take_missing()
        self._launch()

    def _launch(self) -> None:
        while self._launched < len(self.sums) and self.sums[self._launched].ready:
            self.sums[self._launched].launch()
            self._launched += 1

    def finish(self) -> Iterator[Tensor]:
        """This rank's chunk of each bucket's gradient, summed over all lanes: [chunk] fp32, valid until `begin`.

        Each is yielded as it arrives: what is done with one overlaps with the exchange of the next.
        """
        assert self._launched == len(self.sums), "a lane is missing"
        self._launched = 0
        for bucket_sum in self.sums:
            yield bucket_sum.finish()


class _BucketSum:
    """One bucket's gradient on its way through lanes and replicas."""

    def __init__(
        self,
        bucket: Bucket,
        lanes: int,
        nodes: Sequence[list[tuple[int, int]]],
        free_early: bool,
    ) -> None:
        self.bucket, self.lanes = bucket, lanes
        self.copies, self.free_early = bucket.copies, free_early
        self.nodes = [replica for replica in nodes for _ in range(self.copies.parts)]  # of each copy, in rank order
        self.trainable = [i for i, place in enumerate(bucket.places) if place.parameter.requires_grad]
        self.pool: list[Tensor] = []
        self.inbox: dict[tuple[int, int], Tensor] = {}  # by sender and by which of its nodes
        self.reset()

    def reset(self) -> None:
        self.ready = False
        self.target: Tensor | None = None
        self.tree = TreeSum[Tensor](self.lanes, self._merge)
        self.works: list[dist.Work] = []

    # ---------------------------------------------------------------------------------------- one microbatch

    def begin(self, lane: int, first: bool, last: bool, final: bool) -> None:
        self.lane, self.last, self.final = lane, last, final
        self.missing = set(self.trainable)
        self.complete = False
        self.fresh = first
        if first:
            top = self.tree.nodes[-1] if self.tree.nodes else None
            # A lane of one microbatch that is a right sibling is added straight onto the left one: the same sum as
            # in a buffer of its own, without the buffer.
            self.onto_sibling = last and lane % 2 == 1 and top is not None and top.size == 1
            if self.onto_sibling:
                assert top is not None
                self.target, self.fresh = top.value, False
            else:
                self.target = self._buffer()

    def take(self, index: int, gradient: Tensor) -> bool:
        """Add one parameter's gradient; True if it was the last one that the exchange of this bucket waited for."""
        assert self.target is not None
        place = self.bucket.places[index]
        part = self.target[place.start : place.stop].view(place.shape)
        if self.fresh:
            part.copy_(gradient)
        else:
            part.add_(gradient)
        self.missing.discard(index)
        if not self.missing:
            self._complete()
        return self.ready

    def take_missing(self) -> None:
        """After the backward: what it did not reach has a zero gradient."""
        if self.complete:
            return
        assert self.target is not None
        if self.fresh:
            for index in self.missing:
                place = self.bucket.places[index]
                self.target[place.start : place.stop].zero_()
        self.missing.clear()
        self._complete()

    def _complete(self) -> None:
        """All gradients of this microbatch are in; after the lane's last one, the lane joins the tree."""
        self.complete = True
        if not self.last:
            return
        assert self.target is not None
        if self.onto_sibling:
            left = self.tree.nodes.pop()
            self.tree.push(left.start, left.value, size=2)
        else:
            self.tree.push(self.lane, self.target)
        self.target = None
        self.ready = self.final

    def _merge(self, left: Tensor, right: Tensor) -> Tensor:
        left.add_(right)
        self.pool.append(right)
        return left

    def _buffer(self) -> Tensor:
        """A gradient buffer: zero in its padding and for frozen parameters, to be overwritten everywhere else."""
        if self.pool:
            return self.pool.pop()
        return torch.zeros(self.bucket.size, dtype=torch.float32, device=self.bucket.weights.device)

    # -------------------------------------------------------------------------------------------- the exchange

    def launch(self) -> None:
        """Send every other copy its chunk of this one's nodes. A replica has few nodes, mostly one."""
        self.ready = False
        if self.copies.group is None:
            return
        most = max(len(nodes) for nodes in self.nodes)
        sends, receives = [], []
        for peer in others(self.copies.rank, self.copies.size):
            for j, node in enumerate(self.tree.nodes):
                chunk = node.value[peer * self.bucket.chunk :][: self.bucket.chunk]
                sends.append(Message(chunk, peer, self.bucket.number * most + j))
            for j in range(len(self.nodes[peer])):
                if (peer, j) not in self.inbox:
                    self.inbox[peer, j] = self.tree.nodes[0].value.new_empty(self.bucket.chunk)
                receives.append(Message(self.inbox[peer, j], peer, self.bucket.number * most + j))
        self.works = exchange(sends, receives, self.copies.group)

    def finish(self) -> Tensor:
        if self.copies.group is None:
            reduced = self.tree.root()
            self.pool.append(reduced)  # written again only after `begin`
        else:
            for work in self.works:
                work.wait()
            self.pool += [node.value for node in self.tree.nodes]
            reduced = self._sum_received()
        if self.free_early:
            reduced = reduced.clone() if self.inbox else reduced
            self.pool.clear()
            self.inbox.clear()
        self.reset()
        return reduced

    def _sum_received(self) -> Tensor:
        """This copy's chunk of everyone's nodes, added along one tree for each part; in place, where the chunks lie."""
        trees = [TreeSum[Tensor](self.lanes, lambda left, right: left.add_(right)) for _ in range(self.copies.parts)]
        for copy, nodes in enumerate(self.nodes):
            for j, (start, size) in enumerate(nodes):
                mine = copy == self.copies.rank
                chunk = self.tree.nodes[j].value[self.bucket.own] if mine else self.inbox[copy, j]
                trees[copy % self.copies.parts].push(start, chunk, size)
        total, *rest = (tree.root() for tree in trees)
        for part in rest:
            total.add_(part)
        return total
