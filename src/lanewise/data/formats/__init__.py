"""What the files of a source look like inside: one file a format, each yielding raw documents.

`documents(path, column, part)` of a module yields `base.Document`s. Where `parts(path, size)` exists, it cuts a large
file into stretches that are read apart, each a `part` for `documents`.
"""

import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

from lanewise.data.formats.base import PACKED, Document, Part

# Suffix, without that of the packing, and the module that reads it. Everything else is text.
READERS = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "lines",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".tar": "webdataset",
    ".mds": "mds",
    ".tfrecord": "tfrecord",
    ".tfrecords": "tfrecord",
}


def suffix_of(name: str) -> str:
    """The suffix that says what is inside, in lower case, without that of the packing."""
    stem, suffix = os.path.splitext(name.lower())
    return os.path.splitext(stem)[1] if suffix in PACKED else suffix


def reader(name: str) -> ModuleType:
    return import_module(f"lanewise.data.formats.{READERS.get(suffix_of(name), 'text')}")


def documents(path: Path, name: str, column: str, part: Part | None = None) -> Iterator[Document]:
    """The documents in a file. One without content yields one empty document, so that it can be counted."""
    found: Iterator[Document] = iter(()) if path.stat().st_size == 0 else reader(name).documents(path, column, part)
    yield next(found, Document(str(path)))
    yield from found


def parts(path: Path, name: str, size: int) -> list[Part | None]:
    """Stretches of a file of about `size` bytes that can be read apart; [None]: only as a whole."""
    cut = getattr(reader(name), "parts", None)
    whole = cut is None or path.stat().st_size <= 2 * size or path.suffix.lower() in PACKED
    return [None] if whole else list(cut(path, size))  # type: ignore[misc]
