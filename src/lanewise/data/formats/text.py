"""A text file: one document."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from lanewise.data.formats import base
from lanewise.data.formats.base import Document, Part, opened, reading, sliced


def documents(path: Path, column: str, part: Part | None = None) -> Iterator[Document]:
    with reading(path), opened(path) as stream:
        head = stream.read(base.CHUNK)
    whole = len(head) < base.CHUNK  # the common small file is read once
    yield Document(str(path), partial(sliced, head) if whole else partial(_streamed, path))


def _streamed(path: Path) -> Iterator[bytes]:
    with reading(path), opened(path) as stream:
        while chunk := stream.read(base.CHUNK):
            yield chunk
