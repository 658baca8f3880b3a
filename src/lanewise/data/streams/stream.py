"""Sealing: the one process of a run that takes messages from the source and tells it what it may forget."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from lanewise.data.streams.sealed import Sealed, Segment, State
from lanewise.data.text import Errors, first_bad_byte
from lanewise.errors import UserError

Encode = Callable[[list[str]], Sequence[Sequence[int] | np.ndarray]]  # texts to rows of token ids


class Batch(NamedTuple):
    """Messages that become one segment."""

    part: str
    start: int
    stop: int
    values: list[bytes]
    offsets: list[int]  # of each, for messages to the user


class Source(ABC):
    """Where messages come from. A part's messages are numbered, and the same number is the same message for ever."""

    identity: str

    @abstractmethod
    def take(self, places: dict[str, int], marks: dict[str, Any]) -> Iterator[Batch]:
        """What is there now, cut by count alone, from the given place of each part on. May keep notes in `marks`.

        Raises UserError if messages from there on are lost.
        """

    @abstractmethod
    def commit(self, places: dict[str, int]) -> None:
        """Messages before these places will never be asked for again."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of connections."""


class Stream:
    """Use: `poll` now and then; train on `sealed`; after a checkpoint that has read its first n segments `commit(n)`.

    What a crash interrupts is done again from stream.json: sealed segments stay what they are, and the rest is cut
    anew from the place after the last one, so that a run that resumes reads the same rows in the same order.
    """

    def __init__(self, source: Source, sealed: Sealed, cut: dict[str, Any], errors: Errors, encode: Encode | None):
        self.source, self.sealed = source, sealed
        self.errors, self.encode = errors, encode
        state = sealed.state or State(source.identity, cut)
        for what, old, new in (("source", state.source, source.identity), ("cut", state.cut, cut)):
            if old != new:
                raise UserError(
                    f"{sealed.store.identity} holds another stream: its {what} is {old}, not {new}; "
                    f"choose an empty folder"
                )
        sealed.state = state

    @property
    def segments(self) -> list[Segment]:
        return self.sealed.segments

    def poll(self) -> int:
        """Seals what has arrived. How many segments are new. Raises StoreAway, with all that came before it sealed."""
        assert self.sealed.state is not None
        before = len(self.segments)
        try:
            for batch in self.source.take(dict(self.sealed.places()), self.sealed.state.marks):
                self.sealed.append(batch.part, batch.start, batch.stop, self._rows(batch))
        finally:
            self.sealed.save()
        return len(self.segments) - before

    def commit(self, upto: int) -> None:
        """The first `upto` segments are in a checkpoint that is safe. Less than before (an older one): nothing."""
        assert self.sealed.state is not None
        assert upto <= len(self.segments), upto
        if upto > 0 and upto >= self.sealed.state.committed:
            self.sealed.state.committed = upto
            self.sealed.save()
            self.source.commit(dict(self.sealed.places(upto)))

    def close(self) -> None:
        self.source.close()

    def _rows(self, batch: Batch) -> pa.Table:
        texts = []
        for offset, value in zip(batch.offsets, batch.values, strict=True):
            bad = first_bad_byte([value])
            if bad is not None and self.errors == "error":
                raise UserError(
                    f"{self.source.identity}, message {offset} of {batch.part}: not UTF-8 at byte {bad}; "
                    f"set data.errors=replace or skip"
                )
            if bad is None or self.errors == "replace":
                texts.append(value.decode("utf-8", "replace"))
        if self.encode is None:
            return pa.table({"text": pa.array(texts, pa.large_string())})
        return pa.table({"tokens": pa.array(self.encode(texts), pa.large_list(pa.uint32()))})
