"""The canonical sum: one fixed binary tree over lanes, whoever holds them.

Floating-point addition is not associative, so a sum has the same bits everywhere only if it is always added in the
same order. The tree pairs lanes as a tournament does: a node covers `size` lanes from `start`, `size` a power of two
and `start` a multiple of it. Where the number of lanes is not a power of two the missing lanes are left out: a node
whose right half holds no lane is its left half.

    5 lanes:   ((0 + 1) + (2 + 3)) + 4

A replica that holds lanes [a, b) can add up exactly the nodes that lie inside its range; they are few (at most
2 log2(lanes)) and are what it sends.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class Node(Generic[T]):
    start: int
    size: int
    value: T


class TreeSum(Generic[T]):
    """Adds values that arrive in lane order along the canonical tree.

    `add(left, right)` returns the sum of two sibling nodes; it may work in place on `left`.
    After lanes [a, b) have been pushed, `nodes` holds the sums of the largest tree nodes that lie inside [a, b).
    """

    def __init__(self, lanes: int, add: Callable[[T, T], T]) -> None:
        self.lanes = lanes
        self.add = add
        self.nodes: list[Node[T]] = []

    def push(self, start: int, value: T, size: int = 1) -> None:
        """Append the node [start, start + size), which must follow the last one pushed."""
        assert not self.nodes or self.nodes[-1].start + self.nodes[-1].size == start, "lanes arrive in order"
        node = self._promoted(start, size, value)
        while self.nodes and self._siblings(self.nodes[-1], node):
            left = self.nodes.pop()
            node = self._promoted(left.start, left.size * 2, self.add(left.value, node.value))
        self.nodes.append(node)

    def _promoted(self, start: int, size: int, value: T) -> Node[T]:
        """The node grown over right siblings that hold no lane: its value is theirs too."""
        while start % (2 * size) == 0 and start + size >= self.lanes > size:
            size *= 2
        return Node(start, size, value)

    @staticmethod
    def _siblings(left: Node[T], right: Node[T]) -> bool:
        return left.size == right.size and left.start % (2 * left.size) == 0

    def root(self) -> T:
        """The sum over all lanes."""
        assert [node.start for node in self.nodes] == [0], "not every lane has arrived"
        return self.nodes[0].value


def cover(start: int, stop: int, lanes: int) -> list[tuple[int, int]]:
    """(start, size) of the nodes a holder of lanes [start, stop) can add up by itself."""
    tree = TreeSum[None](lanes, lambda left, right: None)
    for lane in range(start, stop):
        tree.push(lane, None)
    return [(node.start, node.size) for node in tree.nodes]
