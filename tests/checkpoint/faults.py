"""Faults for the tests: something goes wrong at the n-th thing that a process does to the file system."""

import os
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lanewise.checkpoint.dcp import _DigestingFile

_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}  # Python's own audit events


class Fault:
    """While active, calls `happen` at the n-th operation below `root` (n from 0). `count` is how many there were."""

    _hooked: "Fault | None" = None

    def __init__(self, root: Path, n: int, happen: Callable[[], None]) -> None:
        self.root, self.n, self.happen, self.count = str(root), n, happen, 0

    def operation(self) -> bool:
        self.count += 1
        return self.count - 1 == self.n

    @contextmanager
    def active(self):
        def audit(event: str, args: tuple[Any, ...]) -> None:
            fault = Fault._hooked
            if fault and event in _EVENTS and str(args[0]).startswith(fault.root) and fault.operation():
                fault.happen()

        def fsync(fd: int) -> None:
            if self.operation():
                self.happen()
            plain_fsync(fd)

        def write(file: Any, data: Any) -> int:
            if self.operation():
                plain_write(file, memoryview(data).cast("B")[: memoryview(data).nbytes // 2])
                file.flush()
                self.happen()
            return plain_write(file, data)

        plain_fsync, plain_write = os.fsync, _DigestingFile.write
        if not hasattr(sys, "_checkpoint_fault_hook"):  # an audit hook cannot be removed: one per process
            sys.addaudithook(audit)
            sys._checkpoint_fault_hook = True
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            patch.setattr(_DigestingFile, "write", write)
            Fault._hooked = self
            try:
                yield self
            finally:
                Fault._hooked = None


def die() -> None:
    os._exit(9)


def error(number: int) -> Callable[[], None]:
    def happen() -> None:
        raise OSError(number, os.strerror(number))

    return happen
