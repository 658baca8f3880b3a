"""Where each worker is: a few numbers in shared memory, written by the worker, read by its launcher.

A worker that is killed cannot say what it was doing; this says it for it. The other way round, the launcher asks for
a stop here: unlike a signal it cannot come too early for a worker to hear.
"""

import time
from multiprocessing.sharedctypes import RawArray
from typing import Any

PHASES = ("start", "data", "forward", "backward", "exchange", "commit", "evaluate", "checkpoint", "switch", "end")
_FIELDS = 4  # step, phase, time, finished


class Board:
    """One row of numbers per rank, and the launcher's wish to stop. Picklable to spawned processes."""

    def __init__(self, context: Any, ranks: int) -> None:
        self.cells: Any = context.RawArray("d", ranks * _FIELDS + 1)

    def ask_to_stop(self) -> None:
        self.cells[-1] = 1.0

    @property
    def stop_asked(self) -> bool:
        return bool(self.cells[-1])

    def read(self, rank: int) -> tuple[int, str, float, bool]:
        """(step, phase, Unix time it was entered, finished) of a rank."""
        step, phase, when, finished = self.cells[rank * _FIELDS : (rank + 1) * _FIELDS]
        return int(step), PHASES[int(phase)], when, bool(finished)


class Status:
    """A worker's own row, if it has a launcher that looks, and the seconds it spent in each phase."""

    def __init__(self, board: Board | None = None, rank: int = 0) -> None:
        self.cells: Any = board.cells if board is not None else RawArray("d", _FIELDS)
        self.base = rank * _FIELDS if board is not None else 0
        self.step = 0
        self.phase = "start"
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._since = time.perf_counter()
        self.enter("start")

    def enter(self, phase: str) -> None:
        """The phase changes; the time since the last change counts for the old one."""
        now = time.perf_counter()
        self._seconds[self.phase] += now - self._since
        self._since, self.phase = now, phase
        self.cells[self.base + 1] = PHASES.index(phase)
        self.cells[self.base + 2] = time.time()

    def begin_step(self, step: int) -> None:
        self.step = step
        self.cells[self.base] = step

    def lap(self) -> dict[str, float]:
        """Seconds spent in each phase since the last lap; together they are all the time there was."""
        self.enter(self.phase)
        seconds, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        return {phase: spent for phase, spent in seconds.items() if spent > 0}

    def finished(self) -> None:
        self.enter("end")
        self.cells[self.base + 3] = 1.0
