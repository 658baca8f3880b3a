"""What every store can do. A store is one folder; a name is a path below it, with forward slashes."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath

from lanewise.errors import UserError


class Store(ABC):
    """A folder of files somewhere. Pickles as its address: a worker process opens its own connections.

    A name that is not there raises FileNotFoundError; whatever else is wrong raises UserError, which names the store.
    """

    identity: str  # the same for every way to write the address of this folder, and for no other folder

    @abstractmethod
    def read(self, name: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a file, cut at its end as a slice is."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Bytes in a file."""

    @abstractmethod
    def list(self, prefix: str = "") -> list[str]:
        """Names of all files below the folder that start with `prefix`, sorted. No folder, no names."""

    @abstractmethod
    def write(self, name: str, data: bytes | Path) -> None:
        """Puts bytes, or the content of a local file, under a name. Others see the old file or the whole new one."""

    @abstractmethod
    def local(self, name: str) -> AbstractContextManager[Path]:
        """A local file with the content, which stays until the context ends. Read only: it may be the file itself."""

    @abstractmethod
    def admit(self, largest: int) -> None:
        """Raises UserError if a file of that many bytes could never be had with `local`. For the start of a run."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.identity}>"


def checked(name: str, store: Store) -> str:
    """The name, if it stays below the folder: a manifest must not be able to reach for other files."""
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or path.as_posix() != name:
        raise UserError(f"{store.identity}: {name!r} is no name of a file below it; use a relative path without '..'")
    return name
