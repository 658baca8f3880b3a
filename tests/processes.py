"""Run a function on several ranks, each a process forked from a warm server that has imported torch already.

A fresh group each time, a hard limit, and the traces of all ranks on failure.
"""

import faulthandler
import multiprocessing
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lanewise.elastic.launcher import listening_socket
from lanewise.elastic.world import local_store

LIMIT = 60.0  # seconds


def on_ranks(size: int, function: Callable[..., Any], *arguments: Any, limit: float = LIMIT) -> list[Any]:
    """[function(rank, size, *arguments) on each rank]. `function` must be importable (top level of a test module)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "lanewise.worker"])
    listener, port = listening_socket()
    with tempfile.TemporaryDirectory() as folder:
        traces = [Path(folder) / f"rank-{rank}" for rank in range(size)]
        processes, pipes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            given = listener if rank == 0 else None
            process = context.Process(
                target=_enter, args=(rank, size, port, given, theirs, str(traces[rank]), limit, function, arguments)
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        listener.close()
        results: dict[int, Any] = {}
        failures: list[str] = []
        waiting = dict(zip(pipes, range(size), strict=True))
        while waiting and not failures:
            ready = connection.wait(list(waiting), timeout=limit + 10)
            if not ready:
                failures.append(f"no answer from ranks {sorted(waiting.values())} within {limit} s")
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    ok, value = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    processes[rank].join()
                    ok, value = False, f"died with exit code {processes[rank].exitcode}"
                if ok:
                    results[rank] = value
                else:
                    failures.append(f"rank {rank}: {value}")
        for process in processes:
            if failures:
                process.kill()
            process.join()
        dumps = [path.read_text() for path in traces if path.exists() and path.stat().st_size]
    if failures:
        raise AssertionError("\n".join(failures + dumps))
    return [results[rank] for rank in range(size)]


def _enter(
    rank: int,
    size: int,
    port: int,
    listener: Any,
    pipe: Any,
    trace: str,
    limit: float,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    with open(trace, "w") as file:
        faulthandler.dump_traceback_later(limit, exit=True, file=file)
        try:
            if size > 1:
                dist.init_process_group(
                    "gloo", store=local_store(rank, size, port, listener), rank=rank, world_size=size
                )
            _answer(pipe, True, function(rank, size, *arguments))
        except BaseException:
            _answer(pipe, False, traceback.format_exc())
            sys.exit(1)
        finally:
            faulthandler.cancel_dump_traceback_later()
        if size > 1:
            dist.barrier()
            dist.destroy_process_group()


def _answer(pipe: Any, ok: bool, value: Any) -> None:
    pipe.send_bytes(pickle.dumps((ok, value)))  # by value: a pipe would share tensors by file descriptor
