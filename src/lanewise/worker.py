"""The entry of one worker process, spawned by us or started by torchrun, Slurm or MPI."""

import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing import connection
from typing import Any, NoReturn, Protocol

import torch.distributed as dist

from lanewise.config import Run
from lanewise.elastic.environment import Place
from lanewise.elastic.launcher import Report
from lanewise.elastic.status import Board, Status
from lanewise.elastic.world import World, connect, local_store, store_of
from lanewise.errors import EXIT_FAILED, EXIT_USER, UserError
from lanewise.stop import StopRequest

MOST_MESSAGE = 1000  # characters
MOST_TRACEBACK = 10_000  # characters; a pipe holds 64 KB
# What gloo and NCCL say when a peer has gone or answers no more.
PEER_GONE = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connectfullmesh",
    "timed out waiting",
    "remote process exit",
)


class Task(Protocol):
    """What a worker can be given: to train (`Job`), or something else that takes several processes."""

    @property
    def run(self) -> Run: ...

    def work(self, world: World, status: Status, stop: StopRequest) -> int:
        """Do it, as one rank of `world`; returns the exit code. Called once, by every rank."""


def work(
    rank: int, size: int, job: Task, board: Board, pipe: Any, port: int, listener: socket.socket | None
) -> NoReturn:
    """A spawned worker: do the job, and tell the launcher how it went."""
    faulthandler.enable()
    _leave_with_launcher()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what Ctrl-C means
    stop = StopRequest(signal.SIGTERM, board=board)
    status = Status(board, rank)
    try:
        store = local_store(rank, size, port, listener) if size > 1 else None
        world = connect(rank, size, rank, store, job.run.train.threads, job.run.train.deterministic)
        code = job.work(world, status, stop)
        status.finished()
    except BaseException as error:
        report = _report(rank, status, error)
        pipe.send(report)
        code = report.code
    _leave(code)


def join(place: Place, prepare: Callable[[World], Task], threads: int, deterministic: bool) -> NoReturn:
    """A worker under torchrun, Slurm or MPI. `prepare(world)` returns the job once the data is there."""
    faulthandler.enable()
    stop = StopRequest(signal.SIGTERM, signal.SIGINT)
    status = Status()
    store = None
    try:
        store = store_of(place) if place.world > 1 else None
        world = connect(place.rank, place.world, place.local_rank, store, threads, deterministic)
        code = prepare(world).work(world, status, stop)
    except BaseException as error:
        report = _report(place.rank, status, error)
        code = report.code
        if code != EXIT_USER:
            where = f"rank {report.rank} failed at step {report.step} in {report.phase}"
            trace = "" if report.echo else report.traceback
            print(f"{trace}lanewise: {where}: {report.message}", file=sys.stderr)
        elif _first_to_say(report.message, store):
            print(f"lanewise: {report.message}", file=sys.stderr)
    _leave(code)


def _first_to_say(message: str, store: dist.Store | None) -> bool:
    """The user's mistake is mostly seen by every rank: one of them says so."""
    try:
        return store is None or store.add(f"lanewise/said/{message}", 1) == 1
    except RuntimeError:
        return False  # the rank that serves the store has left, after saying this or something worse


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # peers may be gone: no clean-up may wait for them


def _leave_with_launcher() -> None:
    """If the launcher is killed, even by SIGKILL, leave at once: an orphan would keep the machine."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(EXIT_FAILED)

    threading.Thread(target=watch, daemon=True, name="watch-launcher").start()


def _report(rank: int, status: Status, error: BaseException) -> Report:
    is_users = isinstance(error, UserError)
    lines = str(error).strip().splitlines()
    message = lines[0] if lines else ""
    return Report(
        rank=rank,
        step=status.step,
        phase=status.phase,
        message=message if is_users else f"{type(error).__name__}: {message[:MOST_MESSAGE]}",
        # The launcher reads when the worker has ended, so all of it must fit into the pipe.
        traceback="".join(traceback.format_exception(error))[-MOST_TRACEBACK:],
        code=EXIT_USER if is_users else EXIT_FAILED,
        echo=_is_echo(error),
    )


def _is_echo(error: BaseException) -> bool:
    """True for the error a collective raises when a peer has gone away."""
    if isinstance(error, dist.DistNetworkError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in PEER_GONE)
