"""What all formats share: a document, errors in the user's words, unpacking on the way."""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from lanewise.errors import UserError

CHUNK = 2**18  # bytes of a document in memory at once
PACKED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".zstd": "zstd"}
Part = tuple[int, int]  # from, to: bytes or row groups


def sliced(raw: bytes) -> Iterator[bytes]:
    return (raw[i : i + CHUNK] for i in range(0, len(raw), CHUNK))


def nothing() -> Iterator[bytes]:
    return iter(())


@dataclass(frozen=True, slots=True)
class Document:
    """Its content is text, or token ids, or the turns of a chat."""

    where: str  # for messages: the file, and in a table the row
    chunks: Callable[[], Iterator[bytes]] = nothing  # its bytes, from the start
    tokens: np.ndarray | None = None  # its ids, if it comes as such
    turns: list[dict[str, Any]] | None = None  # its turns, if it is a chat: role, content and whatever else


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns what the file system or an unpacker says into the user's error."""
    try:
        yield
    except OSError as e:
        what = e.strerror or str(e).partition("\n")[0]
        raise UserError(f"{path}: cannot read it ({what}); repair it, or choose another data.source") from None


def opened(path: Path) -> IO[bytes]:
    """The file's bytes, unpacked on the way if its suffix says so."""
    packing = PACKED.get(path.suffix.lower())
    if packing is None:
        return open(path, "rb")
    import pyarrow as pa

    return io.BufferedReader(pa.input_stream(str(path), compression=packing), CHUNK)


def no_column(where: str, column: str, known: list[str]) -> str:
    return f"{where}: no column {column!r}; set data.text_field to one of: {', '.join(known)}"


def document_of(value: Any, column: str, where: str) -> Document:
    """A document from what a column holds: text, bytes, a list of token ids, a list of turns, or nothing."""
    if value is None:
        return Document(where)
    if isinstance(value, str):
        try:
            value = value.encode("utf-8", "surrogateescape")  # gives back bytes that were not UTF-8 as they came
        except UnicodeEncodeError:
            value = value.encode("utf-8", "surrogatepass")  # an escaped half of a pair: not UTF-8 either
    if isinstance(value, bytes):
        return Document(where, partial(sliced, value))
    if isinstance(value, list) and all(isinstance(turn, dict) and "role" in turn for turn in value):
        return Document(where, turns=value) if value else Document(where)
    ids = None
    if isinstance(value, np.ndarray) or (isinstance(value, list) and all(type(token) is int for token in value)):
        ids = np.asarray(value)
    if ids is None or ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise UserError(
            f"{where}: column {column!r} holds {type(value).__name__}, not text, token ids or turns with a role; "
            "set data.text_field"
        )
    return Document(where, tokens=ids)
