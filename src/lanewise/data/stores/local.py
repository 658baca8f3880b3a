"""A folder on this machine."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class LocalStore:
    """Names are relative to the folder, with forward slashes."""

    def __init__(self, address: str) -> None:
        self.folder = Path(address).expanduser()
        self.identity = str(self.folder)

    def read(self, name: str, start: int, stop: int) -> bytes:
        with open(self.folder / name, "rb") as file:
            file.seek(start)
            return file.read(stop - start)

    def size(self, name: str) -> int:
        return (self.folder / name).stat().st_size

    def list(self, prefix: str = "") -> list[str]:
        found = (path for path in self.folder.rglob("*") if path.is_file())
        names = (path.relative_to(self.folder).as_posix() for path in found)
        return sorted(name for name in names if name.startswith(prefix))

    def write(self, name: str, data: bytes | Path) -> None:
        """Whole or not there."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{uuid.uuid4().hex}")
        try:
            if isinstance(data, Path):
                shutil.copyfile(data, new)
            else:
                new.write_bytes(data)
            with open(new, "rb") as file:
                os.fsync(file.fileno())
            os.replace(new, path)
        finally:
            new.unlink(missing_ok=True)

    @contextmanager
    def local(self, name: str) -> Iterator[Path]:
        yield self.folder / name

    def admit(self, largest: int) -> None:
        pass
