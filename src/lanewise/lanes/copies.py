"""Who else holds the same weights, and what their gradients are to each other."""

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Copies:
    """The ranks that hold the same piece of the model: `parts` of them in each of `replicas` replicas.

    The parts of a replica divide a microbatch among them (its rows, its positions...), so each has a part of every
    gradient. Its sum is the canonical sum over lanes for each part, and then the sum over the parts in their order:
    the number of replicas is not in it.

    group: these ranks in the order of their rank; the parts of a replica are neighbours. None for one alone.
    """

    group: dist.ProcessGroup | None = None
    replicas: int = 1
    replica: int = 0
    parts: int = 1
    part: int = 0

    @property
    def size(self) -> int:
        return self.replicas * self.parts

    @property
    def rank(self) -> int:
        return self.replica * self.parts + self.part
