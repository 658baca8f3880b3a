"""Megatron's indexed token files: NAME.bin holds the ids, NAME.idx where each document starts. Read in place.

NAME.idx: the magic, version 1 (uint64), a code for the type of the ids (uint8), counts of sequences and of document
bounds (uint64), the length of each sequence (int32), its place in bytes (int64), the first sequence of each document
and of the end (int64).
"""

import struct
from functools import cached_property
from pathlib import Path

import numpy as np
import xxhash

from lanewise.data.store import mark
from lanewise.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
TYPES = {1: "u1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
HEAD = 9 + 8 + 1 + 16


def is_megatron(source: str) -> bool:
    """Whether a source is such a pair of files, named with or without .bin or .idx."""
    return "://" not in source and all(path.is_file() for path in _pair(source))


def _pair(source: str) -> tuple[Path, Path]:
    path = Path(source).expanduser()
    base = str(path.with_suffix("") if path.suffix in (".bin", ".idx") else path)
    return Path(f"{base}.bin"), Path(f"{base}.idx")


class MegatronTokens:
    """Documents first to last-1 of a pair of files (see `windows.Tokens`); last None: all."""

    flagged = False

    def __init__(self, source: str, first: int = 0, last: int | None = None) -> None:
        self.ids_path, index_path = _pair(source)
        raw = index_path.read_bytes()[:HEAD]
        if raw[:9] != MAGIC or len(raw) < HEAD or raw[17] not in TYPES:
            raise UserError(f"{index_path}: not an index of version 1 of token ids; choose another data.source")
        _, code, sequences, bounds = struct.unpack("<QBQQ", raw[9:])
        lengths = np.memmap(index_path, "<i4", "r", HEAD, (sequences,)) if sequences else np.empty(0, "<i4")
        first_sequences = np.memmap(index_path, "<i8", "r", HEAD + 12 * sequences, (bounds,))
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        starts = ends[first_sequences]
        self.ids = np.memmap(self.ids_path, TYPES[code], "r") if starts[-1] else np.empty(0, "<i4")
        if starts[-1] != len(self.ids):
            raise UserError(
                f"{self.ids_path} holds {len(self.ids):,} tokens, its index {starts[-1]:,}: it is cut short, or "
                "the pair does not belong together; restore it"
            )
        keep = np.concatenate([[True], np.diff(starts) > 0])  # documents without a token are none
        starts = starts[keep][first : None if last is None else last + 1]
        self.first, self._starts = int(starts[0]), starts - starts[0]
        self.total, self.documents = int(self._starts[-1]), len(starts) - 1
        self.index_path = index_path

    @property
    def starts(self) -> np.ndarray:
        return self._starts

    @cached_property
    def identity(self) -> str:
        total = xxhash.xxh3_128(self.index_path.read_bytes())
        total.update(f"{mark(self.ids_path)} {self.first} {self.total}".encode())
        return total.hexdigest()

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.ids[self.first + start : self.first + stop]

    def learned(self, start: int, stop: int) -> np.ndarray | None:
        return None


def sides(source: str, held_out: float) -> dict[str, MegatronTokens]:
    """The last documents, about that share of the tokens, are held out."""
    whole = MegatronTokens(source)
    cut = int(whole.starts.searchsorted(round(whole.total * (1 - held_out)), side="left"))
    return {"train": MegatronTokens(source, 0, cut), "held": MegatronTokens(source, cut)}
