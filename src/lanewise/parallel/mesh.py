"""Where each rank stands in the mesh `replica, pp, fsdp, cp, ep, tp`, and the groups along its axes."""

from collections.abc import Sequence
from itertools import product

import torch
import torch.distributed as dist

from lanewise.elastic.world import TIMEOUT, World
from lanewise.parallel.layout import WORK, Layout

# All groups there are. Every rank makes them in this order: torch's names for groups count those a rank has made.
GROUPS = [("model", axes) for axes in (("tp",), ("cp",), ("ep",), ("cp", "tp"), ("pp",), ("fsdp",))] + [
    ("exchange", tuple(axis for axis in ("replica", "cp", "ep", "tp", *ends) if axis not in cut))  # fsdp cuts them all
    for cut in ((), ("tp",), ("ep",), ("ep", "tp"))
    for ends in ((), ("ends",))
]


class Mesh:
    """The ranks of the world in a grid, the last axis innermost.

    size, at: degree and coordinate by axis, "replica" included.
    """

    def __init__(self, world: World, layout: Layout) -> None:
        self.world, self.layout = world, layout
        self.size = {"replica": layout.replicas(world.size), **layout.degrees}
        self.at = dict(zip(self.size, self._coordinates(world.rank), strict=True))
        # The first and the last stage of a pipeline, where they are two: an axis that not all ranks are on.
        last = layout.pp - 1
        self.ends = last > 0 and self.at["pp"] in (0, last)
        self._groups: dict[tuple[str, ...], dist.ProcessGroup | None] = {}  # by purpose and axes
        for purpose, axes in GROUPS:
            key = self._key(axes, purpose)
            if key not in self._groups:
                self._groups[key] = self._made(self._ordered(axes), "ends" in axes and layout.pp > 1)

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
        last_stage = self.at["pp"] == self.size["pp"] - 1
        return self.position(WORK)[0] if last_stage and self.at["tp"] == 0 else None

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
        if "ends" in axes and self.ends:
            number, count = int(self.at["pp"] > 0), 2
        for axis in self._ordered(axes):
            number, count = number * self.size[axis] + self.at[axis], count * self.size[axis]
        return number, count

    def group(self, axes: Sequence[str], purpose: str = "model") -> dist.ProcessGroup | None:
        """Those ranks' process group, in the order of their position; None if there is no other rank.

        One group for each purpose: what runs in the background must not meet what the model waits for.
        """
        return self._groups[self._key(axes, purpose)]

    def _key(self, axes: Sequence[str], purpose: str) -> tuple[str, ...]:
        return purpose, *self._ordered(axes), *(["ends"] if "ends" in axes and self.layout.pp > 1 else [])

    def _ordered(self, axes: Sequence[str]) -> tuple[str, ...]:
        return tuple(axis for axis, size in self.size.items() if axis in axes and size > 1)

    def _made(self, axes: tuple[str, ...], ends: bool) -> dist.ProcessGroup | None:
        may = {axis: list(range(size)) if axis in axes else [self.at[axis]] for axis, size in self.size.items()}
        if ends and self.ends:
            may["pp"] = [0, self.size["pp"] - 1]
        everyone = product(*map(range, self.size.values()))
        ranks = [
            rank
            for rank, at in enumerate(everyone)
            if all(a in may[axis] for axis, a in zip(self.size, at, strict=True))
        ]
        if len(ranks) == 1 and not ends:
            return None
        return dist.new_group(ranks, timeout=TIMEOUT, use_local_synchronization=True)
