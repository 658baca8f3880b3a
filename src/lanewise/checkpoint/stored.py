"""One checkpoint, read without a process group and a tensor at a time: for `inspect`, `generate`, `export`."""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import TensorStorageMetadata

from lanewise.checkpoint.dcp import LoadPieces, Reader
from lanewise.checkpoint.manifest import Damaged, Manifest
from lanewise.checkpoint.pieces import Entry
from lanewise.errors import UserError


class Stored:
    """The checkpoint in the folder `path`. Checks only its manifest: `manifest.verify(path)` reads every byte.

    Raises UserError if `path` is not a checkpoint.
    """

    def __init__(self, path: Path) -> None:
        try:
            self.manifest = Manifest.read(path)
            self._reader = Reader(path)
            described = self._reader.read_metadata().state_dict_metadata
        except Damaged as damage:
            raise UserError(f"{damage} (is {path} a checkpoint? choose a folder named step-...)") from None
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error}; choose another checkpoint") from None
        self.path = path
        self.forms: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            name: (tuple(form.size), form.properties.dtype)
            for name, form in sorted(cast(dict[str, TensorStorageMetadata], described).items())
        }

    @property
    def nbytes(self) -> int:
        """Bytes on disk, the manifest not counted."""
        return sum(record.size for record in self.manifest.files.values())

    def tensor(self, name: str) -> Tensor:
        """The full tensor `name`, on the CPU. Raises UserError if there is none."""
        if name not in self.forms:
            raise UserError(f"{self.path}: holds no tensor {name!r}")
        shape, dtype = self.forms[name]
        out = torch.empty(shape, dtype=dtype)
        planner = LoadPieces(self.path, all_names=False)
        dcp.load({name: Entry.whole(out)}, storage_reader=self._reader, planner=planner, no_dist=True)
        return out

    def tensors(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """(name without `prefix`, full tensor) of each stored tensor under `prefix`, in the order of names."""
        for name in self.forms:
            if name.startswith(prefix):
                yield name.removeprefix(prefix), self.tensor(name)
