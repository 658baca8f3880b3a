"""The manifest: the last file written into a checkpoint, and what it is verified against.

    <root>/step-00000020/
        __0_0.distcp, __1_0.distcp, ...   one file per writing rank
        .metadata                         which file holds which box of which tensor
        manifest.json                     format version, step, meta; size and xxh3_128 of each file above

The manifest carries its own digest, so that a changed byte in it is noticed like one in any other file.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

VERSION = 1
NAME = "manifest.json"


class Damaged(Exception):
    """A checkpoint that must not be believed: which of its files, and why."""

    def __init__(self, path: Path, file: str, reason: str) -> None:
        super().__init__(path, file, reason)
        self.path, self.file, self.reason = path, file, reason

    def __str__(self) -> str:
        return f"{self.path / self.file}: {self.reason}"


class FileRecord(NamedTuple):
    size: int  # bytes
    digest: str  # xxh3_128, hex


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is: its step, the caller's `meta` (JSON) and its files."""

    step: int
    meta: dict[str, Any]
    files: dict[str, FileRecord]

    def dump(self) -> str:
        files = {name: record._asdict() for name, record in sorted(self.files.items())}
        content = {"version": VERSION, "step": self.step, "meta": self.meta, "files": files}
        digest = xxhash.xxh3_128_hexdigest(json.dumps(content).encode())
        return json.dumps({**content, "digest": digest}, indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """The manifest of the checkpoint at `path`. Raises Damaged."""
        try:
            text = (path / NAME).read_bytes().decode()
            raw = json.loads(text)
            if raw["version"] > VERSION:
                raise Damaged(path, NAME, f"written by a newer Lanewise (format {raw['version']}, here {VERSION})")
            files = {name: FileRecord(**record) for name, record in raw["files"].items()}
            manifest = cls(raw["step"], raw["meta"], files)
            changed = manifest.dump() != text
        except FileNotFoundError:
            raise Damaged(path, NAME, "missing") from None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise Damaged(path, NAME, f"cannot be read: {error!r}") from None
        if changed:
            raise Damaged(path, NAME, "does not match its own digest")
        return manifest

    def check(self, path: Path, names: Iterable[str] | None = None, *, content: bool = True) -> None:
        """Compare files (all of them, or `names`) with what was written. Raises Damaged.

        `content=False` looks at sizes only: cheap, and enough to notice a file that was cut short or removed.
        """
        for name in self.files if names is None else names:
            size, digest = self.files[name]
            try:
                found = (path / name).stat().st_size
                if found != size:
                    raise Damaged(path, name, f"{found} bytes instead of {size}")
                if content:
                    with open(path / name, "rb") as file:
                        if hashlib.file_digest(file, xxhash.xxh3_128).hexdigest() != digest:
                            raise Damaged(path, name, "its checksum differs: bytes have changed since it was written")
            except FileNotFoundError:
                raise Damaged(path, name, "missing") from None
            except OSError as error:
                raise Damaged(path, name, f"cannot be read: {error}") from None


def verify(path: Path) -> Damaged | None:
    """Read every byte of a checkpoint: None if it is as it was written, else the first damage."""
    try:
        Manifest.read(path).check(path)
    except Damaged as damage:
        return damage
    return None


def folder_of(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def checkpoints_in(root: Path) -> list[Path]:
    """Folders that claim to be checkpoints, newest step first. Leftovers of killed saves have other names."""
    try:
        names = [name for name in os.listdir(root) if re.fullmatch(r"step-\d{8,}", name)]
    except FileNotFoundError:
        return []
    return [root / name for name in sorted(names, key=lambda name: int(name.removeprefix("step-")), reverse=True)]


def hidden_name(path: Path) -> Path:
    """A name beside the checkpoint `path` for what is not yet, or no longer, that checkpoint."""
    return path.with_name(f".{path.name}.{os.urandom(4).hex()}")


def remove_hidden(root: Path) -> None:
    """Remove what killed saves and removals left behind."""
    for path in root.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a checkpoint. Killed at any point, it never leaves half of one under a checkpoint's name."""
    trash = hidden_name(path)
    path.rename(trash)
    shutil.rmtree(trash)
