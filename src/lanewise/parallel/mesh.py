"""Where each rank stands in the mesh `replica, pp, fsdp, cp, ep, tp`, and the groups along its axes."""

from collections.abc import Sequence
from itertools import product

import torch
import torch.distributed as dist

from lanewise.elastic.world import TIMEOUT, World
from lanewise.parallel.layout import WORK, Layout


class Mesh:
    """The ranks of the world in a grid, the last axis innermost.

    size, at: degree and coordinate by axis, "replica" included.
    """

    def __init__(self, world: World, layout: Layout) -> None:
        self.world, self.layout = world, layout
        self.size = {"replica": layout.replicas(world.size), **layout.degrees}
        self.at = dict(zip(self.size, self._coordinates(world.rank), strict=True))
        self._groups: dict[tuple[str, ...], dist.ProcessGroup | None] = {}  # by axes and purpose

    @classmethod
    def alone(cls, device: torch.device) -> "Mesh":
        """That of one process."""
        return cls(World(0, 1, device), Layout())

    @property
    def replicas(self) -> int:
        return self.size["replica"]

    @property
    def replica(self) -> int:
        return self.at["replica"]

    @property
    def part(self) -> int | None:
        """The number of this rank's part of a microbatch's tokens, of `parts`; None if another rank speaks for it."""
        return self.position(WORK)[0] if self.at["tp"] == 0 else None

    @property
    def parts(self) -> int:
        return self.position(WORK)[1]

    def _coordinates(self, rank: int) -> list[int]:
        found = []
        for size in reversed(self.size.values()):
            rank, at = divmod(rank, size)
            found.append(at)
        return found[::-1]

    def position(self, axes: Sequence[str]) -> tuple[int, int]:
        """(number, count) of this rank among those that differ from it along `axes` only."""
        number, count = 0, 1
        for axis in self._ordered(axes):
            number, count = number * self.size[axis] + self.at[axis], count * self.size[axis]
        return number, count

    def group(self, axes: Sequence[str], purpose: str = "model") -> dist.ProcessGroup | None:
        """Those ranks' process group, in the order of their position; None if there is no other rank.

        One group for each purpose: what runs in the background must not meet what the model waits for.
        Every rank must ask for its groups in the same order.
        """
        key = (purpose, *self._ordered(axes))
        if key not in self._groups:
            self._groups[key] = self._made(self._ordered(axes))
        return self._groups[key]

    def _ordered(self, axes: Sequence[str]) -> tuple[str, ...]:
        return tuple(axis for axis, size in self.size.items() if axis in axes and size > 1)

    def _made(self, axes: tuple[str, ...]) -> dist.ProcessGroup | None:
        ranks = [
            rank
            for rank, at in enumerate(product(*map(range, self.size.values())))
            if all(a == self.at[axis] for axis, a in zip(self.size, at, strict=True) if axis not in axes)
        ]
        if len(ranks) == 1:
            return None
        return dist.new_group(ranks, timeout=TIMEOUT, use_local_synchronization=True)
