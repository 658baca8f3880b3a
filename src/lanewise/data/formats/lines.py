"""JSON objects, one a line (.jsonl, .ndjson, .json): a document each. A part is a stretch of bytes: the lines that
start in it."""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from lanewise.data.formats.base import Document, Part, document_of, no_column, opened, reading
from lanewise.errors import UserError

ROW_LIMIT = 2**26  # bytes of a line, which has to be parsed whole


def parts(path: Path, size: int) -> Iterator[Part]:
    total = path.stat().st_size
    for start in range(0, total, size):
        yield start, min(start + size, total)


def documents(path: Path, column: str, part: Part | None = None) -> Iterator[Document]:
    start, stop = part or (0, None)
    with reading(path), opened(path) as stream:
        if start:  # the line that crosses the start belongs to the part before
            stream.seek(start - 1)
            while (skipped := stream.readline(ROW_LIMIT)) and not skipped.endswith(b"\n"):
                pass
            at = stream.tell()
        else:
            at = 0
        for number in count(1):
            line = stream.readline(ROW_LIMIT + 1) if stop is None or at < stop else b""
            if not line:
                return
            where = f"{path}, {'' if start else f'line {number} '}(at byte {at})"
            at += len(line)
            if len(line) > ROW_LIMIT:
                raise UserError(f"{where}: longer than {ROW_LIMIT >> 20} MB; split it, or give its text as a .txt file")
            if not line.isspace():
                yield _document(line, column, where)


def _document(line: bytes, column: str, where: str) -> Document:
    try:
        row = json.loads(line.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise UserError(f"{where}: not a JSON object; write one object a line, or rename a text file to .txt")
    if column not in row:
        raise UserError(no_column(where, column, list(row)))
    return document_of(row[column], column, where)
