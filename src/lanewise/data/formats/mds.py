"""MosaicML's MDS shards: a document a sample, from a column of text (str, bytes) or token ids (ndarray).

index.json beside the shards names the columns. A shard is the count of samples n, n + 1 offsets (uint32 each), some
JSON, and the samples; a sample is the sizes (uint32) of the columns without a fixed one, then all columns.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lanewise.data.formats.base import Document, Part, document_of, no_column, opened, reading
from lanewise.errors import UserError

ND_TYPES = {8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 64: "<u8", 65: "<i8"}


def documents(path: Path, column: str, part: Part | None = None) -> Iterator[Document]:
    about = _entry(path)
    names, encodings, sizes = (about[f"column_{kind}"] for kind in ("names", "encodings", "sizes"))
    if column not in names:
        raise UserError(no_column(str(path), column, names))
    with reading(path), opened(path) as stream:
        raw = memoryview(stream.read())
    try:
        offsets = np.frombuffer(raw, "<u4", int.from_bytes(raw[:4], "little") + 1, 4)
        if offsets[-1] != len(raw):
            raise ValueError
        for number in range(len(offsets) - 1):
            sample = raw[offsets[number] : offsets[number + 1]]
            free = np.frombuffer(sample, "<u4", sizes.count(None)).tolist()
            at, free_sizes = 4 * len(free), iter(free)
            lengths = [next(free_sizes) if size is None else size for size in sizes]
            start = at + sum(lengths[: names.index(column)])
            value = bytes(sample[start : start + lengths[names.index(column)]])
            encoding = encodings[names.index(column)]
            yield document_of(_decoded(value, encoding), column, f"{path}, sample {number + 1}")
    except UserError:
        raise
    except ValueError:
        raise UserError(f"{path}: damaged, or not the shard its index.json describes; repair it") from None


def _entry(path: Path) -> dict[str, Any]:
    """What index.json says of this shard."""
    index = path.with_name("index.json")
    try:
        for shard in json.loads(index.read_text(encoding="utf-8"))["shards"]:
            files = [shard[kind]["basename"] for kind in ("raw_data", "zip_data") if shard.get(kind)]
            if path.name in files:
                return shard
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path}: there is no readable index.json beside it; restore it") from None
    raise UserError(f"{path}: {index} does not name it; restore the index, or remove the shard")


def _decoded(raw: bytes, encoding: str) -> Any:
    kind, *about = encoding.split(":")
    if kind in ("str", "bytes"):
        return raw
    if kind != "ndarray":
        return object()  # refused, as any other content that is not text or ids
    at = 0
    dtype = np.dtype(about[0]) if about else np.dtype(ND_TYPES.get(raw[0], "V1"))
    at += not about
    if len(about) < 2:  # the shape stands in the sample: how many dims and how wide each is, in one byte
        at += 1 + (raw[at] >> 2) * 2 ** (raw[at] % 4)
    return np.frombuffer(raw, dtype, offset=at)
