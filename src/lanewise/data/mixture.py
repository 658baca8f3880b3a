"""Which source each sequence of a run comes from, and how many that source gave before: computed, not counted.

Weights are whole numbers w_i with sum W, and the choice repeats every W sequences. Inside a period, the j-th sample
of source i may come from position floor(j W / w_i) on and must come before ceil((j + 1) W / w_i); of those that may
come, the one that must come first does. This meets every bound (uniprocessor Pfair scheduling: Baruah, Cohen, Plaxton
and Varvel, "Proportionate Progress", Algorithmica 15, 1996), so after any number p of sequences each source has given
its share p w_i / W to within less than one sample.

When weights change, a new segment starts where the run stands, with what each source gave so far: nothing is lost or
read twice. The segments are the only state of the order, and they change only when the weights do.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from lanewise.errors import UserError

LONGEST = 2**16  # positions in a period


@dataclass(frozen=True)
class Segment:
    first: int  # the run's sequence it starts at
    weights: dict[str, int]  # by source, in lowest terms
    given: dict[str, int]  # samples each source gave before `first`; sources that left the mixture stay here


class Mixture:
    """The segments of a run. Source names are numbered in `names`, which only grows."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.segments = [Segment(0, in_lowest_terms(weights), {})]
        self._number()

    def _number(self) -> None:
        self.names = list(dict.fromkeys(name for segment in self.segments for name in segment.weights))

    @property
    def record(self) -> list[dict[str, Any]]:
        """For the checkpoint."""
        return [asdict(segment) for segment in self.segments]

    def go_on(self, record: Sequence[Mapping[str, Any]], position: int) -> bool:
        """Take up a run's segments at `position`; the weights of now start a new one if they differ. True then."""
        now = self.segments[-1].weights
        self.segments = [Segment(**segment) for segment in record if segment["first"] < position or not position]
        self.segments = self.segments or [Segment(0, now, {})]
        changed = self.segments[-1].weights != now
        if changed:
            given = self.given(position)
            self.segments = [segment for segment in self.segments if segment.first < position]
            self.segments.append(Segment(position, now, given))
        self._number()
        return changed

    def given(self, position: int) -> dict[str, int]:
        """Samples each source has given in the sequences before `position`."""
        segment = next(s for s in reversed(self.segments) if s.first <= position)
        rounds, rest = divmod(position - segment.first, sum(segment.weights.values()))
        chosen, _ = _period(tuple(segment.weights.values()))
        inside = np.bincount(chosen[:rest], minlength=len(segment.weights)).tolist()
        given = dict(segment.given)
        for (name, weight), extra in zip(segment.weights.items(), inside, strict=True):
            given[name] = given.get(name, 0) + rounds * weight + extra
        return given

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, index): for each sequence the number of its source in `names`, and which of its samples it is."""
        sources = np.empty(len(positions), np.int64)
        indices = np.empty(len(positions), np.int64)
        firsts = np.array([segment.first for segment in self.segments])
        of = firsts.searchsorted(positions, side="right") - 1
        for number in np.unique(of):
            here, segment = of == number, self.segments[number]
            weights = np.array(list(segment.weights.values()))
            chosen, rank = _period(tuple(segment.weights.values()))
            rounds, rest = np.divmod(positions[here] - segment.first, len(chosen))
            source = chosen[rest]
            given = np.array([segment.given.get(name, 0) for name in segment.weights])
            indices[here] = given[source] + rounds * weights[source] + rank[rest]
            sources[here] = np.array([self.names.index(name) for name in segment.weights])[source]
        return sources, indices

    def when(self, name: str, index: int) -> int | None:
        """The sequence that is sample `index` of a source; None: it never comes, the source left the mixture."""
        for segment, after in zip(self.segments, [*self.segments[1:], None], strict=True):
            weight, given = segment.weights.get(name), segment.given.get(name, 0)
            if weight is None or index < given:
                continue
            rounds, rest = divmod(index - given, weight)
            chosen, rank = _period(tuple(segment.weights.values()))
            number = list(segment.weights).index(name)
            place = int(np.flatnonzero((chosen == number) & (rank == rest))[0])
            found = segment.first + rounds * len(chosen) + place
            if after is None or found < after.first:
                return found
        return None


def in_lowest_terms(weights: Mapping[str, float]) -> dict[str, int]:
    """Whole numbers in the same proportion. Decimal fractions count as written: 0.999 and 0.001 are 999 and 1.

    Raises UserError if they repeat only after more than LONGEST sequences.
    """
    exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
    common = math.lcm(*(weight.denominator for weight in exact.values()))
    whole = {name: int(weight * common) for name, weight in exact.items()}
    shared = math.gcd(*whole.values())
    whole = {name: weight // shared for name, weight in whole.items()}
    if sum(whole.values()) > LONGEST:
        raise UserError(
            f"data.mix: weights {', '.join(str(w) for w in weights.values())} repeat only after "
            f"{sum(whole.values()):,} sequences (at most {LONGEST:,}); round them to four digits"
        )
    return whole


@lru_cache(16)
def _period(weights: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """[W] int64 each: the source at each position of a period, and how many of its samples came before in it."""
    total = sum(weights)
    chosen, rank = np.empty(total, np.int64), np.empty(total, np.int64)
    later = [(0, i, 0) for i in range(len(weights))]  # (from when on, source, its sample)
    ready: list[tuple[int, int, int]] = []  # (before when, source, its sample)
    for position in range(total):
        while later and later[0][0] <= position:
            _, i, j = heapq.heappop(later)
            heapq.heappush(ready, (-(-(j + 1) * total // weights[i]), i, j))
        deadline, i, j = heapq.heappop(ready)
        assert position < deadline, (weights, position)
        chosen[position], rank[position] = i, j
        if j + 1 < weights[i]:
            heapq.heappush(later, ((j + 1) * total // weights[i], i, j + 1))
    return chosen, rank
