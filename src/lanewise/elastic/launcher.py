"""Spawn local workers and watch them: if one dies the others stop, and the error says who, where and why.

Workers are forked from one server process that has imported torch already, so eight of them start as quickly as one.
This module does not import torch: the launcher prepares the data while the server imports it.
"""

import contextlib
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from typing import Any

from lanewise.elastic.status import Board
from lanewise.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, EXIT_USER

SERVER = "lanewise.elastic.server"
WORKER = "lanewise.worker"
GRACE = 2.0  # seconds in which the other workers may report what they saw of a failure before they are killed
ONE_REQUEST = 0.1  # seconds: `timeout` signals a process and then its group, which is one wish, not two
CODES = (EXIT_FAILED, EXIT_RESUMABLE, EXIT_DONE)  # of a worker that came to an end by itself, the gravest first
SHOW_CURSOR = "\x1b[?25h"


@dataclass(frozen=True)
class Report:
    """A worker's account of its own failure. `echo`: it only saw a peer go away."""

    rank: int
    step: int
    phase: str
    message: str
    traceback: str
    code: int = EXIT_FAILED
    echo: bool = False


def warm_up() -> Any:
    """Start the server process that workers are forked from; it imports torch while the caller goes on."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([SERVER, WORKER])
    forkserver.ensure_running()
    return context


def launch(job: Any, workers: int) -> int:
    """Run `job` on `workers` local processes; returns the exit code of the run.

    Ctrl-C or SIGTERM once: the workers finish the step, write a checkpoint, and the run exits 75. Twice: at once.
    """
    context = warm_up()
    board = Board(context, workers)
    listener, port = listening_socket()
    processes: list[Any] = []
    pipes = []
    with _Signals(board, {}) as signals:
        try:
            for rank in range(workers):
                ours, theirs = context.Pipe(duplex=False)
                arguments = (WORKER, rank, workers, job, board, theirs, port, listener if rank == 0 else None)
                process = context.Process(target=_enter, args=arguments, name=f"lanewise-{rank}")
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
                signals.running[process.sentinel] = process.pid
            listener.close()
            return _watch(processes, pipes, board, signals)
        finally:
            for process in processes:
                process.kill()
                process.join()
            if sys.stdout.isatty():  # a worker that was killed could not end its live display
                sys.stdout.write(SHOW_CURSOR)
                sys.stdout.flush()


def listening_socket() -> tuple[socket.socket, int]:
    """A socket listening on a port of 127.0.0.1 that the kernel chose. Rank 0 gets the socket itself, not the number
    of a port that someone else may take in between."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return listener, listener.getsockname()[1]


def _enter(module: str, *arguments: Any) -> None:
    importlib.import_module(module).work(*arguments)


class _Signals:
    """The first SIGINT or SIGTERM is passed on to the workers as a wish; the second kills them."""

    def __init__(self, board: Board, running: dict[Any, int]) -> None:
        self.board = board
        self.running = running  # sentinel -> pid; a handler must not poll a process, which the main thread may be at
        self.count = 0
        self.last = 0.0

    def __enter__(self) -> "_Signals":
        self.old = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.old.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: object) -> None:
        now = time.monotonic()
        if self.count and now - self.last < ONE_REQUEST:
            return
        self.last = now
        self.count += 1
        if self.count == 1:
            os.write(2, b"\nstopping after this step (once more: at once)\n")
            self.board.ask_to_stop()
            return
        for pid in list(self.running.values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _watch(processes: list[Any], pipes: list[Any], board: Board, signals: _Signals) -> int:
    """Wait for all workers. On the first failure give the others a moment to report, then stop them."""
    ranks = {process.sentinel: rank for rank, process in enumerate(processes)}
    reports: dict[int, Report] = {}
    deaths: list[tuple[int, int]] = []  # (rank, exit code) in order of death
    codes: set[int] = set()
    deadline: float | None = None
    while signals.running and (deadline is None or time.monotonic() < deadline):
        wait = None if deadline is None else max(0.0, deadline - time.monotonic())
        for sentinel in connection.wait(list(signals.running), timeout=wait):
            rank = ranks[sentinel]
            signals.running.pop(sentinel)
            processes[rank].join()
            code = processes[rank].exitcode
            with contextlib.suppress(EOFError, OSError):  # nothing was reported, or not to the end
                reports[rank] = pipes[rank].recv()
            if board.read(rank)[3] and code in CODES:
                codes.add(code)
            else:
                deaths.append((rank, code))
        if deaths and deadline is None:
            deadline = time.monotonic() + GRACE
        if any(not report.echo for report in reports.values()):
            break
    if signals.count > 1:
        print("lanewise: stopped at once; the same command resumes from the last checkpoint", file=sys.stderr)
        return EXIT_FAILED
    if deaths:
        return _explain(deaths, reports, board)
    return next(code for code in CODES if code in codes)


def _explain(deaths: list[tuple[int, int]], reports: dict[int, Report], board: Board) -> int:
    """Print who failed first and why; workers that only saw a peer vanish are not the cause. Returns the exit code."""
    rank, code = next((d for d in deaths if d[0] not in reports or not reports[d[0]].echo), deaths[0])
    if (report := reports.get(rank)) is None:
        step, phase, _, _ = board.read(rank)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left early with exit code {code}"
        cause = f"rank {rank} {how} at step {step} in {phase}"
    elif report.code == EXIT_USER:
        print(f"lanewise: {report.message}", file=sys.stderr)
        return EXIT_USER
    else:
        how = "lost its peers" if report.echo else "failed"
        cause = f"rank {rank} {how} at step {report.step} in {report.phase}: {report.message}"
        print(report.traceback, file=sys.stderr, end="")
    print(f"lanewise: {cause}", file=sys.stderr)
    print("lanewise: all workers stopped; the same command resumes from the last checkpoint", file=sys.stderr)
    return EXIT_FAILED
