"""Several documents in a sequence, so that little of it is padding, without one document seeing another.

Documents are taken as they are stored, WINDOW at a time. Those longer than a sequence are cut; the pieces of a window
go into as few bins of T places as first-fit or best-fit finds, and a bin is a sequence. What goes into which bin is
computed once, for the whole source, and kept in a file: bin number in, stretches of tokens out. So the order of a run
permutes bins as it permutes any other windows, and has no state.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from lanewise.data.windows import Tokens, Windows, kept

WINDOW = 1024  # documents

Fit = Callable[[Sequence[int], int], list[int]]


class Packed(Windows):
    """The bins of some tokens, by number. `padding` is the share of places that hold nothing."""

    is_packed = True

    def __init__(self, tokens: Tokens, length: int, filler: int, pack: str, plans: Path) -> None:
        super().__init__(tokens, length, filler)
        made: list[tuple[np.ndarray, np.ndarray]] = []

        def plan(part: int) -> np.ndarray:
            made[:] = made or [pieces_in_bins(tokens.starts, length, FITS[pack])]
            return made[0][part]

        name = f"{plans.name}.{pack}-{length}"
        self.pieces = kept(plans.with_name(f"{name}.pieces.npy"), lambda: plan(0))
        self.firsts = kept(plans.with_name(f"{name}.bins.npy"), lambda: plan(1))
        self.count = len(self.firsts) - 1
        places = self.count * length
        self.padding = 1 - float(self.pieces[:, 1].sum()) / places if places else 0.0

    def spans(self, window: int) -> list[tuple[int, int]]:
        assert 0 <= window < self.count, (window, self.count)
        pieces = self.pieces[self.firsts[window] : self.firsts[window + 1]].tolist()
        return [(start, start + size) for start, size in pieces]


def pieces_in_bins(starts: np.ndarray, length: int, fit: Fit) -> tuple[np.ndarray, np.ndarray]:
    """([pieces, 2] start and size of each piece, bin by bin; [bins + 1] where each bin begins), int64.

    A document of n tokens holds n - 1 predictions; size is the number of predictions in a piece, at most `length`.
    """
    pieces, counts = [np.empty((0, 2), np.int64)], [np.zeros(1, np.int64)]
    for first in range(0, len(starts) - 1, WINDOW):
        begin = starts[first : first + WINDOW + 1]
        predictions = np.diff(begin) - 1
        parts = -(-predictions // length)
        document = np.repeat(np.arange(len(predictions)), parts)
        offset = (np.arange(len(document)) - np.repeat(np.cumsum(parts) - parts, parts)) * length
        size = np.minimum(predictions[document] - offset, length)
        bins = np.array(fit(size.tolist(), length), np.int64)
        by_bin = np.argsort(bins, kind="stable")
        pieces.append(np.stack([begin[document] + offset, size], axis=1)[by_bin])
        counts.append(np.bincount(bins))
    return np.concatenate(pieces), np.cumsum(np.concatenate(counts))


def first_fit(sizes: Sequence[int], room: int) -> list[int]:
    """The bin of each size: the first one with room for it. A tree of the most room below each node finds it."""
    leaves = 1 << max(0, len(sizes) - 1).bit_length()
    most = [room] * (2 * leaves)
    bins = []
    for size in sizes:
        node = 1
        while node < leaves:
            node *= 2
            node += most[node] < size
        bins.append(node - leaves)
        most[node] -= size
        while node := node // 2:
            most[node] = max(most[2 * node], most[2 * node + 1])
    return bins


def best_fit(sizes: Sequence[int], room: int) -> list[int]:
    """The bin of each size: the one in which it leaves the least room, of equals the first."""
    bins, opened = [], 0
    free: list[tuple[int, int]] = []  # (room, bin), sorted
    for size in sizes:
        at = bisect_left(free, (size, 0))
        if at < len(free):
            left, chosen = free.pop(at)
        else:
            left, chosen, opened = room, opened, opened + 1
        bins.append(chosen)
        insort(free, (left - size, chosen))
    return bins


FITS: dict[str, Fit] = {"first-fit": first_fit, "best-fit": best_fit}
