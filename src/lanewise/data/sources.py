"""Where documents come from: which files a source names, and the raw documents in each.

| source   | files                                                                                         |
|----------|-----------------------------------------------------------------------------------------------|
| 'python' | the library sources this interpreter ships: *.py, installed packages left out                 |
| a file   | that file, whatever its name                                                                  |
| a folder | all below it with a suffix in TEXT or FOLDER_TABLES, but for hidden ones and `__pycache__`    |
| a glob   | all it matches, whatever their suffix; `**` crosses folders                                   |

A text file is one document, and so is each row of a table (.jsonl, .ndjson, .json with one object a line; .parquet).
A further .gz, .bz2 or .zst is unpacked on the way. Files come in the order of their names relative to the source,
so that equal content gives equal tokens on every machine.
"""

import glob
import io
import json
import os
import stat
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import IO

from lanewise.errors import UserError

CHUNK = 2**18  # bytes of a document in memory at once
ROW_LIMIT = 2**26  # bytes of a JSON line, which has to be parsed whole

TEXT = frozenset(
    """
    .txt .text .md .markdown .rst .tex .org .adoc .html .htm .css .xml .yaml .yml .toml .ini .cfg .sql
    .py .pyi .pyx .c .h .cc .cpp .cxx .hpp .cu .cuh .java .kt .scala .cs .js .jsx .mjs .ts .tsx .go .rs .rb .php
    .pl .lua .r .jl .swift .m .hs .ml .clj .ex .erl .el .lisp .f90 .sh .bash .bat .ps1
    """.split()  # noqa: SIM905 - reads as prose
)
FOLDER_TABLES = frozenset({".jsonl", ".ndjson", ".parquet"})  # .json in a folder is mostly settings: name it by a glob
LINES = frozenset({".jsonl", ".ndjson", ".json"})
PACKED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}


@dataclass(frozen=True, slots=True)
class File:
    path: Path
    name: str  # relative to the source, with forward slashes
    size: int  # bytes
    times: tuple[int, int]  # last change of content and of the entry itself, ns


@dataclass(frozen=True, slots=True)
class Document:
    where: str  # for messages: the file, and in a table the row
    chunks: Callable[[], Iterator[bytes]]  # its bytes, from the start


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns what the file system or an unpacker says into the user's error."""
    try:
        yield
    except OSError as e:
        what = e.strerror or str(e).partition("\n")[0]
        raise UserError(f"{path}: cannot read it ({what}); repair it, or choose another data.source") from None


# ----------------------------------------------------------------------------------------------------------- files


def find(source: str) -> list[File]:
    """The files a source names, in order. Raises UserError if there are none."""
    if source == "python":
        files = _below(Path(sysconfig.get_path("stdlib")), frozenset({".py"}), {"site-packages", "dist-packages"})
        nothing = "data.source: this interpreter ships no library sources; name a file, folder or glob"
    elif (path := Path(os.path.expanduser(source))) and source and os.path.isdir(path):
        files = _below(path, TEXT | FOLDER_TABLES)
        nothing = f"data.source: no text files below {source}; take other suffixes by a glob such as '{path}/**/*'"
    elif source and os.path.lexists(path):
        files = [file] if (file := entry(path, path.name)) else []
        nothing = f"data.source: {source} is not a regular file; name a file, folder or glob"
    elif glob.has_magic(source):
        fixed = Path(*path.parts[: next(i for i, part in enumerate(path.parts) if glob.has_magic(part))])
        found = [Path(p) for p in set(glob.glob(str(path), recursive=True))]
        files = [file for p in found if (file := entry(p, p.relative_to(fixed).as_posix()))]
        nothing = f"data.source: no file matches {source}; check the pattern (relative to {Path.cwd()})"
    else:
        raise UserError(f"data.source: there is no {source!r} (seen from {Path.cwd()}); name a file, folder or glob")
    if not files:
        raise UserError(nothing)
    return sorted(files, key=lambda file: file.name)


def _below(root: Path, suffixes: frozenset[str], without: set[str] | None = None) -> list[File]:
    def unreadable(e: OSError) -> None:
        raise e  # os.walk would leave the folder out in silence

    files, without = [], {"__pycache__", *(without or ())}
    with reading(root):
        for folder, folders, names in os.walk(root, onerror=unreadable):
            folders[:] = [d for d in folders if d not in without and not d.startswith(".")]
            for name in names:
                if not name.startswith(".") and _suffix(name) in suffixes:
                    path = Path(folder, name)
                    files += [file] if (file := entry(path, path.relative_to(root).as_posix())) else []
    return files


def entry(path: Path, name: str) -> File | None:
    """None for what is not a regular file: a folder, a pipe (reading it might never end), a link that leads nowhere."""
    with reading(path):
        try:
            info = path.stat()
        except FileNotFoundError:
            return None
    return File(path, name, info.st_size, (info.st_mtime_ns, info.st_ctime_ns)) if stat.S_ISREG(info.st_mode) else None


def _suffix(name: str) -> str:
    """The suffix that says what is inside, in lower case, without that of the packing."""
    stem, suffix = os.path.splitext(name.lower())
    return os.path.splitext(stem)[1] if suffix in PACKED else suffix


# ------------------------------------------------------------------------------------------------------- documents


def documents(file: File, column: str) -> Iterator[Document]:
    """The documents in a file. One without content yields one empty document, so that it can be counted."""
    suffix = _suffix(file.name)
    nothing = Document(str(file.path), partial(_sliced, b""))
    if file.size == 0:
        yield nothing
    elif suffix in LINES:
        yield from _or(nothing, _lines(file.path, column))
    elif suffix == ".parquet":
        yield from _or(nothing, _rows(file.path, column))
    else:
        with reading(file.path), _open(file.path) as stream:
            head = stream.read(CHUNK)
        whole = len(head) < CHUNK  # the common small file is read once
        yield Document(str(file.path), partial(_sliced, head) if whole else partial(_streamed, file.path))


def _or(nothing: Document, found: Iterator[Document]) -> Iterator[Document]:
    yield next(found, nothing)
    yield from found


def _sliced(raw: bytes) -> Iterator[bytes]:
    return (raw[i : i + CHUNK] for i in range(0, len(raw), CHUNK))


def _streamed(path: Path) -> Iterator[bytes]:
    with reading(path), _open(path) as stream:
        while chunk := stream.read(CHUNK):
            yield chunk


def _open(path: Path) -> IO[bytes]:
    packing = PACKED.get(path.suffix.lower())
    if packing is None:
        return open(path, "rb")
    import pyarrow as pa

    return io.BufferedReader(pa.input_stream(str(path), compression=packing), CHUNK)


def _lines(path: Path, column: str) -> Iterator[Document]:
    at = 0
    with reading(path), _open(path) as stream:
        for number in count(1):
            line = stream.readline(ROW_LIMIT + 1)
            if not line:
                return
            where = f"{path}, line {number} (at byte {at})"
            at += len(line)
            if len(line) > ROW_LIMIT:
                raise UserError(f"{where}: longer than {ROW_LIMIT >> 20} MB; split it, or give its text as a .txt file")
            if not line.isspace():
                yield Document(where, partial(_sliced, _column(line, column, where)))


def _column(line: bytes, column: str, where: str) -> bytes:
    try:
        row = json.loads(line.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise UserError(f"{where}: not a JSON object; write one object a line, or rename a text file to .txt")
    if column not in row:
        raise UserError(_no_column(where, column, list(row)))
    value = row[column]
    if not isinstance(value, str | None):
        raise UserError(f"{where}: column {column!r} holds {type(value).__name__}, not text; set data.text_field")
    try:
        return (value or "").encode("utf-8", "surrogateescape")  # gives back bytes that were not UTF-8 as they came
    except UnicodeEncodeError:
        return (value or "").encode("utf-8", "surrogatepass")  # an escaped half of a pair: not UTF-8 either


def _rows(path: Path, column: str) -> Iterator[Document]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with reading(path), pq.ParquetFile(path) as table:
            if column not in table.schema_arrow.names:
                raise UserError(_no_column(str(path), column, table.schema_arrow.names))
            number = 0
            for batch in table.iter_batches(batch_size=64, columns=[column]):
                for value in batch.column(0).cast(pa.large_binary()):
                    number += 1
                    yield Document(f"{path}, row {number}", partial(_sliced, value.as_py() or b""))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as e:
        first = str(e).splitlines()[0]
        raise UserError(f"{path}: column {column!r} cannot be read as text ({first}); set data.text_field") from None


def _no_column(where: str, column: str, known: list[str]) -> str:
    return f"{where}: no column {column!r}; set data.text_field to one of: {', '.join(known)}"
