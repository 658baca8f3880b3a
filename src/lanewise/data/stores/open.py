"""From an address to a store."""

import re
from pathlib import Path

from lanewise import config
from lanewise.data.stores.base import Store
from lanewise.data.stores.cache import Cache
from lanewise.data.stores.hdfs import HDFS
from lanewise.data.stores.local import LocalStore
from lanewise.data.stores.remote import RemoteStore
from lanewise.data.stores.retry import TIMEOUT
from lanewise.data.stores.s3 import S3
from lanewise.errors import UserError

BACKENDS = {"s3": S3, "hdfs": HDFS}


def open_store(url: str | Path, cache: Cache | None = None, timeout: float = TIMEOUT) -> Store:
    """The folder at a path, file:///path, s3://bucket/folder or hdfs://host:port/folder. It need not exist yet.

    Remote files become local ones through `cache`; a call waits at most `timeout` seconds for a store that is away.
    Raises UserError for an address that is none, or one whose extra is not installed.
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
    return RemoteStore(url, BACKENDS[scheme], cache, timeout)


def configured(url: str | Path, data: config.Data) -> Store:
    """The store at an address, with the cache and the patience of a run file."""
    folder = Path(data.cache).expanduser() / "store"
    cache = Cache(folder, int(data.cache_limit_gb * 1e9), int(data.cache_free_gb * 1e9), data.store_timeout)
    return open_store(url, cache, data.store_timeout)
