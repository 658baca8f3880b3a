"""A folder of tokens: its format, writing it, and telling a whole one from a damaged one.

tokenizer.json, tokenizer_config.json   in Hugging Face's format
train.bin, held.bin                     token ids, uint16 or (vocabulary above 65,536) uint32, little endian;
                                        documents back to back, each closed by the end-of-text token
train.learned, held.learned             only of chats: a bool a token, whether it is worth predicting
train.starts, held.starts               int64, little endian: where each document starts, then where the last ends
meta.json                               counts, settings, identity, and the size and mark of each file above
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import xxhash

from lanewise.data.stores.atomic import sync

FORMAT = 2
Side = Literal["train", "held"]
SIDES: tuple[Side, Side] = ("train", "held")


class Writer:
    """Appends documents to one side of a folder. Buffered; memory does not grow with the data."""

    def __init__(self, folder: Path, side: Side, dtype: np.dtype, end: int):
        self.tokens_file = open(folder / f"{side}.bin", "wb")  # noqa: SIM115 - closed in close()
        self.starts_file = open(folder / f"{side}.starts", "wb")  # noqa: SIM115
        self.end_bytes = np.array([end], dtype).tobytes()
        self.item = dtype.itemsize
        self.learned: BinaryIO | None = None
        self.learned_path = folder / f"{side}.learned"
        self.documents = self.tokens = self.closed_at = 0
        self._start()

    def add(self, tokens: bytes, learned: bytes | None = None) -> None:
        """More tokens of the document being written, and which of them are worth predicting (None: all)."""
        if learned is not None:
            self.learn()
        if self.learned is not None:
            self.learned.write(b"\x01" * (len(tokens) // self.item) if learned is None else learned)
        self.tokens_file.write(tokens)
        self.tokens += len(tokens) // self.item

    def learn(self) -> None:
        """From here on what is worth predicting is written down; so far it was everything."""
        if self.learned is None:
            self.learned = open(self.learned_path, "wb")  # noqa: SIM115
            for first in range(0, self.tokens, 2**20):
                self.learned.write(b"\x01" * min(2**20, self.tokens - first))
            if self.tokens_file.closed:
                self.learned.close()

    def close_document(self) -> bool:
        """Ends the document; False if it had no token and so is none."""
        if self.tokens == self.closed_at:
            return False
        self.add(self.end_bytes)  # learned in a chat too: it is what ends the last turn
        self.closed_at = self.tokens
        self.documents += 1
        self._start()
        return True

    def close(self) -> None:
        self.tokens_file.close()
        self.starts_file.close()
        if self.learned is not None:
            self.learned.close()

    def _start(self) -> None:
        self.starts_file.write(np.array([self.tokens], "<i8").tobytes())


class FolderTokens:
    """The tokens of one side of a folder, memory-mapped (see `windows.Tokens`)."""

    def __init__(self, folder: Path, side: Side) -> None:
        meta = read_meta(folder)
        self.ids = tokens(folder, side, meta["dtype"])
        self.flags = mapped(folder / f"{side}.learned", "?") if meta["learned"] else None
        self.flagged = self.flags is not None
        self.starts = starts(folder, side)
        self.total = len(self.ids)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.ids[start:stop]

    def learned(self, start: int, stop: int) -> np.ndarray | None:
        return None if self.flags is None else self.flags[start:stop]


def tokens(folder: Path, side: Side, dtype: str) -> np.ndarray:
    """[tokens] memory-mapped."""
    return mapped(folder / f"{side}.bin", dtype)


def starts(folder: Path, side: Side) -> np.ndarray:
    """[documents + 1] int64, memory-mapped."""
    return mapped(folder / f"{side}.starts", "<i8")


def mapped(path: Path, dtype: str) -> np.ndarray:
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)  # mmap refuses length 0


def move(folder: Path, source: Side, document: int, count: int, dtype: str) -> None:
    """Moves the last `count` tokens of a document (all of them: the document) to the other side, which is empty."""
    target = SIDES[source == "train"]
    bounds = starts(folder, source)
    stop = int(bounds[document + 1])
    lengths = np.diff(bounds)
    lengths[document] -= count
    lengths = lengths[lengths > 0]
    for kind, kind_dtype in (("bin", dtype), ("learned", "?")):
        if (folder / f"{source}.{kind}").exists():
            old = mapped(folder / f"{source}.{kind}", kind_dtype)
            parts = {target: [old[stop - count : stop]], source: [old[: stop - count], old[stop:]]}
            for side in (target, source):
                with open(folder / f"{side}.new", "wb") as file:
                    for part in parts[side]:
                        file.write(part.data)
                os.replace(folder / f"{side}.new", folder / f"{side}.{kind}")
    sizes = {target: np.array([count]), source: lengths}
    for side in (target, source):
        with open(folder / f"{side}.starts", "wb") as file:
            file.write(np.concatenate([[0], np.cumsum(sizes[side])]).astype("<i8").data)


# ----------------------------------------------------------------------------------------------------- whole or not


def seal(folder: Path, meta: dict[str, Any], names: Sequence[str]) -> None:
    """Writes meta.json last, with the files of these names on disk: only a sealed folder is ever used."""
    meta["files"] = {name: {"bytes": (folder / name).stat().st_size, "mark": mark(folder / name)} for name in names}
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    for path in [*folder.iterdir(), folder]:
        sync(path)


def read_meta(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "meta.json").read_text(encoding="utf-8"))


def damage(folder: Path) -> str | None:
    """What is wrong with a sealed folder, or None. Sizes are compared in full, content by its mark."""
    try:
        for name, file in read_meta(folder)["files"].items():
            size = (folder / name).stat().st_size
            if size != file["bytes"]:
                return f"{folder / name} has {size} bytes instead of {file['bytes']}"
            if mark(folder / name) != file["mark"]:
                return f"{folder / name} has changed since it was written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        return f"{folder} is incomplete ({type(e).__name__}: {e})"
    return None


def digest(*paths: Path) -> str:
    total = xxhash.xxh3_128()
    for path in paths:
        with open(path, "rb") as file:
            while block := file.read(2**20):
                total.update(block)
    return total.hexdigest()


def mark(path: Path) -> str:
    """A hash of 64 blocks of 64 KB spread over the file: of all of it up to 4 MB, and never of more."""
    block, blocks = 2**16, 64
    size = path.stat().st_size
    total = xxhash.xxh3_64()
    with open(path, "rb") as file:
        for i in range(blocks):
            if size > block * blocks:
                file.seek((size - block) * i // (blocks - 1))
            total.update(file.read(block))
    return total.hexdigest()
