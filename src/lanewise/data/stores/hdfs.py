"""HDFS, by hdfs-native (no Java). A nameservice and security come from HADOOP_CONF_DIR, the user from HADOOP_USER_NAME.

The client's own interface is used rather than its fsspec one, which reads '#' and '?' in a name as parts of a URL.
It waits for a NameNode that is away without end, so each call has a limit, after which the client is left behind.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lanewise.data.stores.atomic import MARK, unfinished
from lanewise.data.stores.extras import needs
from lanewise.data.stores.remote import PIECE, Backend, Stat
from lanewise.data.stores.retry import brief
from lanewise.errors import UserError

T = TypeVar("T")
ATTEMPT = 20.0  # seconds for one call, of at most PIECE bytes
PASSING = ("StandbyException", "SafeModeException", "RetriableException", "RetryStartFileException", "IOException")


class HDFS(Backend):
    remedy = "HADOOP_CONF_DIR and HADOOP_USER_NAME"

    def __init__(self, url: str, timeout: float):
        self.module = needs("hdfs_native", "hdfs", url)
        host, _, folder = url.removeprefix("hdfs://").partition("/")
        self.address = f"hdfs://{host}"
        self.root = f"/{folder}".rstrip("/")
        self.identity = self.address + self.root
        self.attempt = min(ATTEMPT, timeout)
        self._connect()

    def read(self, name: str, start: int, stop: int) -> bytes:
        def do() -> bytes:
            file = self.client.read(self._path(name))
            last = min(stop, len(file))
            return file.read_range(start, last - start) if start < last else b""

        return self._within_limit(do)

    def stat(self, name: str) -> Stat:
        info = self._within_limit(lambda: self.client.get_file_info(self._path(name)))
        if info.isdir:
            raise FileNotFoundError(name)
        return Stat(info.length, str(info.modification_time))

    def list(self, prefix: str) -> list[str]:
        below = self._path(prefix.rpartition("/")[0]).rstrip("/") or "/"
        try:
            found = self._within_limit(lambda: list(self.client.list_status(below, True)))
        except FileNotFoundError:
            return []
        names = (file.path.removeprefix(self.root + "/") for file in found if not file.isdir)
        return [name for name in names if name.startswith(prefix) and not name.endswith(MARK)]

    def write(self, name: str, data: bytes | Path) -> None:
        part = self._path(unfinished(name))
        try:
            self._fill(part, data)
            self._within_limit(lambda: self.client.rename(part, self._path(name), True))
        except Exception:
            with suppress(Exception):
                self._within_limit(lambda: self.client.delete(part))
            raise

    def _fill(self, part: str, data: bytes | Path) -> None:
        file = self._within_limit(lambda: self.client.create(part))
        if isinstance(data, bytes):
            pieces = iter([data[i : i + PIECE] for i in range(0, len(data), PIECE)])
            self._drain(file, pieces.__next__)
        else:
            with open(data, "rb") as source:
                self._drain(file, lambda: source.read(PIECE))
        self._within_limit(file.close)

    def _drain(self, file: Any, piece: Callable[[], bytes]) -> None:
        with suppress(StopIteration):
            while block := piece():
                self._within_limit(partial(file.write, block))

    def transient(self, error: Exception) -> bool:
        """The client's errors are RuntimeErrors that begin with a kind; RPCError then names the server's exception."""
        text = str(error)
        if text.startswith("RPCError"):
            return any(kind in text.partition(",")[0] for kind in PASSING)
        if isinstance(error, RuntimeError):
            return not text.startswith(("InvalidArgument", "InvalidPath", "UnsupportedFeature", "SASLError"))
        return isinstance(error, OSError) and not isinstance(
            error, FileNotFoundError | PermissionError | FileExistsError | IsADirectoryError
        )

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _connect(self) -> None:
        try:
            self.client = self.module.Client(self.address)
        except Exception as e:
            raise UserError(f"{self.identity}: {e}; write hdfs://host:port/folder, or set HADOOP_CONF_DIR") from None

    def _within_limit(self, do: Callable[[], T]) -> T:
        """What `do` gives. It runs in a thread of its own: a call the client never ends is left behind with it."""
        done: list[T] = []
        failed: list[Exception] = []

        def run() -> None:
            try:
                done.append(do())
            except Exception as e:
                failed.append(PermissionError(brief(e)) if "AccessControlException" in str(e) else e)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self.attempt)
        if failed:
            raise failed[0]
        if not done:
            self._connect()
            raise TimeoutError(f"no answer in {self.attempt:g} s")
        return done[0]
