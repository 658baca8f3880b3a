"""Windows: the stretches of tokens a model learns from, each with T predictions of the next token.

Dims: B windows in a microbatch, T predictions in a window.
"""

import os
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from lanewise.data.store import sync

IGNORED = -100  # label of a place that is not predicted


class Tokens(Protocol):
    """Documents back to back, each closed by its end-of-text token: one side of a source, wherever it is kept."""

    total: int  # tokens
    flagged: bool  # some tokens are not worth predicting

    @property
    def starts(self) -> np.ndarray:
        """[documents + 1] int64: where each document starts, then where the last one ends."""

    def read(self, start: int, stop: int) -> np.ndarray:
        """[stop - start] token ids, of any integer type; a view of the file where that is possible."""

    def learned(self, start: int, stop: int) -> np.ndarray | None:
        """[stop - start] bool: the tokens worth predicting (in a chat: of some turns). None: all of them."""


class Rows(NamedTuple):
    """B windows. Labels are what follows each token, IGNORED where nothing is predicted.

    The arrays may be views of one memory, and not contiguous: they are read only.
    """

    tokens_BT: np.ndarray  # int64
    labels_BT: np.ndarray  # int64
    starts_BT: np.ndarray | None  # int64: where in its row each token's document starts; None: a row is one document


class Windows:
    """The windows of some tokens, by number. `spans` says which stretches each is made of."""

    is_packed = False
    count: int

    def __init__(self, tokens: Tokens, length: int, filler: int) -> None:
        self.tokens, self.length, self.filler = tokens, length, filler

    def __len__(self) -> int:
        return self.count

    def spans(self, window: int) -> list[tuple[int, int]]:
        """(start, stop), ...: the window predicts tokens start+1 to stop from tokens start to stop-1, of each."""
        raise NotImplementedError

    def batch(self, numbers: Sequence[int]) -> Rows:
        """The windows of these numbers.

        This is the one place where labels are shifted: labels_BT[b, t] is what follows tokens_BT[b, t]. The last
        token of a document is nothing but a label, so no prediction crosses to the next one.
        """
        shape = len(numbers), self.length
        tokens_BT, labels_BT = np.empty(shape, np.int64), np.empty(shape, np.int64)
        starts_BT = np.zeros(shape, np.int64) if self.is_packed else None
        for b, number in enumerate(numbers):
            at = 0
            for start, stop in self.spans(number):
                after = at + stop - start
                stretch = self.tokens.read(start, stop + 1)
                tokens_BT[b, at:after] = stretch[:-1]
                labels_BT[b, at:after] = stretch[1:]
                if (learned := self.tokens.learned(start + 1, stop + 1)) is not None:
                    labels_BT[b, at:after][~learned] = IGNORED
                if starts_BT is not None:
                    starts_BT[b, at:after] = at
                at = after
            tokens_BT[b, at:] = self.filler
            labels_BT[b, at:] = IGNORED
            if starts_BT is not None:
                starts_BT[b, at:] = min(at, self.length - 1)
        return Rows(tokens_BT, labels_BT, starts_BT)


class Stream(Windows):
    """The joined text cut every T tokens. Each token but the first of all is predicted exactly once."""

    def __init__(self, tokens: Tokens, length: int, filler: int) -> None:
        super().__init__(tokens, length, filler)
        self.count = -(-max(0, tokens.total - 1) // length)

    def spans(self, window: int) -> list[tuple[int, int]]:
        assert 0 <= window < self.count, (window, self.count)
        start = window * self.length
        return [(start, min(start + self.length, self.tokens.total - 1))]

    def batch(self, numbers: Sequence[int]) -> Rows:
        """Whole windows, of which every place counts, take half the copying: labels are the tokens one place on."""
        if self.tokens.flagged or max(numbers) == self.count - 1:
            return super().batch(numbers)
        both = np.empty((len(numbers), self.length + 1), np.int64)
        for row, number in zip(both, numbers, strict=True):
            start = number * self.length
            row[:] = self.tokens.read(start, start + self.length + 1)
        return Rows(both[:, :-1], both[:, 1:], None)


class Documents(Windows):
    """Each document cut every T tokens. Each token but the first of a document is predicted exactly once."""

    def __init__(self, tokens: Tokens, length: int, filler: int, plans: Path) -> None:
        """plans: where the number of each document's first window is kept."""
        super().__init__(tokens, length, filler)
        self.starts = tokens.starts

        def firsts() -> np.ndarray:
            """[documents + 1]: each document's first window, then the number of windows."""
            return np.concatenate([[0], np.cumsum(-(-(np.diff(self.starts) - 1) // length))]).astype(np.int64)

        self.firsts = kept(plans.with_name(f"{plans.name}.windows-{length}.npy"), firsts)
        self.count = int(self.firsts[-1])

    def spans(self, window: int) -> list[tuple[int, int]]:
        assert 0 <= window < self.count, (window, self.count)
        document = int(self.firsts.searchsorted(np.int64(window), side="right")) - 1
        start = int(self.starts[document]) + (window - int(self.firsts[document])) * self.length
        return [(start, min(start + self.length, int(self.starts[document + 1]) - 1))]


def kept(path: Path, make: Callable[[], np.ndarray]) -> np.ndarray:
    """The array in a file, memory-mapped so that all processes of a host share it; made if it is not there.

    Any process may write it: all write the same. `path` names all that defines it.
    """
    with suppress(OSError, ValueError, EOFError):  # the last two: not whole
        return np.load(path, mmap_mode="r")
    array = make()
    with suppress(OSError):  # a cache that cannot be written costs memory, nothing else
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{uuid.uuid4().hex}")
        with open(new, "wb") as file:
            np.save(file, array)
        sync(new)
        os.replace(new, path)
        return np.load(path, mmap_mode="r")
    return array
