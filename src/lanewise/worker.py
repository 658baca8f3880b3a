"""The entry of one worker process, spawned by us or started by torchrun, Slurm or MPI."""

import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import threading
import traceback
from multiprocessing import connection
from typing import Any

import torch.distributed as dist

from lanewise.elastic.environment import Place
from lanewise.elastic.launcher import Report
from lanewise.elastic.status import Board, Status
from lanewise.elastic.world import connect, local_store, store_of
from lanewise.errors import EXIT_FAILED, EXIT_USER, UserError
from lanewise.job import Job
from lanewise.trainer import StopRequest, Trainer


def work(rank: int, size: int, job: Job, board: Board, pipe: Any, port: int, listener: socket.socket | None) -> None:
    """A spawned worker: train, and tell the launcher how it went. Never returns."""
    faulthandler.enable()
    _leave_with_launcher()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what Ctrl-C means
    stop = StopRequest(signal.SIGTERM)
    status = Status(board, rank)
    try:
        store = local_store(rank, size, port, listener) if size > 1 else None
        world = connect(rank, size, rank, store, job.run.train.threads, job.run.train.deterministic)
        code = Trainer(job, world, status, stop).train()
        status.finished()
    except BaseException as error:
        report = _report(rank, status, error)
        pipe.send(report)
        code = report.code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # peers may be gone: no clean-up may wait for them


def join(place: Place, prepare: Any, deterministic: bool, threads: int) -> int:
    """A worker under torchrun, Slurm or MPI. `prepare(world)` returns the job once the data is there."""
    faulthandler.enable()
    stop = StopRequest(signal.SIGTERM, signal.SIGINT)
    status = Status()
    try:
        store = store_of(place) if place.world > 1 else None
        world = connect(place.rank, place.world, place.local_rank, store, threads, deterministic)
        code = Trainer(prepare(world), world, status, stop).train()
    except BaseException as error:
        report = _report(place.rank, status, error)
        code = report.code
        if report.code == EXIT_USER:
            print(f"lanewise: {report.message}", file=sys.stderr, flush=True)
        else:
            where = f"rank {place.rank} failed at step {report.step} in {report.phase}"
            print(f"{report.traceback}lanewise: {where}: {report.message}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)


def _leave_with_launcher() -> None:
    """If the launcher is killed, even by SIGKILL, leave at once: an orphan would keep the machine."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(EXIT_FAILED)

    threading.Thread(target=watch, daemon=True, name="watch-launcher").start()


def _report(rank: int, status: Status, error: BaseException) -> Report:
    message = f"{type(error).__name__}: {error}" if not isinstance(error, UserError) else str(error)
    first_line = message.strip().splitlines()[0] if message.strip() else type(error).__name__
    return Report(
        rank=rank,
        step=status.step,
        phase=status.phase,
        message=first_line,
        traceback="".join(traceback.format_exception(error)),
        code=EXIT_USER if isinstance(error, UserError) else EXIT_FAILED,
        echo=_is_echo(error),
    )


def _is_echo(error: BaseException) -> bool:
    """True for the error a collective raises when a peer has gone away."""
    if isinstance(error, dist.DistBackendError | dist.DistNetworkError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        sign in text for sign in ("gloo", "connection closed by peer", "connection reset", "nccl", "broken pipe")
    )
