"""Tar files of samples (WebDataset): each `key.txt` or `key.json` member is a document; other members are not text."""

import json
import tarfile
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from pathlib import Path

from lanewise.data.formats.base import Document, Part, document_of, no_column, opened, reading, sliced
from lanewise.errors import UserError


def documents(path: Path, column: str, part: Part | None = None) -> Iterator[Document]:
    """A key's text is its .txt; without one, what its .json holds in `column`, or the .json whole if it is a text.

    The members of a key follow each other, as the format demands.
    """
    try:
        with reading(path), opened(path) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
            files = (member for member in tar if member.isfile())
            for _, members in groupby(files, key=lambda member: _split(member.name)[:2]):
                parts = {_split(m.name)[2]: (f"{path}, member {m.name}", _content(tar, m)) for m in members}
                if "txt" in parts:
                    where, raw = parts["txt"]
                    yield Document(where, partial(sliced, raw))
                elif "json" in parts:
                    where, raw = parts["json"]
                    yield _of_json(raw, column, where)
    except tarfile.TarError as e:
        raise UserError(f"{path}: cannot be read as a tar file ({e}); repair it") from None


def _split(name: str) -> tuple[str, str, str]:
    """(folder, key, suffix): a key ends at the first dot of the file's name."""
    folder, _, file = name.rpartition("/")
    key, _, suffix = file.partition(".")
    return folder, key, suffix


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    """What a text member holds; the others (images, sound) are not read."""
    if _split(member.name)[2] not in ("txt", "json"):
        return b""
    file = tar.extractfile(member)
    assert file is not None
    return file.read()


def _of_json(raw: bytes, column: str, where: str) -> Document:
    try:
        value = json.loads(raw)
    except ValueError as e:
        raise UserError(f"{where}: not JSON ({e}); repair it") from None
    if isinstance(value, dict):
        if column not in value:
            raise UserError(no_column(where, column, list(value)))
        value = value[column]
    return document_of(value, column, where)
