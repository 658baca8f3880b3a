"""Real processes for the tests of this folder: started from a server that has torch loaded, joined by a file store."""

import faulthandler
import multiprocessing
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["lanewise.checkpoint.store", "pytest", "hypothesis", "hypothesis.strategies"])
TIMEOUT = 30  # seconds for one call of `run`; none should need more than a few


def run(folder: Path, world: int, work: Callable[..., Any], *args: Any, dies: set[int] = frozenset()) -> list[Any]:
    """`work(rank, group, *args)` on `world` ranks: their results. Ranks in `dies` must end without giving one."""
    rendezvous = folder / f"rendezvous-{time.monotonic_ns()}"
    pipes = [PROCESSES.Pipe(duplex=False) for _ in range(world)]
    ranks = [
        PROCESSES.Process(target=_rank, args=(pipes[r][1], r, world, rendezvous, (work, args))) for r in range(world)
    ]
    for process, (_, write_end) in zip(ranks, pipes, strict=True):
        process.start()
        write_end.close()
    results, deadline = [], time.monotonic() + TIMEOUT
    try:
        for rank, (read_end, _) in enumerate(pipes):
            assert read_end.poll(max(0, deadline - time.monotonic())), f"rank {rank} hangs"
            try:
                result, error = read_end.recv()
            except EOFError:
                assert rank in dies, f"rank {rank} died without a word"
                results.append(None)
                continue
            assert error is None, f"rank {rank}:\n{error}"
            assert rank not in dies, f"rank {rank} was to die"
            results.append(result)
        for rank, process in enumerate(ranks):
            process.join(max(0, deadline - time.monotonic()))
            assert process.exitcode is not None, f"rank {rank} does not leave"
            assert rank in dies or process.exitcode == 0, f"rank {rank} left with {process.exitcode}"
    finally:
        for process in ranks:
            process.kill()
    return results


def _rank(pipe: Connection, rank: int, world: int, rendezvous: Path, call: tuple[Callable[..., Any], Any]) -> None:
    work, args = call
    faulthandler.dump_traceback_later(TIMEOUT - 5)
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT - 10)
    store = dist.FileStore(str(rendezvous), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    try:
        pipe.send((work(rank, dist.new_group(backend="gloo", timeout=timeout), *args), None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
    faulthandler.cancel_dump_traceback_later()


class Alarms(list[tuple[str, dict[str, Any]]]):
    """Collects alarms."""

    def __call__(self, event: str, details: dict[str, Any]) -> None:
        self.append((event, details))

    @property
    def events(self) -> list[str]:
        return [event for event, _ in self]
