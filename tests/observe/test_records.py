"""What a run writes for machines."""

import io
import json
import math
from pathlib import Path

import pytest

from lanewise.observe.records import Events, JsonLines, cut_after


class SmallDisk(io.RawIOBase):
    """A file on a disk with so much room: what does not fit is written in part, then refused, as ENOSPC does it."""

    name = "metrics.jsonl"

    def __init__(self, room: int) -> None:
        self.room, self.content = room, b""

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        taken = bytes(data[: self.room])
        self.content += taken
        self.room -= len(taken)
        return len(taken)


@pytest.mark.parametrize("room", [0, 5, 12, 24, 30])
def test_a_full_disk_loses_no_line(tmp_path: Path, room: int) -> None:
    complaints: list[str] = []
    lines = JsonLines(tmp_path / "metrics.jsonl", complaints.append)
    lines.file.close()
    lines.file = disk = SmallDisk(room)
    for step in range(1, 4):
        lines.write({"step": step})
    assert len(complaints) == 1, "told once, not at every line"
    assert "No space left" in complaints[0]
    disk.room = 10**6
    lines.write({"step": 4})
    assert [json.loads(line)["step"] for line in disk.content.splitlines()] == [1, 2, 3, 4]
    disk.room = 0
    lines.write({"step": 5})
    assert len(complaints) == 2


def test_floats_keep_every_digit_and_what_is_not_finite_is_null(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "a" / "metrics.jsonl", pytest.fail)
    numbers = [0.1 + 0.2, 1e-300, math.pi, float("nan"), float("inf"), -float("inf")]
    for number in numbers:
        lines.write({"loss": number})
    found = [json.loads(line)["loss"] for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert found == [*numbers[:3], None, None, None]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ('{"step": 1}\n{"step": 2}\n{"step": 3}\n', [1, 2]),
        ('{"step": 1}\n{"step": 2}', [1]),  # the newline is missing: more may be
        ('{"step": 1}\n{"ste', [1]),
        ('{"step": 1}\n\0\0\0\0\0\n{"step": 2}\n', [1]),
        ('{"step": 3}\n', []),
        ("", []),
    ],
)
def test_cut_after(tmp_path: Path, text: str, kept: list[int]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    cut_after(path, 2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == kept
    cut_after(tmp_path / "none.jsonl", 2)


def test_events_go_on_after_a_line_that_a_crash_cut(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "evaluated", "step": 9}\n{"event": "che')
    shown: list[str] = []
    events = Events(path, shown.append)
    events.step = 4
    events.alarm("checkpoint_failed", {"reason": "the disk", "path": "there"})
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(e["event"], e["step"]) for e in found] == [("evaluated", 9), ("checkpoint_failed", 4)]
    assert shown == ["ALARM checkpoint_failed: reason=the disk, path=there"]
    silent = Events(None, shown.append)
    silent.write("checkpoint", path="x")
    assert len(shown) == 1
