"""What a person sees: a live line on a terminal, plain lines elsewhere, JSON when asked. One rank prints."""

import json
import sys
import time
from typing import Any, Protocol, TextIO

import psutil


class Display(Protocol):
    def start(self, step: int, steps: int) -> None: ...
    def step(self, record: dict[str, Any]) -> None: ...
    def note(self, text: str) -> None: ...
    def stop(self) -> None: ...


def make_display(kind: str, every: int) -> Display:
    """kind: 'auto' (live on a terminal, else plain), 'json' or 'none'."""
    stream = sys.stdout
    if kind == "none":
        return Silent()
    if kind == "json":
        return Lines(every=1, stream=stream, as_json=True)
    return Live(stream) if stream.isatty() else Lines(every, stream)


class Silent:
    """Ranks that do not print."""

    def start(self, step: int, steps: int) -> None: ...
    def step(self, record: dict[str, Any]) -> None: ...
    def note(self, text: str) -> None: ...
    def stop(self) -> None: ...


class Lines:
    """A line per step for logs and pipes: no carriage returns, no colours; or the metrics record as JSON."""

    def __init__(self, every: int, stream: TextIO, as_json: bool = False) -> None:
        self.every, self.stream, self.as_json = every, stream, as_json
        self.steps = 0

    def start(self, step: int, steps: int) -> None:
        self.steps = steps

    def step(self, record: dict[str, Any]) -> None:
        if self.as_json:
            _print(json.dumps(record), self.stream)
        elif record["step"] % self.every == 0 or record["step"] == self.steps or record["skipped"]:
            _print(f"step {record['step']}/{self.steps}  {_figures(record)}", self.stream)

    def note(self, text: str) -> None:
        # In JSON mode stdout holds records only; notes are for the person and go to stderr.
        _print(text, sys.stderr if self.as_json else self.stream)

    def stop(self) -> None: ...


class Live:
    """A progress bar on a terminal (rich): step, loss, tokens/s, memory, time left."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self.progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("left {task.fields[left]}"),
            console=Console(file=stream),
            refresh_per_second=4,
        )
        self.task = self.progress.add_task("train", total=1, figures="", left="-")
        self.first: tuple[int, float] | None = None
        self.steps = 0

    def start(self, step: int, steps: int) -> None:
        self.steps = steps
        self.progress.update(self.task, total=steps, completed=step)
        self.progress.start()

    def step(self, record: dict[str, Any]) -> None:
        now = time.monotonic()
        done = record["step"]
        if self.first is None:  # the first step warms caches: time left is judged from the second on
            self.first = (done, now)
            left = "-"
        else:
            left = _clock((now - self.first[1]) / max(1, done - self.first[0]) * (self.steps - done))
        self.progress.update(self.task, completed=done, figures=_figures(record), left=left)

    def note(self, text: str) -> None:
        self.progress.console.print(text, markup=False, highlight=False)

    def stop(self) -> None:
        self.progress.stop()


def _print(line: str, stream: TextIO) -> None:
    stream.write(line + "\n")  # one call: an alarm may come from another thread
    stream.flush()


def _figures(record: dict[str, Any]) -> str:
    loss, norm = record["loss"], record["grad_norm"]
    parts = [
        f"loss {loss:.4f}" if loss is not None else "loss non-finite",
        f"norm {norm:.3f}" if norm is not None else "norm non-finite",
        f"lr {record['lr']:.2e}",
        f"{record['tokens_per_s']:,.0f} tokens/s",
        f"{memory_gb():.2f} GB",
    ]
    if record["skipped"]:
        parts.append("SKIPPED")
    return "  ".join(parts)


def memory_gb() -> float:
    """Resident memory of this process, GB (10^9 bytes)."""
    return psutil.Process().memory_info().rss / 1e9


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
