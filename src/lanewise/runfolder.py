"""The folder a run writes to: made once, refused to any other run."""

import fcntl
import os
from pathlib import Path
from typing import BinaryIO

from lanewise.config import Run, differences, dump, load
from lanewise.errors import UserError

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def open_run(run: Run, out: Path, resume: str, data: Path) -> BinaryIO:
    """Make `out` with its run.toml and the tokenizer of the prepared `data`, or check that the run in it is this one.

    resume: 'auto' goes on with the run in `out` if it is the same; 'never' wants an empty folder; else the path of a
    checkpoint or run to start a new folder from.
    Returns a lock on the folder, held until it is closed or this process ends: no two runs write into one folder.
    Raises UserError if `out` holds another run (naming the first keys that differ) or cannot be written. What was
    refused before its first step, and so has neither metrics nor checkpoints, is no run yet.
    """
    file = out / "run.toml"
    try:
        if not file.exists():
            if (out / "checkpoints").exists():
                raise UserError(f"{out} holds checkpoints but no run.toml: choose another --out, or restore the file")
            out.mkdir(parents=True, exist_ok=True)
        lock = _lock(out)
        if file.exists() and ((out / "metrics.jsonl").exists() or (out / "checkpoints").exists()):
            _same(file, run, out, resume)
        for name in TOKENIZER:
            _write(out / name, (data / name).read_bytes())
        _write(file, dump(run).encode())
    except OSError as error:
        raise UserError(f"{out}: cannot write the run's folder: {error.strerror}: choose another --out") from None
    return lock


def rewrite(run: Run, out: Path) -> None:
    """The run goes on with other settings that do not define its bits. Raises OSError; then the old file is whole."""
    _write(out / "run.toml", dump(run).encode())


def _lock(out: Path) -> BinaryIO:
    """The lock dies with its process, so the file may stay."""
    file = (out / ".lock").open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{out}: another process is training there: wait for it, or choose another --out") from None
    except OSError:
        pass  # a file system without locks
    return file


def _write(path: Path, content: bytes) -> None:
    """Replace the file as a whole; if it is the same already, leave it: a disk that is full has no room for a copy."""
    if path.is_file() and path.read_bytes() == content:
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _same(file: Path, run: Run, out: Path, resume: str) -> None:
    if resume == "never":
        raise UserError(f"{out} already holds a run: choose another --out, or --resume auto to go on with it")
    changes = list(differences(load(file), run))
    if changes:
        shown = ", ".join(f"{key} was {old!r}, now {new!r}" for key, old, new in changes[:3])
        more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
        raise UserError(f"{out} holds a different run ({shown}{more}): choose another --out, or put these back")


def tokenizer_of(checkpoint: Path) -> Path:
    """The tokenizer.json of the run that a checkpoint belongs to. Raises UserError if it is not there."""
    for folder in (checkpoint, *checkpoint.absolute().parents[:2]):
        if (folder / TOKENIZER[0]).is_file():
            return folder / TOKENIZER[0]
    raise UserError(f"{checkpoint}: its run's tokenizer.json is missing: copy it from the run's folder beside it")
