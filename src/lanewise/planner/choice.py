"""What a plan chooses. Every field is a number or an array of them: one choice, or many at once."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

Number = Any  # a float, or an array of floats: all formulas are elementwise
Floats = NDArray[np.floating[Any]]

RECOMPUTE = ("none", "selective", "full")
SCHEDULES = ("1f1b", "gpipe", "interleaved", "looped-bfs", "interleaved-zb", "zbv", "dualpipev")


def among(schedule: Number, kinds: Sequence[int]) -> Number:
    """Whether it is one of them (`np.isin`, which takes longer than the rest of a single prediction)."""
    return np.logical_or.reduce([schedule == kind for kind in kinds])


@dataclass(frozen=True)
class Choice:
    """data: ranks that read different sequences (replicas x fsdp x ep); fsdp: ranks among which weights are sharded.

    ep: ranks among which experts are spread; expert_tp: ranks that share one expert. chunks: stages a rank holds;
    lanes: that a replica holds. micro: sequences of one microbatch on one rank; count: microbatches of a step on one
    rank. recompute, schedule: positions in RECOMPUTE and SCHEDULES. zero: 0 to 2, across copies of a weight. flight:
    microbatches whose activations a rank may hold, 0: as the schedule does by itself.
    """

    data: Number = 1
    fsdp: Number = 1
    pp: Number = 1
    cp: Number = 1
    ep: Number = 1
    tp: Number = 1
    expert_tp: Number = 1
    chunks: Number = 1
    lanes: Number = 1
    micro: Number = 1
    count: Number = 1
    recompute: Number = 0
    schedule: Number = 0
    zero: Number = 1
    flight: Number = 0

    @property
    def ranks(self) -> Number:
        return self.data * self.pp * self.cp * self.tp

    def at(self, index: Any) -> "Choice":
        """Those at `index` of a choice of arrays."""
        size = np.shape(self.tp)
        return Choice(**{f.name: np.broadcast_to(getattr(self, f.name), size)[index] for f in fields(self)})
