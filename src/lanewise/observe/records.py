"""What a run writes for machines: JSON lines, one object each, appended and flushed as things happen."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any


class JsonLines:
    """An append-only file of JSON objects. Floats keep full precision; non-finite ones are null (JSON has none)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0  # lines that could not be written
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("ab", buffering=0)

    def write(self, record: dict[str, Any]) -> None:
        """Append one object. On a full disk the line is lost (and counted), training goes on."""
        line = json.dumps(plain(record)).encode() + b"\n"
        try:
            written = self.file.write(line)
            if written < len(line):  # the disk filled up in mid-line
                self.file.truncate(self.file.tell() - written)
                self.lost += 1
        except OSError:
            self.lost += 1

    def close(self) -> None:
        self.file.close()


def plain(record: dict[str, Any]) -> dict[str, Any]:
    """The record with non-finite floats as None."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


def cut_after(path: Path, step: int) -> None:
    """Drop the lines of steps after `step`: a resumed run writes them again. A half-written last line goes too."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    os.replace(temporary, path)


class Events:
    """events.jsonl: members, checkpoints, alarms. Alarms are also shown to the person watching."""

    def __init__(self, lines: JsonLines | None, show: Any) -> None:
        self.lines, self.show = lines, show
        self.step = 0

    def write(self, event: str, **details: Any) -> None:
        if self.lines is not None:
            self.lines.write({"event": event, "time": time.time(), "step": self.step, **details})

    def alarm(self, event: str, details: dict[str, Any]) -> None:
        self.write(event, alarm=True, **details)
        self.show(f"ALARM {event}: " + ", ".join(f"{k}={v}" for k, v in details.items()))
