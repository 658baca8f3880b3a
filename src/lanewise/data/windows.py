"""Windows: the stretches of tokens a model learns from, each with T predictions of the next token.

Dims: B windows in a microbatch, T predictions in a window.
"""

import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Literal

import numpy as np

from lanewise.data import store

IGNORED = -100  # label of a place that is not predicted


class Windows:
    """The windows of one side of a token folder, by number.

    pack "stream": the joined text cut every T tokens. Each token but the first of all is predicted exactly once.
    pack "document": each document (with its end-of-text token) cut every T tokens. Each token but the first of a
    document is predicted exactly once.
    """

    def __init__(self, folder: Path, side: store.Side, pack: Literal["stream", "document"], length: int):
        meta = store.read_meta(folder)
        self.tokens = store.tokens(folder, side, meta["dtype"])
        self.length = length
        self.filler = meta["end_of_text"]
        self.by_document = pack == "document"
        if self.by_document:
            self.starts = store.starts(folder, side)
            self.firsts = _firsts(folder / f"{side}.windows-{length}", self.starts, length)
            self.count = int(self.firsts[-1])
        else:
            self.count = -(-max(0, len(self.tokens) - 1) // length)

    def __len__(self) -> int:
        return self.count

    def span(self, window: int) -> tuple[int, int]:
        """(start, stop): the window predicts tokens start+1 to stop from tokens start to stop-1."""
        assert 0 <= window < self.count, (window, self.count)
        if not self.by_document:
            start, last = window * self.length, len(self.tokens) - 1
        else:
            document = int(self.firsts.searchsorted(np.int64(window), side="right")) - 1
            start = int(self.starts[document]) + (window - int(self.firsts[document])) * self.length
            last = int(self.starts[document + 1]) - 1
        return start, min(start + self.length, last)

    def batch(self, numbers: list[int | None]) -> tuple[np.ndarray, np.ndarray]:
        """(tokens_BT, labels_BT), int64. None is a row of filler; what is not predicted has label IGNORED.

        This is the one place where labels are shifted: labels_BT[b, t] is what follows tokens_BT[b, t].
        """
        tokens_BT = np.full((len(numbers), self.length), self.filler, np.int64)
        labels_BT = np.full((len(numbers), self.length), IGNORED, np.int64)
        for b, number in enumerate(numbers):
            if number is not None:
                start, stop = self.span(number)
                tokens_BT[b, : stop - start] = self.tokens[start:stop]
                labels_BT[b, : stop - start] = self.tokens[start + 1 : stop + 1]
        return tokens_BT, labels_BT


def _firsts(path: Path, starts: np.ndarray, length: int) -> np.ndarray:
    """[documents + 1] int64: each document's first window, then the number of windows; kept beside the tokens.

    Memory-mapped, so that all processes of a host share it. Any process may write it: all write the same.
    """
    with suppress(OSError):
        if path.stat().st_size == starts.nbytes:
            return store.mapped(path, "<i8")
    firsts = np.zeros(len(starts), "<i8")
    np.cumsum(-(-(np.diff(starts) - 1) // length), out=firsts[1:])
    with suppress(OSError):  # a cache that cannot be written costs memory, nothing else
        new = path.with_name(f".{uuid.uuid4().hex}")
        new.write_bytes(firsts.data)
        store.sync(new)
        os.replace(new, path)
        return store.mapped(path, "<i8")
    return firsts
