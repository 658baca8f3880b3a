"""Copies of remote files on a local disk, shared by all processes of a host, within a hard limit of bytes.

lock            held for every look and every change, never for a transfer
<key>.part      being fetched by whoever holds its lock; it has its full size from the start, so the limit holds
<key>.data      whole: synced before it got this name. In use by whoever holds its lock (shared)

The key is a hash of store, name and version: a file that changes on its store is another file here. Locks are the
kernel's (flock): they go with the process that holds them, so nothing here survives a crash but unlocked files, and
a `.part` without a holder is rubbish. Nothing else in the folder is ever counted or deleted. Keep it on a local disk.
"""

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from lanewise.data.stores.atomic import sync
from lanewise.data.stores.retry import TIMEOUT, StoreAway
from lanewise.errors import UserError

PAUSE = 0.05  # seconds between two looks while another process fetches, or uses all the room


@dataclass(frozen=True)
class Cache:
    """`limit` bytes at most, `free` bytes of the disk left alone; waits `timeout` seconds for room."""

    folder: Path
    limit: int
    free: int = 0
    timeout: float = TIMEOUT

    @contextmanager
    def file(self, key: str, name: str, size: int, fetch: Callable[[Path], None]) -> Iterator[Path]:
        """The file of a key; `fetch` fills it (it is there, of `size` bytes) if it is new. It stays until the end.

        Raises UserError if there is no room for it, StoreAway if another process began to fetch it and stopped.
        """
        self.admit(size, name)
        digest = xxhash.xxh3_128_hexdigest(key.encode())
        whole, part = self.folder / f"{digest}.data", self.folder / f"{digest}.part"
        handle, new = self._held(whole, part, name, size)
        try:
            if new:
                self._fill(handle, part, whole, fetch)
            yield whole
        finally:
            os.close(handle)

    def admit(self, size: int, name: str) -> None:
        """Raises UserError if `size` bytes could never be had."""
        if size > self.limit:
            raise UserError(
                f"{name}: {size:,} bytes do not fit into a cache of {self.limit:,}; "
                f"set data.cache_limit_gb to {size / 1e9:.3g} or more"
            )

    # ---------------------------------------------------------------------------------------------------------------

    def _held(self, whole: Path, part: Path, name: str, size: int) -> tuple[int, bool]:
        """A handle that holds the lock of the whole file (shared), or (True) of a new part with room for all of it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        end, seen = time.monotonic() + self.timeout, -1
        while True:
            with self._locked():
                if (handle := _pin(whole, size)) is not None:
                    return handle, False
                if (handle := _claim(part)) is not None:
                    if self._make_room(size, part) and _allocate(handle, size):
                        return handle, True
                    part.unlink()
                    os.close(handle)
            if handle is None and (now := _changed(part)) != seen:  # another fetches it, and gets on
                end, seen = time.monotonic() + self.timeout, now
            if time.monotonic() > end:
                break
            time.sleep(PAUSE)
        if handle is None:
            raise StoreAway(f"{part}: another process fetches {name} and has stopped; end it, and start again")
        raise UserError(
            f"{self.folder}: no room for {size:,} bytes of {name}: files in use fill the {self.limit:,} bytes of the "
            f"cache, or leave less than {self.free:,} free on its disk; raise data.cache_limit_gb, or make room there"
        )

    def _fill(self, handle: int, part: Path, whole: Path, fetch: Callable[[Path], None]) -> None:
        """From the part we hold to the whole file. Names change under the lock only: there others look, then claim."""
        try:
            fetch(part)
            os.fsync(handle)
        except BaseException:
            with self._locked():
                part.unlink()
            raise
        with self._locked():
            os.replace(part, whole)
            sync(self.folder)
            fcntl.flock(handle, fcntl.LOCK_SH)

    def _make_room(self, size: int, part: Path) -> bool:
        """Deletes the files used longest ago, if that makes room for `size` bytes. None that is in use."""
        used, old = 0, []
        for path in self.folder.iterdir():
            if path == part or path.suffix not in (".data", ".part") or len(path.stem) != 32:
                continue
            info = path.stat()
            if path.suffix == ".data":
                old.append((info.st_mtime_ns, path, info.st_size))
            elif (handle := _claim(path)) is not None:  # its process is gone
                path.unlink()
                os.close(handle)
                continue
            used += info.st_size
        disk = os.statvfs(self.folder)
        lacking = max(used + size - self.limit, size + self.free - disk.f_bavail * disk.f_frsize)
        victims: list[tuple[Path, int]] = []
        try:
            for _, path, bytes_ in sorted(old):
                if lacking <= 0:
                    break
                if (handle := _claim(path)) is not None:
                    victims.append((path, handle))
                    lacking -= bytes_
            if lacking > 0:
                return False
            for path, _ in victims:
                path.unlink()
            return True
        finally:
            for _, handle in victims:
                os.close(handle)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        handle = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def _pin(path: Path, size: int) -> int | None:
    """A handle with a shared lock, and the file marked as just used. None, and no file, if it is not what it was."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    if os.fstat(handle).st_size != size:
        os.close(handle)
        path.unlink()
        return None
    fcntl.flock(handle, fcntl.LOCK_SH)
    os.utime(path)
    return handle


def _claim(path: Path) -> int | None:
    """A handle with the only lock; None if another has one."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    with suppress(BlockingIOError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return handle
    os.close(handle)
    return None


def _allocate(handle: int, size: int) -> bool:
    """Takes the disk space now; False if it is not there after all."""
    try:
        os.ftruncate(handle, 0)  # what a dead process left
        if size:
            os.posix_fallocate(handle, 0, size)
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return False
    return True


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
