"""From an address to a store."""

import re
from pathlib import Path

from lanewise import config
from lanewise.data.stores.base import Store
from lanewise.data.stores.cache import Cache
from lanewise.data.stores.hdfs import HDFS
from lanewise.data.stores.local import LocalStore
from lanewise.data.stores.remote import RemoteStore
from lanewise.data.stores.s3 import S3
from lanewise.errors import UserError

BACKENDS = {"s3": S3, "hdfs": HDFS}


_settings = config.Data()


def configure(data: config.Data) -> None:
    """Makes the cache and the patience of a run file those of all stores this process opens from now on."""
    global _settings  # noqa: PLW0603 - stores are opened deep inside readers that know an address and no run file
    _settings = data


def open_store(url: str | Path, cache: Cache | None = None, timeout: float | None = None) -> Store:
    """The folder at a path, file:///path, s3://bucket/folder or hdfs://host:port/folder. It need not exist yet.

    Remote files become local ones through `cache`; a call waits at most `timeout` seconds for a store that is away.
    Both are the run file's unless given (see `configure`). Raises UserError for an address that is none, or one whose
    extra is not installed.
    """
    url = str(url)
    scheme = found[1] if (found := re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", url)) else ""
    if not scheme or scheme == "file":
        path = url.removeprefix("file://")
        if not path or (scheme and not path.startswith("/")):
            raise UserError(f"{url!r} is no folder; write a path, or file:///path")
        return LocalStore(Path(path).expanduser())
    if scheme not in BACKENDS:
        raise UserError(f"{url}: no store speaks {scheme}://; use a path, s3:// or hdfs://")
    timeout = timeout or _settings.store_timeout
    return RemoteStore(url, BACKENDS[scheme], cache or _configured_cache(timeout), timeout)


def _configured_cache(timeout: float) -> Cache:
    folder = Path(_settings.cache).expanduser() / "store"
    return Cache(folder, int(_settings.cache_limit_gb * 1e9), int(_settings.cache_free_gb * 1e9), timeout)
