"""Files that are whole or not there: written beside their place, synced, renamed."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MARK = ".lanewise-part"  # ends the names of files not yet in place; listings leave them out


def unfinished(name: str) -> str:
    """A hidden name of its own beside `name`, for the time of writing."""
    folder, slash, last = name.rpartition("/")
    return f"{folder}{slash}.{last}.{secrets.token_hex(8)}{MARK}"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write; on leaving it is durably at `path`, or after an error nowhere."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(unfinished(path.name))
    try:
        yield part
        sync(part)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file durable, or the names in a folder (POSIX: a file's fsync does not cover its directory entry)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
