"""A folder that grows: each new file becomes segments, in the order of names.

A file counts as new when it has not changed between two looks `settle` seconds apart: one still being written waits,
one renamed into the folder needs the same wait and no care. Hidden files and those of other suffixes than
`data.source` reads are left alone. A file that changes after it was sealed is an error: its new content would be lost.
"""

import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from lanewise.data import sources
from lanewise.data.streams.stream import Batch, Source
from lanewise.errors import UserError

Look = tuple[int, int]  # size in bytes, time of the last change in ns


class Folder(Source):
    def __init__(self, folder: Path, column: str, rows: int, settle: float):
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; make it, or name another")
        self.folder, self.column, self.rows, self.settle = folder.resolve(), column, rows, settle
        self.identity = f"folder {self.folder}"
        self.seen: dict[str, tuple[Look, float]] = {}  # how each file looked, and since when by our own clock

    def take(self, places: dict[str, int], marks: dict[str, Any]) -> Iterator[Batch]:
        """A file is noted in `marks` with its look, and whether all of it is sealed: else it goes on at its place."""
        now = time.monotonic()
        for file in self._files():
            look = (file.size, file.times[0])
            *sealed, whole = marks.get(file.name, (*look, False))
            if file.name in marks:
                if tuple(sealed) != look:
                    raise UserError(
                        f"{file.path} changed after it was sealed ({sealed[0]} bytes then, {file.size} now); "
                        f"put new text into a new file, and this one back as it was"
                    )
                if whole:
                    continue
            before, since = self.seen.get(file.name, (None, now))
            if before != look:
                self.seen[file.name] = (look, now)
            elif now - since >= self.settle:
                marks[file.name] = (*look, False)
                yield from self._segments(file, places.get(file.name, 0))
                marks[file.name] = (*look, True)
                del self.seen[file.name]

    def commit(self, places: dict[str, int]) -> None:
        """Files stay where they are: whose they are, may delete them."""

    def close(self) -> None:
        """Nothing is held open."""

    def _files(self) -> list[sources.File]:
        try:
            return sources.find(str(self.folder))
        except UserError:
            return []  # none yet

    def _segments(self, file: sources.File, start: int) -> Iterator[Batch]:
        found = islice(sources.documents(file, self.column), start, None)
        while values := [b"".join(document.chunks()) for document in islice(found, self.rows)]:
            stop = start + len(values)
            yield Batch(file.name, start, stop, values, list(range(start, stop)))
            start = stop
