"""The safetensors files of a Hugging Face folder, read and written one tensor at a time.

    model.safetensors                        if one file holds all, else
    model-00001-of-00003.safetensors, ...
    model.safetensors.index.json             {"metadata": {"total_size": bytes}, "weight_map": {tensor: file}}

The library reads. It cannot write without all of a file's tensors in memory, so the few lines that do are here. The
format (huggingface.co/docs/safetensors): the header's size as 8 little-endian bytes, the header in JSON, and the
tensors without gaps.
"""

import json
import os
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lanewise.errors import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_CODES = {dtype: code for code, dtype in DTYPES.items()}


class Form(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


# --------------------------------------------------------------------------------------------------------- reading


class Shards:
    """The tensors in `folder`. Reads the headers of all files. Raises UserError if a file is missing or damaged."""

    def __init__(self, folder: Path) -> None:
        self.forms: dict[str, Form] = {}
        self._files: dict[str, Path] = {}
        for file, names in _files(folder).items():
            for form in _header(file):
                if names is None or form.name in names:
                    self.forms[form.name], self._files[form.name] = form, file

    def tensor(self, name: str) -> Tensor:
        """The tensor `name`, mapped from its file: memory is taken only while it is read and the tensor lives."""
        with safe_open(self._files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor


def _files(folder: Path) -> dict[Path, set[str] | None]:
    """Each file, and the tensors it is read for (None: all of them)."""
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: None}
    index = folder / INDEX
    if not index.is_file():
        found = " (weights in other formats are not read: save them as safetensors)" * any(folder.glob("*.bin"))
        raise UserError(f"{folder}: holds neither {SINGLE} nor {INDEX}{found}")
    files: dict[Path, set[str] | None] = {}
    try:
        for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
            names = files.setdefault(folder / file, set())
            assert names is not None
            names.add(name)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{index}: cannot be read ({error!r}): copy the folder again") from None
    return files


def _header(file: Path) -> list[Form]:
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
            described = [(name, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()]
    except FileNotFoundError:
        raise UserError(f"{file}: missing: copy the folder again") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: damaged or cut short ({error}): copy it again") from None
    for name, _, code in described:
        if code not in DTYPES:
            raise UserError(f"{file}: {name!r} is of type {code}: only {', '.join(DTYPES)} are read")
    return [Form(name, shape, DTYPES[code]) for name, shape, code in described]


# --------------------------------------------------------------------------------------------------------- writing


def write(folder: Path, forms: Sequence[Form], tensors: Iterable[Tensor], limit: int) -> list[Path]:
    """Write `tensors`, which come as `forms` say, in files of at most `limit` bytes of data (but one tensor at least).

    Raises OSError.
    """
    shards = _split(forms, limit)
    names = [SINGLE]
    if len(shards) > 1:
        names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
        weight_map = {form.name: name for name, shard in zip(names, shards, strict=True) for form in shard}
        index = {"metadata": {"total_size": sum(form.nbytes for form in forms)}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    source = iter(tensors)
    for name, shard in zip(names, shards, strict=True):
        with open(folder / name, "wb") as file:
            file.write(_head(shard))
            for form in shard:
                tensor = next(source)
                assert (tuple(tensor.shape), tensor.dtype) == form[1:], f"{form} came as {tensor.shape} {tensor.dtype}"
                file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
                del tensor  # before the next one is made
            file.flush()
            os.fsync(file.fileno())
    return [folder / name for name in names]


def _split(forms: Sequence[Form], limit: int) -> list[list[Form]]:
    shards: list[list[Form]] = []
    room = 0
    for form in forms:
        if not shards or form.nbytes > room:
            shards.append([])
            room = limit
        shards[-1].append(form)
        room -= form.nbytes
    return shards


def _head(forms: Sequence[Form]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at, width = 0, 8
    for form in forms:
        assert form.dtype.itemsize <= width, "wide elements come first, so that all are aligned"
        width = form.dtype.itemsize
        entries[form.name] = {
            "dtype": _CODES[form.dtype],
            "shape": form.shape,
            "data_offsets": (at, at + form.nbytes),
        }
        at += form.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
