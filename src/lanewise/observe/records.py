"""What a run writes for machines: JSON lines, one object each, appended and flushed as things happen."""

import json
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class JsonLines:
    """An append-only file of JSON objects. Floats keep full precision; non-finite ones are null (JSON has none).

    A disk that is full stops nothing: lines wait in memory, in order, until there is room again.
    complain(reason): called when lines begin to wait.
    """

    def __init__(self, path: Path, complain: Callable[[str], None]) -> None:
        self.complain = complain
        self.waiting = b""
        self.lock = threading.Lock()  # checkpoints are written, and may fail, in a thread of their own
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("ab", buffering=0)

    def write(self, record: dict[str, Any]) -> None:
        """Append one object."""
        reason = None
        with self.lock:
            had_room = not self.waiting
            self.waiting += json.dumps(plain(record)).encode() + b"\n"
            try:
                while self.waiting:
                    self.waiting = self.waiting[self.file.write(self.waiting) :]
            except OSError as error:
                reason = error.strerror if had_room else None
        if reason is not None:
            self.complain(f"{self.file.name}: {reason}")


def plain(record: dict[str, Any]) -> dict[str, Any]:
    """The record with non-finite floats as None."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


def cut_after(path: Path, step: float) -> None:
    """Drop the lines of steps after `step`: a resumed run writes them again. A half-written last line goes too.

    Lines stand in the order of their steps, so what goes is the end of the file.
    """
    if not path.exists():
        return
    kept = 0
    with path.open("rb") as file:
        for line in file:
            try:
                if json.loads(line)["step"] > step or not line.endswith(b"\n"):
                    break
            except (ValueError, KeyError, TypeError):  # what a crash of the machine left
                break
            kept += len(line)
    os.truncate(path, kept)


class Events:
    """events.jsonl: members, checkpoints, alarms. Alarms are also shown to the person watching.

    path: None on ranks that do not write.
    """

    def __init__(self, path: Path | None, show: Callable[[str], None]) -> None:
        self.show = show
        self.step = 0
        if path is not None:
            cut_after(path, math.inf)
        self.lines = JsonLines(path, self.cannot_write) if path is not None else None

    def write(self, event: str, **details: Any) -> None:
        if self.lines is not None:
            self.lines.write({"event": event, "time": time.time(), "step": self.step, **details})

    def alarm(self, event: str, details: dict[str, Any]) -> None:
        self.write(event, alarm=True, **details)
        self._show(event, details)

    def cannot_write(self, reason: str) -> None:
        """A file of records has no room: lines are kept in memory. Only shown, for this one may be the file."""
        self._show("records_waiting", {"reason": reason, "remedy": "free some space; nothing is lost so far"})

    def _show(self, event: str, details: dict[str, Any]) -> None:
        self.show(f"ALARM {event}: " + ", ".join(f"{k}={v}" for k, v in details.items()))
