"""Folders on some store, by their address."""

from lanewise.data.stores.local import LocalStore
from lanewise.errors import UserError

Store = LocalStore


def open_store(address: str) -> Store:
    """The folder at `address`. Raises UserError for a kind of store there is no reader for."""
    if "://" in address:
        raise UserError(f"{address}: no store of this kind; give a local path")
    return LocalStore(address)
