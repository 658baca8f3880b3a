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

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lanewise.lanes.assignment import lanes_of
from lanewise.lanes.flat import Bucket, local
from lanewise.lanes.tree import TreeSum, cover
from lanewise.lanes.wire import Message, exchange, others

MOST_USES = 2  # of a weight: tied embeddings


class Reducer:
    """Sums gradients over microbatches and lanes.

    For each lane, in order, run its microbatches' backward passes, each inside `begin` ... `end`; then `finish`
    returns one reduced chunk per bucket. The stages of a pipeline each go through the slots in that order, whatever
    the others do in between: a bucket belongs to one stage. Where its weights have two uses (tied embeddings), maybe in
    two stages, each is summed by itself, as it is where they are on two ranks.

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
        self.free_early = free_early
        self.uses = [
            [_BucketSum(bucket, use, lanes, nodes) for use in range(len(bucket.stages))]
            for bucket in buckets
            if bucket.trainable
        ]
        self.sums = [bucket_sum for uses in self.uses for bucket_sum in uses]
        self._launched = 0
        self._slots = defaultdict[int, int](int)  # that have begun, by stage
        self.hooks = [
            leaf.register_post_accumulate_grad_hook(self._hook(bucket_sum, index))
            for bucket_sum in self.sums
            for index, leaf in enumerate(bucket_sum.leaves)
        ]

    def _hook(self, bucket_sum: "_BucketSum", index: int) -> Callable[[Tensor], None]:
        def arrived(leaf: Tensor) -> None:
            gradient, leaf.grad = leaf.grad, None
            assert gradient is not None
            if bucket_sum.take(index, local(gradient)):
                self._launch()

        return arrived

    def close(self) -> None:
        """Let go of the parameters, whose hooks point back here where Python's garbage collector cannot see it."""
        for hook in self.hooks:
            hook.remove()

    def begin(self, lane: int, k: int, stage: int = 0) -> None:
        """Before the backward of microbatch `k` of `lane` in a stage."""
        assert self._slots[stage] == (lane - self.mine[0]) * self.microbatches + k, "slots arrive in order"
        self._slots[stage] += 1
        for bucket_sum in self.sums:
            if bucket_sum.stage == stage:
                bucket_sum.begin(lane, first=k == 0, last=k == self.microbatches - 1, final=lane == self.mine[-1])

    def end(self, stage: int = 0) -> None:
        """After that backward: parameters it did not use get a zero gradient."""
        for bucket_sum in self.sums:
            if bucket_sum.stage == stage:
                bucket_sum.take_missing()
        self._launch()

    def _launch(self) -> None:
        while self._launched < len(self.sums) and self.sums[self._launched].ready:
            self.sums[self._launched].launch()
            self._launched += 1

    def finish(self) -> Iterator[Tensor]:
        """This rank's chunk of each trainable bucket's gradient, summed over all lanes: [chunk] fp32, valid until
        `begin`.

        Each is yielded as it arrives: what is done with one overlaps with the exchange of the next.
        """
        assert self._launched == len(self.sums), "a lane is missing"
        self._launched = 0
        self._slots.clear()
        for uses in self.uses:
            total, *rest = (part for bucket_sum in uses for part in bucket_sum.finish())
            for part in rest:
                total.add_(part)
            if self.free_early:
                total = total.clone() if uses[0].inbox else total
                for bucket_sum in uses:
                    bucket_sum.pool.clear()
                    bucket_sum.inbox.clear()
            yield total


class _BucketSum:
    """The gradient of one use of a bucket's weights on its way through lanes and replicas."""

    def __init__(self, bucket: Bucket, use: int, lanes: int, nodes: Sequence[list[tuple[int, int]]]) -> None:
        self.bucket, self.use, self.lanes, self.copies = bucket, use, lanes, bucket.copies
        self.stage = bucket.stages[use]
        self.leaves = [place.uses[use].leaf for place in bucket.places]
        self.nodes = [replica for replica in nodes for _ in range(self.copies.parts)]  # of each copy, in rank order
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
        self.missing = set(range(len(self.bucket.places)))
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
        """After the backward: gradients that were put in place without a hook (weights alone, in zero-bubble
        schedules) are taken; what it did not reach has a zero gradient."""
        for index in sorted(self.missing):
            leaf = self.leaves[index]
            gradient, leaf.grad = leaf.grad, None
            if gradient is not None:
                self.take(index, local(gradient))
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
        """A gradient buffer: zero in its padding, to be overwritten everywhere else."""
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
        first = (self.bucket.number * MOST_USES + self.use) * most  # tag
        sends, receives = [], []
        for peer in others(self.copies.rank, self.copies.size):
            for j, node in enumerate(self.tree.nodes):
                chunk = node.value[peer * self.bucket.chunk :][: self.bucket.chunk]
                sends.append(Message(chunk, peer, first + j))
            for j in range(len(self.nodes[peer])):
                if (peer, j) not in self.inbox:
                    self.inbox[peer, j] = self.tree.nodes[0].value.new_empty(self.bucket.chunk)
                receives.append(Message(self.inbox[peer, j], peer, first + j))
        self.works = exchange(sends, receives, self.copies.group)

    def finish(self) -> list[Tensor]:
        """This copy's chunk of the sum over lanes of each part of a microbatch."""
        if self.copies.group is None:
            parts = [self.tree.root()]
            self.pool += parts  # written again only after `begin`
        else:
            for work in self.works:
                work.wait()
            self.pool += [node.value for node in self.tree.nodes]
            parts = self._sum_received()
        self.reset()
        return parts

    def _sum_received(self) -> list[Tensor]:
        """This copy's chunk of everyone's nodes, added along one tree for each part; in place, where the chunks lie."""
        trees = [TreeSum[Tensor](self.lanes, lambda left, right: left.add_(right)) for _ in range(self.copies.parts)]
        for copy, nodes in enumerate(self.nodes):
            for j, (start, size) in enumerate(nodes):
                mine = copy == self.copies.rank
                chunk = self.tree.nodes[j].value[self.bucket.own] if mine else self.inbox[copy, j]
                trees[copy % self.copies.parts].push(start, chunk, size)
        return [tree.root() for tree in trees]
