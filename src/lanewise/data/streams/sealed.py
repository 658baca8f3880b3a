"""The sealed part of a stream: a folder of segments on any store. It alone decides what a run reads.

stream.json             where the stream comes from, how it is cut, its segments in order, what is committed
segment-00000000.arrow  Arrow IPC: a row per message, in a column `text`, or `tokens` (uint32) if they were encoded

The file of a segment is written before the list that names it: what a crash leaves between the two is written again.
"""

import json
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

import pyarrow as pa
import xxhash

from lanewise.data.stores import Store
from lanewise.errors import UserError

LIST = "stream.json"
FORMAT = "lanewise-stream-1"


@dataclass(frozen=True)
class Segment:
    """Messages [start, stop) of one part of the stream: a partition by its number, or a file by its name."""

    file: str
    part: str
    start: int
    stop: int
    rows: int  # fewer than the messages where some were skipped
    bytes: int
    xxh3: str


@dataclass
class State:
    """All that stream.json holds."""

    source: str  # what is sealed here; never another
    cut: dict[str, Any]  # how messages become rows and segments; never otherwise
    marks: dict[str, Any] = field(default_factory=dict)  # what the source itself must remember
    segments: list[Segment] = field(default_factory=list)
    committed: int = 0  # segments known to be in a checkpoint


class Sealed:
    """Read by every process of a run; written by the one that seals (see `Stream`)."""

    def __init__(self, store: Store):
        self.store = store
        self.state: State | None = None
        self.saved = b""
        self.refresh()

    def refresh(self) -> int:
        """Looks at the store again. How many segments there are now."""
        try:
            raw = self.store.read(LIST, 0, self.store.size(LIST))
        except FileNotFoundError:
            raw = b""
        if raw != self.saved:
            try:
                known = json.loads(raw)
                assert known.pop("format") == FORMAT
                segments = [Segment(**segment) for segment in known.pop("segments")]
                self.state = State(**known, segments=segments)
            except (ValueError, KeyError, TypeError, AssertionError):
                raise UserError(
                    f"{self.store.identity}/{LIST} is damaged, or of another version; restore it, or choose an "
                    f"empty folder"
                ) from None
            self.saved = raw
        self.firsts = [0, *accumulate(segment.rows for segment in self.segments)]
        return len(self.segments)

    @property
    def segments(self) -> list[Segment]:
        return self.state.segments if self.state else []

    @property
    def rows(self) -> int:
        """Rows of all segments. They never change, and more come behind them."""
        return self.firsts[-1]

    def locate(self, row: int) -> tuple[int, int]:
        """(segment, row within it) of a row counted over all segments."""
        assert 0 <= row < self.rows, row
        segment = bisect_right(self.firsts, row) - 1
        return segment, row - self.firsts[segment]

    def table(self, number: int) -> pa.Table:
        """A segment's rows. Raises UserError naming it if it is not what was sealed."""
        segment = self.segments[number]
        try:
            with self.store.local(segment.file) as path:
                raw = path.read_bytes()
        except FileNotFoundError:
            raw = b""
        if xxhash.xxh3_128_hexdigest(raw) != segment.xxh3:
            what = "is not what was sealed" if raw else "is missing"
            raise UserError(f"{self.store.identity}/{segment.file} ({_place(segment)}) {what}; restore it")
        return pa.ipc.open_file(raw).read_all()

    # -------------------------------------------------------------------------------------------------------- writing

    def append(self, part: str, start: int, stop: int, rows: pa.Table) -> None:
        """A new segment, in no list until `save`."""
        assert self.state is not None
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, rows.schema) as writer:
            writer.write_table(rows)
        raw = sink.getvalue().to_pybytes()
        name = f"segment-{len(self.segments):08}.arrow"
        self.store.write(name, raw)
        self.segments.append(Segment(name, part, start, stop, rows.num_rows, len(raw), xxhash.xxh3_128_hexdigest(raw)))
        self.firsts.append(self.firsts[-1] + rows.num_rows)

    def save(self) -> None:
        """Makes the list on the store this one. Raises UserError if somebody else wrote it meanwhile."""
        assert self.state is not None
        try:
            there = self.store.read(LIST, 0, self.store.size(LIST))
        except FileNotFoundError:
            there = b""
        if there != self.saved:
            raise UserError(f"{self.store.identity}: another process seals into it too; end one of the two")
        raw = json.dumps({"format": FORMAT, **asdict(self.state)}, indent=0).encode()
        if raw != there:
            self.store.write(LIST, raw)
            self.saved = raw

    def places(self, upto: int | None = None) -> Iterator[tuple[str, int]]:
        """(part, message after the last) of each part in the first `upto` segments (None: in all)."""
        yield from {segment.part: segment.stop for segment in self.segments[:upto]}.items()


def _place(segment: Segment) -> str:
    return f"messages {segment.start} to {segment.stop - 1} of {segment.part}"
