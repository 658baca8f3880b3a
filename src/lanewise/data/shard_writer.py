"""Writing shards: documents in, Arrow IPC files and their index rows out."""

import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from lanewise.data.encode import Piece
from lanewise.data.shards import PER_TASK, batch_hash, shard_name
from lanewise.data.store import Side, sync
from lanewise.data.stores import Store
from lanewise.errors import UserError

BATCH = 4 * 2**20  # bytes of token ids in a record batch
SHARD = 64 * 2**20  # and in a shard
ROW = 2**22  # tokens after which a row ends: a longer document becomes several


class Batch(NamedTuple):
    """A row of the index: a record batch of a shard."""

    shard: int  # task * PER_TASK + number
    documents: int
    tokens: int
    tokens_at: int  # byte of the file where the token ids begin
    learned_at: int  # and the flags, a byte each; 0: there are none
    xxh3: int


INDEX = pa.schema([pa.field(name, pa.int64()) for name in Batch._fields])


class ShardWriter:
    """The shards of one side that one task writes. Memory: one record batch."""

    def __init__(self, store: Store, scratch: Path, side: Side, task: int, dtype: np.dtype, end: int, learned: bool):
        self.store, self.scratch, self.side, self.task = store, scratch, side, task
        self.dtype, self.end, self.learns = dtype, np.array([end], dtype), learned
        self.index: list[Batch] = []
        self.lengths: list[int] = []  # of all documents
        self.number = self.written = self.held = 0
        self.file: pa.RecordBatchFileWriter | None = None
        self._fresh()

    def _fresh(self) -> None:
        self.ids: list[str] = []
        self.sources: list[str] = []
        self.sizes: list[int] = []
        self.tokens: list[np.ndarray] = []
        self.flags: list[np.ndarray] = []
        self.held = 0

    def add(self, id: str, source: str, pieces: Iterable[Piece]) -> None:
        """A document, piece by piece: memory does not grow with it. Its end-of-text token is added here."""
        rows, tokens, flags = 0, [np.empty(0, self.dtype)], [np.empty(0, np.bool_)]
        for piece in pieces:
            if (piece.learned is not None) != self.learns:
                raise UserError(f"{id}: some documents are chats and some are not: build a set of each, and mix them")
            tokens.append(np.frombuffer(piece.tokens, self.dtype))
            flags.append(
                np.frombuffer(piece.learned, np.bool_) if piece.learned else np.ones(len(tokens[-1]), np.bool_)
            )
            if sum(map(len, tokens)) >= ROW:
                self._add_row(f"{id}#{rows}" if rows else id, source, np.concatenate(tokens), np.concatenate(flags))
                rows, tokens, flags = rows + 1, [], []
        last = np.concatenate([*tokens, self.end]), np.concatenate([*flags, np.ones(1, np.bool_)])
        self._add_row(f"{id}#{rows}" if rows else id, source, *last)

    def _add_row(self, id: str, source: str, tokens: np.ndarray, flags: np.ndarray) -> None:
        self.ids.append(id)
        self.sources.append(source)
        self.tokens.append(tokens)
        self.flags.append(flags)
        self.sizes.append(len(tokens))
        self.held += tokens.nbytes
        if self.held >= BATCH:
            self._write_batch()

    def _write_batch(self) -> None:
        if not self.sizes:
            return
        offsets = pa.array(np.concatenate([[0], np.cumsum(self.sizes)]), pa.int32())
        columns = {
            "id": pa.array(self.ids),
            "source": pa.array(self.sources),
            "tokens": pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(self.tokens))),
        }
        if self.learns:
            columns["learned"] = pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(self.flags).view(np.uint8)))
        batch = pa.record_batch(columns)
        if self.file is None:
            self.path = self.scratch / f".{uuid.uuid4().hex}"
            self.file = pa.ipc.new_file(str(self.path), batch.schema)
        self.file.write_batch(batch)
        self.lengths += self.sizes
        self.written += self.held
        self._fresh()
        if self.written >= SHARD:
            self._close_shard()

    def _close_shard(self) -> None:
        """Publish the shard. Where its buffers lie and their hashes are read back from the file."""
        if self.file is None:
            return
        self.file.close()
        self.file, self.written = None, 0
        if self.number >= PER_TASK:
            raise UserError(f"one file makes more than {PER_TASK} shards: split it, or unpack it (plain files are cut)")
        shard = self.task * PER_TASK + self.number
        self.index += index_of(self.path, shard)
        sync(self.path)
        self.store.write(shard_name(self.side, self.task, self.number), self.path)
        self.path.unlink()
        self.number += 1

    def close(self) -> dict[str, Any]:
        """All that is left, published; the rows of the index and the documents' lengths."""
        self._write_batch()
        self._close_shard()
        return {"index": [list(row) for row in self.index], "lengths": self.lengths}


def index_of(path: Path, shard: int) -> Iterator[Batch]:
    with pa.memory_map(str(path)) as file:
        whole = file.read_buffer()
        reader = pa.ipc.open_file(whole)
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            has_flags = "learned" in batch.schema.names
            at = [
                batch[name].values.buffers()[1].address - whole.address for name in ("tokens", *["learned"] * has_flags)
            ]
            tokens = len(batch["tokens"].values)
            yield Batch(shard, batch.num_rows, tokens, at[0], at[1] if has_flags else 0, batch_hash(batch))
