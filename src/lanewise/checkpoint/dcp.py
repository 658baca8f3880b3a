"""torch's distributed checkpoint (DCP), taught our pieces, checksums and publication.

DCP plans a save on its first rank, lets every rank write its own file, and gathers the results: if any rank failed,
every rank learns of it (CheckpointException) and nothing goes on. What is added here: pieces instead of DTensors, a
plan that is proven complete, a digest of every byte on its way to the disk, and a last step, after all ranks have
written, that makes the folder a checkpoint.
"""

import io
import os
import pickle
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint import (
    ChunkStorageMetadata,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    LoadPlan,
    LoadPlanner,
    Metadata,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorStorageMetadata,
    WriteItem,
)
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils.serialization import config as serialization

from lanewise.checkpoint.manifest import NAME, FileRecord, Manifest, hidden_name
from lanewise.checkpoint.pieces import Piece, State
from lanewise.data.stores.atomic import sync
from lanewise.errors import UserError

# One process without a process group is a normal case here, not an oversight.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(piece.offsets), sizes=piece.tensor.shape)


# ---------------------------------------------------------------------------------------------------------- saving


class SavePieces(DefaultSavePlanner):
    """Plans a save of this rank's pieces, and proves that all ranks' pieces are each tensor exactly once."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        state = cast(State, self.state_dict)
        self.tensors: dict[MetadataIndex, Tensor] = {}
        items = []
        for name, entry in state.items():
            for piece in filter(lambda piece: piece.tensor.numel(), entry.pieces):
                index = MetadataIndex(name, piece.offsets)
                data = TensorWriteData(_chunk(piece), TensorProperties(dtype=entry.dtype), torch.Size(entry.shape))
                items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
                self.tensors[index] = piece.tensor
        self.plan = SavePlan(items, planner_data={name: (e.shape, e.dtype) for name, e in state.items()})
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        forms: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        held: Counter[str] = Counter()
        for rank, plan in enumerate(all_plans):
            for name, form in plan.planner_data.items():
                known = forms.setdefault(name, form)
                assert known == form, f"{name}: rank {rank} says {form}, an earlier rank {known}"
            for item in plan.items:
                held[item.index.fqn] += prod(cast(TensorWriteData, item.tensor_data).chunk.sizes)
        for name, (shape, _) in forms.items():
            # Overlaps are DCP's own check; with the right number of elements and no overlap, nothing is missing.
            assert held[name] == prod(shape), f"{name}: the ranks hold {held[name]} of its {prod(shape)} elements"
        plans, metadata = super().create_global_plan([SavePlan(plan.items) for plan in all_plans])
        for name, (shape, dtype) in forms.items():  # tensors without elements have no pieces
            empty = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [])
            metadata.state_dict_metadata.setdefault(name, empty)
        return plans, metadata

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.tensors[index]


class _DigestingFile(io.BufferedWriter):
    """A file that takes the digest of what is written into it. (Buffered, because a raw write may be a short one.)"""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w"))
        self._size, self._digest = 0, xxhash.xxh3_128()

    def write(self, data: Any) -> int:
        written = super().write(data)
        self._size += written
        self._digest.update(data)
        return written

    def record(self) -> FileRecord:
        return FileRecord(self._size, self._digest.hexdigest())


class _DigestingFiles(FileSystem):
    """The local file system; remembers the size and digest of each file written through it."""

    def __init__(self) -> None:
        self.written: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb", mode
        with _DigestingFile(Path(path)) as file:
            yield file
        self.written[Path(path).name] = file.record()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class _FileResult(WriteResult):
    """Travels to the first rank with DCP's results: a whole file (`index.fqn`) and its digest (`storage_data`)."""


class Writer(FileSystemWriter):
    """Writes into `temporary`; when every rank has succeeded the first one renames it to `final`."""

    def __init__(self, temporary: Path, final: Path, step: int, meta: dict[str, Any]) -> None:
        # One thread: with more, DCP drops an error raised in a helper thread and reports success.
        super().__init__(temporary, single_file_per_rank=True, sync_files=True, thread_count=1)
        self.fs: _DigestingFiles = _DigestingFiles()
        self.temporary, self.final, self.step, self.meta = temporary, final, step, meta

    def storage_meta(self) -> StorageMeta | None:
        return None  # DCP would pickle the folder's path, which Python 3.13 writes and 3.11 cannot read

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        # torch.save's CRC-32 costs three quarters of its time, and our digest covers the same bytes.
        try:
            with serialization.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
                results = super().write_data(plan, planner).wait()
        except RuntimeError as error:
            raise _behind(error) from error  # torch's zip writer hides an OSError behind "unexpected pos"
        for name, (size, digest) in self.fs.written.items():
            results.append(_FileResult(MetadataIndex(name), size, digest))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank, once all have written: the manifest, everything durable, and the name."""
        super().finish(metadata, [[r for r in rank if not isinstance(r, _FileResult)] for rank in results])
        files = {
            r.index.fqn: FileRecord(r.size_in_bytes, r.storage_data)
            for rank in results
            for r in rank
            if isinstance(r, _FileResult)
        }
        manifest = Manifest(self.step, self.meta, files | self.fs.written)
        for name, (size, _) in manifest.files.items():
            if not (self.temporary / name).is_file() or (self.temporary / name).stat().st_size != size:
                raise FileNotFoundError(
                    f"{name} is not whole in {self.temporary.parent}: do all ranks share this folder?"
                )
        with open(self.temporary / NAME, "w", encoding="utf-8") as file:
            file.write(manifest.dump())
            file.flush()
            os.fsync(file.fileno())
        sync(self.temporary)
        if self.final.exists():  # only if it did not verify (see store)
            self.final.rename(hidden_name(self.final))
        self.temporary.rename(self.final)
        try:
            sync(self.final.parent)
        except OSError:
            self.final.rename(self.temporary)  # a failed save publishes nothing
            raise


def _behind(error: BaseException) -> BaseException:
    """The OSError that led to `error`, or `error` itself."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause or error


# --------------------------------------------------------------------------------------------------------- loading


class LoadPieces(LoadPlanner):
    """Fills this rank's pieces in place. `all_names`: an error if the ranks together leave out a stored tensor."""

    def __init__(self, path: Path, *, all_names: bool) -> None:
        self.path, self.all_names = path, all_names

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self.state: State = state_dict
        self.stored = cast(dict[str, TensorStorageMetadata], metadata.state_dict_metadata)

    def create_local_plan(self) -> LoadPlan:
        items = []
        for name, entry in self.state.items():
            if name not in self.stored:
                raise UserError(f"{self.path}: holds no tensor {name!r}; was it written by a run with another model?")
            form = self.stored[name]
            _same(self.path, name, "shape", tuple(form.size), entry.shape)
            _same(self.path, name, "dtype", form.properties.dtype, entry.dtype)
            items += create_read_items_for_chunk_list(name, form, [_chunk(piece) for piece in entry.pieces])
        return LoadPlan(items, planner_data=set(self.state))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        if self.all_names:
            left = sorted(set(self.stored).difference(*(plan.planner_data for plan in global_plan)))
            if left:
                raise UserError(
                    f"{self.path}: holds {len(left)} tensors this run has no place for, such as {left[0]!r}; "
                    "was it written by a run with another model?"
                )
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError(f"{read_item.dest_index.fqn} is not a tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        entry, index = self.state[read_item.dest_index.fqn], read_item.dest_index.index
        assert index is not None
        tensor = entry.pieces[index].tensor.detach()
        for dim, (offset, size) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, offset, size)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass  # `resolve_tensor` gave a view: the piece is filled


def _same(path: Path, name: str, what: str, stored: Any, wanted: Any) -> None:
    if stored != wanted:
        raise UserError(f"{path}: {name!r} is stored with {what} {stored}, this run has {wanted}")


_DCP = "torch.distributed.checkpoint."
_DESCRIPTIONS = {(_DCP + "filesystem", "_StorageInfo"), ("torch", "Size"), ("torch.serialization", "_get_layout")} | {
    (_DCP + "metadata", name)
    for name in (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
}


class _Descriptions(pickle.Unpickler):
    """Reads DCP's .metadata, which is a pickle, without letting it name code to run."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _DESCRIPTIONS:
            return super().find_class(module, name)
        raise UserError(f".metadata asks for {module}.{name}: this is no checkpoint of ours, do not load it")


class Reader(FileSystemReader):
    """Reads a checkpoint's data; parses its description once."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            with open(Path(self.path) / ".metadata", "rb") as file:
                self._metadata = _Descriptions(file).load()
        return self._metadata
