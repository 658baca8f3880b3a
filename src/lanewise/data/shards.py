"""Shards: documents of tokens as Arrow IPC files, and a manifest. Any Arrow reader opens them.

manifest.json                           counts, the schema, what made it, and size and xxhash of each file below
tokenizer.json, tokenizer_config.json   in Hugging Face's format
train-00000-000.arrow, held-...         id, source, tokens, and in sets of chats `learned`; a document is a row
train.index.arrow, held.index.arrow     a row per record batch: shard, documents, tokens, where in the file the token
                                        ids (and flags) lie, xxhash of all its buffers
train.starts.arrow, held.starts.arrow   int64: where each document starts in all the tokens, then where the last ends

A record batch is some MB and is the unit of checking. Its token ids lie in one piece in the file, so that reading a
stretch takes a memory map, or one ranged read from a store, and no decoding.
"""

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from lanewise.data import tokenizer
from lanewise.data.store import SIDES, Side
from lanewise.data.stores import Store, open_store
from lanewise.errors import UserError

FORMAT = "lanewise-shards-1"
MANIFEST = "manifest.json"


FETCHERS = 2  # shards fetched from a store at once
MOST_MAPPED, MOST_MAPPED_FAR = (
    1024,
    64,
)  # record batches; a map costs address space, and holds what a cache deleted on the disk
PER_TASK = 1000  # most shards a task of a build writes


def shard_name(side: str, task: int, number: int) -> str:
    return f"{side}-{task:05}-{number:03}.arrow"


class Damage(UserError):
    """Tokens that are not what was written; the message names shard, record batch and documents."""


class ShardSet:
    """A folder of shards on any store. Raises UserError if there is none, or if it is damaged so far as is read."""

    def __init__(self, address: str | Path) -> None:
        self.address = str(address)
        self.store: Store = open_store(self.address)
        try:
            raw = self.store.read(MANIFEST, 0, self.store.size(MANIFEST))
            self.manifest: dict[str, Any] = json.loads(raw)
            assert self.manifest["format"] == FORMAT
        except FileNotFoundError:
            raise UserError(f"{address}: no {MANIFEST} there: it is no shard set, or its build did not end") from None
        except (ValueError, KeyError, AssertionError):
            raise UserError(f"{address}: {MANIFEST} is damaged, or of another version: build the set again") from None
        self.store.admit(self.manifest["largest_shard"])

    def side(self, side: Side, check: bool = True) -> "ShardTokens":
        """check: each record batch is hashed when it is first read."""
        return ShardTokens(self, side, check)

    @property
    def identity(self) -> dict[str, Any]:
        """Hashes by side, and of each shard if there are not too many: equal, or other data."""
        files = self.manifest["files"]
        return {side: files[f"{side}.index.arrow"]["xxh3"] for side in SIDES} | {"shards": self.manifest["shards"]}

    @cached_property
    def tokenizer(self) -> tokenizer.Tokenizer:
        raw = [self.store.read(name, 0, self.store.size(name)) for name in tokenizer.FILES]
        return tokenizer.parse(self.store.identity, *(part.decode() for part in raw))

    def table(self, name: str) -> pa.Table:
        """A sidecar, memory-mapped. Raises Damage if it is not the one the manifest knows."""
        with self.opened(name) as file:
            whole = file.read_buffer()
        if not _is(whole, self.manifest["files"][name]):
            raise Damage(f"{self.store.identity}/{name} is not what was written: restore it, or build the set again")
        return pa.ipc.open_file(whole).read_all()

    def is_whole(self, name: str, known: dict[str, Any]) -> bool:
        """Whether a file of the set is the one the manifest knows."""
        with self.opened(name) as file:
            return _is(file.read_buffer(), known)

    @contextmanager
    def opened(self, name: str) -> Iterator[pa.MemoryMappedFile]:
        """A file of the set, memory-mapped. What is mapped stays, even if a cache lets go of the file."""
        try:
            with self.store.local(name) as path, pa.memory_map(str(path)) as file:
                yield file
        except FileNotFoundError:
            raise Damage(f"{self.store.identity}/{name} is missing: restore it, or build the set again") from None


class View(NamedTuple):
    """A record batch's tokens (or flags), which are those from `first` to before `last` of all; memory-mapped."""

    first: int
    last: int
    values: np.ndarray


class ShardTokens:
    """The tokens of one side of a set (see `windows.Tokens`)."""

    def __init__(self, shards: ShardSet, side: Side, check: bool) -> None:
        self.set, self.name, self.check = shards, side, check
        index = shards.table(f"{side}.index.arrow")
        columns = ("shard", "documents", "tokens", "tokens_at", "learned_at", "xxh3")
        self.columns = {name: index[name].to_numpy() for name in columns}
        self.first_token = _before(self.columns["tokens"])
        self.first_document = _before(self.columns["documents"])
        self.total = int(self.first_token[-1])
        self.documents = int(self.first_document[-1])
        self.dtype = np.dtype(shards.manifest["dtype"])
        self.checked: set[int] = set()
        self.flagged: bool = shards.manifest["learned"]
        self.is_remote = is_far(shards.address)
        self.views: dict[tuple[int, str], View] = {}
        self.fetching: dict[str, Future[None]] = {}

    def __len__(self) -> int:
        return len(self.first_token) - 1  # record batches

    @cached_property
    def starts(self) -> np.ndarray:
        return self.set.table(f"{self.name}.starts.arrow")["start"].to_numpy()

    def shard_of(self, batch: int) -> str:
        return shard_name(self.name, *divmod(int(self.columns["shard"][batch]), PER_TASK))

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._stretch(start, stop, "tokens_at", self.dtype)

    def learned(self, start: int, stop: int) -> np.ndarray | None:
        if not self.flagged:
            return None
        return self._stretch(start, stop, "learned_at", np.dtype(np.bool_))

    def _stretch(self, start: int, stop: int, at: str, dtype: np.dtype) -> np.ndarray:
        batch = int(self.first_token.searchsorted(start, side="right")) - 1
        view = self.views.get((batch, at))
        if view is not None and stop <= view.last:  # most often, so nothing else is done on this way
            return view.values[start - view.first : stop - view.first]
        parts = []
        while start < stop:
            first, last = int(self.first_token[batch]), int(self.first_token[batch + 1])
            a, b = start - first, min(stop, last) - first
            if self._is_here(batch):
                parts.append(self._view(batch, at, dtype).values[a:b])
            else:
                place, size = int(self.columns[at][batch]), dtype.itemsize
                raw = self.set.store.read(self.shard_of(batch), place + a * size, place + b * size)
                parts.append(np.frombuffer(raw, dtype))
            start, batch = last, batch + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _view(self, batch: int, at: str, dtype: np.dtype) -> View:
        if (view := self.views.get((batch, at))) is None:
            if self.check and batch not in self.checked:
                self.verify(batch)
            first, last = int(self.first_token[batch]), int(self.first_token[batch + 1])
            view = View(first, last, self._map(batch, at, dtype))
            if len(self.views) >= (MOST_MAPPED_FAR if self.is_remote else MOST_MAPPED):
                self.views = {}
            self.views[batch, at] = view
        return view

    def _is_here(self, batch: int) -> bool:
        """Whether a shard is on this machine. If not it is fetched, and read in stretches from afar until it is."""
        if not self.is_remote:
            return True
        shard = self.shard_of(batch)
        if shard not in self.fetching:
            self.fetching[shard] = _fetchers().submit(self._fetch, shard)
        fetched = self.fetching[shard]
        if fetched.done():
            fetched.result()
        return fetched.done()

    def _fetch(self, shard: str) -> None:
        with self.set.opened(shard):
            pass

    def _map(self, batch: int, at: str, dtype: np.dtype) -> np.ndarray:
        count = int(self.columns["tokens"][batch])
        try:
            with self.set.opened(self.shard_of(batch)) as file:
                return np.frombuffer(file.read_buffer(), dtype, count, int(self.columns[at][batch]))
        except (OSError, ValueError, pa.ArrowException) as error:
            raise Damage(self._complaint(batch, f"cannot be read ({error})")) from None

    def verify(self, batch: int) -> None:
        """Raises Damage if a record batch is not what was written."""
        try:
            found = self.rows(batch)
            found.validate()
            same = batch_hash(found) == int(self.columns["xxh3"][batch])
        except (OSError, pa.ArrowException, IndexError) as error:
            reason = str(error).splitlines()[0]
            raise Damage(self._complaint(batch, f"cannot be read ({reason})")) from None
        if not same:
            raise Damage(self._complaint(batch, "is not what was written"))
        self.checked.add(batch)

    def rows(self, batch: int) -> pa.RecordBatch:
        """A record batch, memory-mapped, not checked."""
        with self.set.opened(self.shard_of(batch)) as file:
            return pa.ipc.open_file(file.read_buffer()).get_batch(self._number(batch))

    def _number(self, batch: int) -> int:
        """Which of its shard's record batches it is."""
        shards = self.columns["shard"]
        return batch - int(shards.searchsorted(shards[batch]))

    def _complaint(self, batch: int, what: str) -> str:
        first, last = int(self.first_document[batch]), int(self.first_document[batch + 1]) - 1
        return (
            f"{self.set.store.identity}/{self.shard_of(batch)}, record batch {self._number(batch)} "
            f"({self.name} documents {first} to {last}) {what}: restore it, or build the set again"
        )


@cache
def _fetchers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(FETCHERS, "fetch-shards")


def is_far(address: str) -> bool:
    """Whether what is at this address has to be fetched."""
    return "://" in address and not address.startswith("file://")


def is_shard_set(address: str) -> bool:
    """Whether there are shards at this address."""
    if "://" not in address:
        return (Path(address).expanduser() / MANIFEST).is_file()
    try:
        return open_store(address).size(MANIFEST) > 0
    except FileNotFoundError:
        return False


def batch_hash(batch: pa.RecordBatch) -> int:
    """xxh3_64 over the lengths and bytes of all buffers of all columns, as a signed int64."""
    total = xxhash.xxh3_64()
    for column in batch.columns:
        for buffer in column.buffers():
            total.update(b"-" if buffer is None else buffer.size.to_bytes(8, "little"))
            if buffer is not None:
                total.update(buffer)
    return total.intdigest() - 2**63


def _is(buffer: pa.Buffer, known: dict[str, Any]) -> bool:
    return buffer.size == known["bytes"] and xxhash.xxh3_128_hexdigest(buffer) == known["xxh3"]


def _before(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
