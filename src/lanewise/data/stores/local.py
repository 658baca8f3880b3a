"""A folder of this machine: the files themselves, never a copy."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lanewise.data.stores.atomic import MARK, replacing
from lanewise.data.stores.base import Store, checked


class LocalStore(Store):
    def __init__(self, folder: Path):
        self.folder = Path(os.path.realpath(folder))
        self.identity = f"file://{self.folder}"

    def read(self, name: str, start: int, stop: int) -> bytes:
        with open(self._path(name), "rb") as file:
            file.seek(start)
            return file.read(max(0, stop - start))

    def size(self, name: str) -> int:
        return self._path(name).stat().st_size

    def list(self, prefix: str = "") -> list[str]:
        names = []
        for folder, _, files in os.walk(self.folder / prefix.rpartition("/")[0]):
            below = Path(folder).relative_to(self.folder)
            names += [(below / file).as_posix() for file in files if not file.endswith(MARK)]
        return sorted(name for name in names if name.startswith(prefix))

    def write(self, name: str, data: bytes | Path) -> None:
        with replacing(self._path(name)) as part:
            part.write_bytes(data) if isinstance(data, bytes) else shutil.copyfile(data, part)

    @contextmanager
    def local(self, name: str) -> Iterator[Path]:
        path = self._path(name)
        path.stat()  # not there: said now, and as by any store
        yield path

    def admit(self, largest: int) -> None:
        """Everything fits where it is."""

    def _path(self, name: str) -> Path:
        return self.folder / checked(name, self)
