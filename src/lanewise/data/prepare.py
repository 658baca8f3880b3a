"""Text to a folder of tokens, once: later runs on the same content find the folder in the cache.

    cache/<content key>/        what store.py describes; the key stands for everything that defines the tokens
    cache/seen/<quick key>      the content key that files of these paths, sizes and times had: no text is read again
    cache/.building-*           being written; renamed when whole, so a build that dies leaves no half folder

There are no locks. Of two builds of one folder at once both do the work, and the second to finish takes the first's.
"""

import errno
import os
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import xxhash

from lanewise import config
from lanewise.data import build, sources, store, tokenizer
from lanewise.errors import UserError

DAY = 86_400  # seconds


def prepare(data: config.Data, progress: Callable[[str], None] = lambda message: None) -> Path:
    """The folder of tokens for `data`, built if the cache has none. `progress` gets a line now and then.

    Safe to call from several processes and hosts at once. Raises UserError on anything wrong with the source, the
    tokenizer or the room in the cache.
    """
    files = sources.find(data.source)
    quick = _quick_key(files, data)
    cache = Path(data.cache).expanduser()
    try:
        with suppress(FileNotFoundError):
            folder = cache / (cache / "seen" / quick).read_text(encoding="ascii", errors="replace")
            if store.damage(folder) is None:
                return folder
        folder = cache / _content_key(files, data)
        damage = store.damage(folder)
        if damage and folder.exists():
            progress(f"{damage}: building it again")
        if damage:
            _build(files, data, quick, folder, progress)
        _remember(cache / "seen" / quick, folder.name, files)
    except OSError as e:  # those of the source are UserErrors already
        full = e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "free some space there" if full else "make it writable"
        raise UserError(f"{cache}: cannot keep tokens there ({e.strerror or e}); {remedy}, or set data.cache") from None
    return folder


# ------------------------------------------------------------------------------------------------------------ keys


def _settings(data: config.Data) -> str:
    """What defines the tokens besides the content of the files."""
    kind = data.tokenizer if build.trains(data) else "file"
    size = data.vocab_size if kind == "bpe" else 0
    return repr((store.FORMAT, data.text_field, kind, size, build.policy(data), data.held_out))


def _all(files: list[sources.File], data: config.Data) -> list[sources.File]:
    return files if build.trains(data) else files + tokenizer.files(data.tokenizer)


def _quick_key(files: list[sources.File], data: config.Data) -> str:
    entries = [(os.path.abspath(file.path), file.name, file.size, file.times) for file in _all(files, data)]
    return xxhash.xxh3_128_hexdigest(ascii((_settings(data), entries)).encode())


def _content_key(files: list[sources.File], data: config.Data) -> str:
    contents = []
    for file in _all(files, data):
        content = xxhash.xxh3_128()
        with sources.reading(file.path), open(file.path, "rb") as stream:
            while block := stream.read(2**20):
                content.update(block)
        contents.append((file.name, content.hexdigest()))
    return xxhash.xxh3_128_hexdigest(ascii((_settings(data), contents)).encode())


def _remember(seen: Path, key: str, files: list[sources.File]) -> None:
    """Unless a file is so new that another write could leave its size and time as they are (as in git's index)."""
    if max(max(file.times) for file in files) / 1e9 < time.time() - 2:
        seen.parent.mkdir(exist_ok=True)
        new = seen.with_name(f".{uuid.uuid4().hex}")
        new.write_text(key, encoding="ascii")
        os.replace(new, seen)


# ------------------------------------------------------------------------------------------------------ publishing


def _build(
    files: list[sources.File], data: config.Data, quick: str, folder: Path, progress: Callable[[str], None]
) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder.parent)
    building = folder.with_name(f".building-{uuid.uuid4().hex}")
    building.mkdir()
    try:
        build.write(files, data, building, progress)
        if _quick_key(sources.find(data.source), data) != quick:
            raise UserError(f"data.source: {data.source} changed while it was read; start again when it is complete")
        _publish(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _publish(building: Path, folder: Path) -> None:
    while True:
        try:
            os.rename(building, folder)
        except OSError as e:
            if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if store.damage(folder) is None:
                return  # another process was first
            aside = building.with_name(f"{building.name}-damaged")
            with suppress(FileNotFoundError):  # another process was first at putting it aside
                os.rename(folder, aside)
                shutil.rmtree(aside, ignore_errors=True)
        else:
            store.sync(folder.parent)
            return


def _sweep(cache: Path) -> None:
    """Removes what builds that were killed left behind: nothing in it was written for a day."""
    for old in cache.glob(".building-*"):
        with suppress(OSError):
            if max(path.stat().st_mtime for path in [old, *old.iterdir()]) < time.time() - DAY:
                shutil.rmtree(old, ignore_errors=True)
