"""Where documents come from: which files a source names, and the raw documents in each.

| source   | files                                                                                         |
|----------|-----------------------------------------------------------------------------------------------|
| 'python' | the library sources this interpreter ships: *.py, installed packages left out                 |
| a file   | that file, whatever its name                                                                  |
| a folder | all below it with a suffix in TEXT or FOLDER_TABLES, but for hidden ones and `__pycache__`    |
| a glob   | all it matches, whatever their suffix; `**` crosses folders                                   |

A text file is one document, and so is each row of a table: .jsonl, .ndjson, .json (one object a line), .parquet,
.arrow, .tar (WebDataset), .mds (MosaicML), .tfrecord. A further .gz, .bz2 or .zst is unpacked on the way. Of a Hugging
Face dataset folder only the files its state.json lists are read, and of one with splits, 'train'. Files come in the
order of their names relative to the source, so that equal content gives equal tokens on every machine.
"""

import glob
import json
import os
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lanewise.data import formats
from lanewise.data.formats import suffix_of
from lanewise.data.formats.base import Document, Part, reading
from lanewise.errors import UserError

TEXT = frozenset(
    """
    .txt .text .md .markdown .rst .tex .org .adoc .html .htm .css .xml .yaml .yml .toml .ini .cfg .sql
    .py .pyi .pyx .c .h .cc .cpp .cxx .hpp .cu .cuh .java .kt .scala .cs .js .jsx .mjs .ts .tsx .go .rs .rb .php
    .pl .lua .r .jl .swift .m .hs .ml .clj .ex .erl .el .lisp .f90 .sh .bash .bat .ps1
    """.split()  # noqa: SIM905 - reads as prose
)
FOLDER_TABLES = frozenset(formats.READERS) - {".json"}  # .json in a folder is mostly settings: name it by a glob


@dataclass(frozen=True, slots=True)
class File:
    path: Path
    name: str  # relative to the source, with forward slashes
    size: int  # bytes
    times: tuple[int, int]  # last change of content and of the entry itself, ns


# ----------------------------------------------------------------------------------------------------------- files


def find(source: str) -> list[File]:
    """The files a source names, in order. Raises UserError if there are none."""
    if source == "python":
        files = _below(Path(sysconfig.get_path("stdlib")), frozenset({".py"}), {"site-packages", "dist-packages"})
        nothing = "data.source: this interpreter ships no library sources; name a file, folder or glob"
    elif (path := Path(os.path.expanduser(source))) and source and os.path.isdir(path):
        files = _below(_split(path), TEXT | FOLDER_TABLES)
        nothing = f"data.source: no text files below {source}; take other suffixes by a glob such as '{path}/**/*'"
    elif source and os.path.lexists(path):
        files = [file] if (file := entry(path, path.name)) else []
        nothing = f"data.source: {source} is not a regular file; name a file, folder or glob"
    elif "://" in source:
        raise UserError(
            f"data.source: there is no shard set at {source}, and only those are read from a store: "
            f"fetch the files, and `lanewise data build FOLDER --out {source}` (kafka:// and grow: are for training)"
        )
    elif glob.has_magic(source):
        fixed = Path(*path.parts[: next(i for i, part in enumerate(path.parts) if glob.has_magic(part))])
        found = [Path(p) for p in set(glob.glob(str(path), recursive=True))]
        files = [file for p in found if (file := entry(p, p.relative_to(fixed).as_posix()))]
        nothing = f"data.source: no file matches {source}; check the pattern (relative to {Path.cwd()})"
    else:
        raise UserError(f"data.source: there is no {source!r} (seen from {Path.cwd()}); name a file, folder or glob")
    if not files:
        raise UserError(nothing)
    return sorted(files, key=lambda file: file.name)


def _below(root: Path, suffixes: frozenset[str], without: set[str] | None = None) -> list[File]:
    def unreadable(e: OSError) -> None:
        raise e  # os.walk would leave the folder out in silence

    files, without = [], {"__pycache__", *(without or ())}
    with reading(root):
        for folder, folders, names in os.walk(root, onerror=unreadable):
            folders[:] = [d for d in folders if d not in without and not d.startswith(".")]
            for name in _listed(Path(folder), names):
                if not name.startswith(".") and suffix_of(name) in suffixes:
                    path = Path(folder, name)
                    files += [file] if (file := entry(path, path.relative_to(root).as_posix())) else []
    return files


def _split(root: Path) -> Path:
    """The folder of the training split, where a Hugging Face dataset has splits."""
    if not (root / "dataset_dict.json").is_file():
        return root
    if not (root / "train").is_dir():
        raise UserError(f"data.source: {root} has no split named train; name the folder of one of its splits")
    return root / "train"


def _listed(folder: Path, names: list[str]) -> list[str]:
    """The files that belong: a Hugging Face dataset folder also keeps caches of work done on it."""
    if "state.json" not in names:
        return names
    with reading(folder):
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    listed = {file["filename"] for file in state.get("_data_files", ())} if isinstance(state, dict) else set()
    return [name for name in names if name in listed] if listed else names


def entry(path: Path, name: str) -> File | None:
    """None for what is not a regular file: a folder, a pipe (reading it might never end), a link that leads nowhere."""
    with reading(path):
        try:
            info = path.stat()
        except FileNotFoundError:
            return None
    return File(path, name, info.st_size, (info.st_mtime_ns, info.st_ctime_ns)) if stat.S_ISREG(info.st_mode) else None


def documents(file: File, column: str, part: Part | None = None) -> Iterator[Document]:
    """The documents in a file, or in a part of it. One without content yields one empty document, to be counted."""
    with reading(file.path):
        yield from formats.documents(file.path, file.name, column, part)
