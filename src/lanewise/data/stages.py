"""Reading ahead: while a step computes, the microbatches of those to come are read and preprocessed.

    read (threads) -> preprocess (the user's transform, in processes of its own) -> train

A microbatch depends on nothing but its name (step, lane, k), so each may be made anywhere, again, or not at all: order
and bits are those of calling `Dataset.slot` on the spot. Since all have one size, bytes of credit are a number of
microbatches, and a stage holds at most its credit. Threads are enough for reading, which waits for disks and copies
memory; Python code of the user's would hold up training in a thread, so it gets processes (forkserver: this process
has threads, and must not fork).
"""

import itertools
import multiprocessing
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import xxhash

from lanewise import config
from lanewise.data.dataset import Dataset, Slot
from lanewise.data.live import Live
from lanewise.data.processes import leave_with_parent
from lanewise.data.transform import named
from lanewise.data.windows import IGNORED
from lanewise.errors import UserError

# Threads. For local files a second one only contends for the interpreter (measured: half the speed); reading from a
# store is waiting.
READERS, FAR_READERS = 1, 16
MOST = 256  # microbatches read ahead at most, however small they are
TOGETHER = 16  # microbatches a thread reads at a time from local files: handing over takes as long as reading a few
ATTEMPTS = 3  # times a microbatch may take the process that works on it with it

Name = tuple[int, int, int]  # step, lane, k
Slots = list[Slot | Exception]


class Coming(NamedTuple):
    """A microbatch on its way: the `place`-th of some that are made together."""

    name: Name
    slots: Future[Slots]
    place: int


class Feed:
    """The microbatches of some lanes, in the order in which a replica computes them, ahead of time.

    Asking for any other is allowed (it is made at once, and reading ahead goes on from there).
    """

    def __init__(self, dataset: Dataset | Live, lanes: Sequence[int], data: config.Data, batch: config.Batch) -> None:
        self.dataset, self.lanes, self.batch = dataset, lanes, batch
        self.transform = Transform(data.transform, data.workers, dataset) if data.transform else None
        slot_bytes = 8 * batch.size * batch.sequence_length * (2 + (data.pack in ("first-fit", "best-fit")))
        self.depth = min(MOST, int(data.credit_mb * 2**20) // slot_bytes)  # 0: nothing is read ahead
        readers = FAR_READERS if dataset.is_far else READERS
        self.readers = ThreadPoolExecutor(readers, "read-ahead") if self.depth else None
        self.preprocessors = ThreadPoolExecutor(data.workers, "preprocess") if self.depth and self.transform else None
        self.together = 1 if self.transform or dataset.is_far else max(1, min(TOGETHER, self.depth // 4))
        self.reading: deque[tuple[Name, Future[Slots]]] = deque()  # to be preprocessed
        self.ready: deque[Coming] = deque()
        self.order: Iterator[Name] = iter(())
        self.next: Name = (0, 0, 0)
        self.lock = threading.Lock()
        self.seconds = {"wait": 0.0, "read": 0.0, "preprocess": 0.0}

    def slot(self, step: int, lane: int, k: int) -> Slot:
        """`Dataset.slot`, transformed."""
        began = time.perf_counter()
        name = (step, lane, k)
        if self.readers is None:
            slot = self._preprocess(name, self._read(name))
        else:
            if not self.ready or self.ready[0][0] != name:
                self._start_at(name)
            _, future, place = self.ready.popleft()
            self._fill()
            slot = _taken(future, place)
        self._count("wait", began)
        return slot

    def lap(self) -> dict[str, float]:
        """Seconds since the last lap: training waited (`wait`), and threads were busy (`read`, `preprocess`)."""
        with self.lock:
            seconds, self.seconds = self.seconds, dict.fromkeys(self.seconds, 0.0)
        return seconds if self.transform else {k: v for k, v in seconds.items() if k != "preprocess"}

    def close(self) -> None:
        for pool in (self.readers, self.preprocessors):
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)
        if self.transform is not None:
            self.transform.close()

    def _start_at(self, name: Name) -> None:
        for _, future in self.reading:
            future.cancel()
        for coming in self.ready:
            coming.slots.cancel()
        self.reading.clear()
        self.ready.clear()
        step, lane, k = name
        slots = [(l, j) for l in self.lanes for j in range(self.batch.microbatches)]
        first = slots.index((lane, k)) if (lane, k) in slots else len(slots)
        rest = ((step, *slot) for slot in slots[first + 1 :])
        later = ((s, *slot) for s in itertools.count(step + 1) for slot in slots)
        self.next, self.order = name, itertools.chain(rest, later)
        self._fill()

    def _fill(self) -> None:
        """Every stage gets as much as it has credit for."""
        if self.transform is None:
            while (room := self.depth - len(self.ready)) >= self.together or not self.ready:
                names = self._coming(min(room, self.together) if self.ready else 1)  # the first is waited for
                if not names:
                    return
                read = self._submit(names)
                self.ready.extend(Coming(name, read, place) for place, name in enumerate(names))
            return
        while True:
            moved = False
            if len(self.reading) < self.depth and (names := self._coming(1)):
                self.reading.append((names[0], self._submit(names)))
                moved = True
            if self.preprocessors is not None and self.reading and len(self.ready) < self.depth:
                name, read = self.reading.popleft()
                self.ready.append(Coming(name, self.preprocessors.submit(self._when_read, name, read), 0))
                moved = True
            if not moved:
                return

    def _coming(self, most: int) -> list[Name]:
        """The next microbatches to read, at most so many, if there is data for them."""
        names: list[Name] = []
        while len(names) < most and (self.dataset.last is None or self.next[0] <= self.dataset.last):
            names.append(self.next)
            self.next = next(self.order)
        return names

    def _submit(self, names: list[Name]) -> "Future[Slots]":
        assert self.readers is not None
        return self.readers.submit(self._read_all, names)

    def _read_all(self, names: list[Name]) -> Slots:
        slots: Slots = []
        for name in names:
            try:
                slots.append(self._read(name))
            except Exception as error:
                slots.append(error)  # raised when its turn comes: those before it are good
        return slots

    def _read(self, name: Name) -> Slot:
        began = time.perf_counter()
        slot = self.dataset.slot(*name)
        self._count("read", began)
        return slot

    def _when_read(self, name: Name, read: "Future[Slots]") -> Slots:
        return [self._preprocess(name, _taken(read, 0))]

    def _preprocess(self, name: Name, slot: Slot) -> Slot:
        if self.transform is None:
            return slot
        began = time.perf_counter()
        slot = self.transform(slot, name)
        self._count("preprocess", began)
        return slot

    def _count(self, stage: str, began: float) -> None:
        with self.lock:
            self.seconds[stage] += time.perf_counter() - began


def _taken(slots: Future[Slots], place: int) -> Slot:
    found = slots.result()[place]
    if isinstance(found, Exception):
        raise found
    return found


# ------------------------------------------------------------------------------------------------------- preprocess


class Transform:
    """The user's `function(tokens_BT, labels_BT, key) -> (tokens_BT, labels_BT)`, in processes of its own.

    Shapes stay; ids stay below the vocabulary; a label of IGNORED is not predicted. `key` is 63 bits keyed by the run's
    seed and the microbatch's name: the only randomness that comes out the same after a restart.
    """

    def __init__(self, function: str, workers: int, dataset: Dataset | Live) -> None:
        named(function, "data.transform")  # refuse what is not there before anything starts
        self.function, self.workers, self.dataset = function, workers, dataset
        self.lock = threading.Lock()
        self.pool = self._start()

    def _start(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["lanewise.data.stages"])
        return ProcessPoolExecutor(self.workers, context, initializer=_begin, initargs=(self.function,))

    def __call__(self, slot: Slot, name: Name) -> Slot:
        key = xxhash.xxh3_64_intdigest(f"transform {self.dataset.seed} {name}".encode()) >> 1
        where = f"data.transform: {self.function} on {', '.join(slot.samples) or 'padding'}"
        for _ in range(ATTEMPTS):
            pool = self.pool
            try:
                made = pool.submit(_apply, slot.tokens_BT, slot.labels_BT, key).result()
            except BrokenProcessPool:
                self._replace(pool)  # whoever else waited for it asks again too
            except Exception as error:
                raise UserError(f"{where}: {type(error).__name__}: {error}") from None
            else:
                return self._checked(slot, made, where)
        raise UserError(f"{where}: its process died {ATTEMPTS} times (out of memory?)")

    def _replace(self, broken: ProcessPoolExecutor) -> None:
        with self.lock:
            if self.pool is broken:
                broken.shutdown(wait=False)
                self.pool = self._start()

    def _checked(self, slot: Slot, made: Any, where: str) -> Slot:
        shape = slot.tokens_BT.shape
        if not (isinstance(made, tuple) and len(made) == 2 and all(np.shape(array) == shape for array in made)):
            raise UserError(f"{where}: must return tokens and labels, both of shape {shape}")
        tokens_BT, labels_BT = (np.asarray(array, np.int64) for array in made)
        labels = labels_BT[labels_BT != IGNORED]
        for ids in (tokens_BT, labels):
            if ids.size and not 0 <= ids.min() <= ids.max() < self.dataset.vocab_size:
                raise UserError(f"{where}: returned an id outside 0 to {self.dataset.vocab_size - 1}")
        return replace(slot, tokens_BT=tokens_BT, labels_BT=labels_BT, valid=int(labels.size))

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)


_function: Any = None


def _begin(function: str) -> None:
    """Once in each process."""
    global _function  # noqa: PLW0603 - what a process of the pool is
    leave_with_parent()
    _function = named(function, "data.transform")


def _apply(tokens_BT: np.ndarray, labels_BT: np.ndarray, key: int) -> Any:
    return _function(tokens_BT, labels_BT, key)


# ------------------------------------------------------------------------------------------------------- write back


class WriteBack:
    """One thread for what is written while training goes on, in order. At most `most` calls wait."""

    def __init__(self, most: int = 64) -> None:
        self.pool = ThreadPoolExecutor(1, "write-back")
        self.waiting: deque[Future[None]] = deque()
        self.most = most

    def __call__(self, write: Any, *arguments: Any) -> None:
        """write(*arguments), later. Raises what an earlier one raised."""
        while self.waiting and (len(self.waiting) >= self.most or self.waiting[0].done()):
            self.waiting.popleft().result()
        self.waiting.append(self.pool.submit(write, *arguments))

    def drain(self) -> None:
        """Wait until all is written."""
        while self.waiting:
            self.waiting.popleft().result()
