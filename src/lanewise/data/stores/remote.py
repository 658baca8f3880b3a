"""A folder of another machine: any backend, made patient, with the cache in front of it."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lanewise.data.stores.base import Store, checked
from lanewise.data.stores.cache import Cache
from lanewise.data.stores.retry import brief, patiently
from lanewise.errors import UserError

T = TypeVar("T")
PIECE = 8 << 20  # bytes asked for at once: what a cut connection costs


class Stat(NamedTuple):
    size: int
    version: str  # changes when the content does


class Backend(ABC):
    """One kind of remote store: each call is tried once. Names are checked before; stop > start >= 0."""

    identity: str
    remedy: str  # what to look at when access is refused

    @abstractmethod
    def read(self, name: str, start: int, stop: int) -> bytes: ...

    @abstractmethod
    def stat(self, name: str) -> Stat: ...

    @abstractmethod
    def list(self, prefix: str) -> list[str]: ...

    @abstractmethod
    def write(self, name: str, data: bytes | Path) -> None: ...

    @abstractmethod
    def transient(self, error: Exception) -> bool:
        """Whether the same call may well work a little later."""


class RemoteStore(Store):
    def __init__(self, url: str, backend: Callable[[str, float], Backend], cache: Cache, timeout: float):
        self._made_of = (url, backend, cache, timeout)
        self.url = url.rstrip("/")
        self.cache = cache
        self.timeout = timeout
        self.backend = backend(url, timeout)
        self.identity = self.backend.identity

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteStore, self._made_of

    def read(self, name: str, start: int, stop: int) -> bytes:
        checked(name, self)
        pieces = []
        for first in range(start, stop, PIECE):
            last = min(first + PIECE, stop)
            pieces.append(self._ask(name, partial(self.backend.read, name, first, last)))
            if len(pieces[-1]) < last - first:
                break
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def size(self, name: str) -> int:
        return self._stat(name).size

    def list(self, prefix: str = "") -> list[str]:
        return sorted(self._ask(prefix, lambda: self.backend.list(prefix)))

    def write(self, name: str, data: bytes | Path) -> None:
        checked(name, self)
        self._ask(name, lambda: self.backend.write(name, data))

    @contextmanager
    def local(self, name: str) -> Iterator[Path]:
        found = self._stat(name)
        fetch = partial(self._fetch, name, found)
        with self.cache.file(f"{self.identity}\0{name}\0{found.version}", name, found.size, fetch) as path:
            yield path

    def admit(self, largest: int) -> None:
        self.cache.admit(largest, self.identity)

    # ---------------------------------------------------------------------------------------------------------------

    def _fetch(self, name: str, found: Stat, path: Path) -> None:
        """Fills the file at `path`, piece by piece: a cut costs one of them."""
        with open(path, "r+b") as file:
            for start in range(0, found.size, PIECE):
                file.write(self.read(name, start, min(start + PIECE, found.size)))
        now = self._stat(name)
        if now != found or os.path.getsize(path) != found.size:
            raise UserError(f"{self.url}/{name} changed while it was read; let its writer finish, and start again")

    def _stat(self, name: str) -> Stat:
        return self._ask(checked(name, self), lambda: self.backend.stat(name))

    def _ask(self, name: str, do: Callable[[], T]) -> T:
        where = f"{self.url}/{name}"
        try:
            return patiently(do, self.backend.transient, self.timeout, self.identity)
        except UserError:
            raise
        except FileNotFoundError:
            raise FileNotFoundError(f"{where}: no such file or bucket") from None
        except PermissionError as e:
            raise UserError(f"{where}: access refused ({brief(e)}); check {self.backend.remedy}") from None
        except Exception as e:
            raise UserError(f"{where}: {brief(e)}; check the address and {self.backend.remedy}") from e
