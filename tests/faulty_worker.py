"""A worker in which something goes wrong: the launcher is told to start this module's `work` instead of the real one.

A fault is a function of the rank, called in the worker before it starts; it patches what is to go wrong. Workers import
this module, so it imports nothing but what they have imported already.
"""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lanewise import trainer, worker
from lanewise.elastic import launcher
from lanewise.elastic.status import Status
from lanewise.job import Job
from lanewise.lanes.keys import slot_key
from lanewise.parallel.build import build_part

Fault = Callable[[int], None]


@dataclass(frozen=True)
class FaultyJob(Job):
    fault: Fault = lambda rank: None
    log: Path | None = None  # what the workers print; rank r writes to log.r


def work(rank: int, size: int, given: FaultyJob, *arguments: Any) -> None:
    if given.log is not None:
        sys.stdout = sys.stderr = open(f"{given.log}.{rank}", "w", buffering=1)  # noqa: SIM115 - for the process's life
    given.fault(rank)
    worker.work(rank, size, given, *arguments)


# ---------------------------------------------------------------------------------------------------------- faults


def at(rank: int, step: int, phase: str, action: Callable[[], None]) -> Fault:
    """`action` when that rank enters that phase of that step for the first time."""
    return partial(_at, rank, step, phase, action)


def _at(where: int, step: int, phase: str, action: Callable[[], None], rank: int) -> None:
    enter, happened = Status.enter, False

    def entered(self: Status, name: str) -> None:
        nonlocal happened
        enter(self, name)
        if (rank, self.step, name) == (where, step, phase) and not happened:
            happened = True
            action()

    Status.enter = entered


def boom() -> None:
    raise ArithmeticError("boom\nand more about it")


def deep_boom() -> None:
    """The error's text is longer than a pipe holds."""
    raise ArithmeticError("deep boom " * 20_000)


def terminated() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def launcher_terminated() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    os.kill(parent.pid, signal.SIGTERM)


def launcher_terminated_twice() -> None:
    launcher_terminated()
    time.sleep(2 * launcher.ONE_REQUEST)
    launcher_terminated()
    time.sleep(60)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leaves() -> None:
    os._exit(0)


def sleeps() -> None:
    time.sleep(60)


def poison(slots: Collection[tuple[int, int]], factor: float) -> Fault:
    """The objective of these (step, lane) times `factor`, wherever they run; the loss that is shown stays."""
    return partial(_poison, slots, factor)


def _poison(slots: Collection[tuple[int, int]], factor: float, rank: int) -> None:
    keys = {slot_key(0, step, lane, 0) for step, lane in slots}

    def hook(_module: Any, arguments: tuple[Any, ...], output: Any) -> Any:
        if len(arguments) >= 3 and int(arguments[2]) in keys:  # the third is the key of the slot
            return output._replace(loss_sum=output.loss_sum * factor)
        return output

    def poisoned(run: Any, mesh: Any) -> Any:
        model = build_part(run, mesh)
        model.register_forward_hook(hook)
        return model

    trainer.build_part = poisoned
