"""Every layout that a run allows on a cluster, costed at once, and the best of those that fit. Deterministic."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import gcd
from typing import Any

import numpy as np

from lanewise.config import Run
from lanewise.parallel.layout import Layout, check
from lanewise.planner.choice import RECOMPUTE, SCHEDULES, Choice, Floats
from lanewise.planner.cluster import Cluster
from lanewise.planner.cost import Time, step_time
from lanewise.planner.features import features
from lanewise.planner.machine import Where
from lanewise.planner.memory import Memory, memory
from lanewise.planner.model import Transformer, describe

USABLE = 0.94  # of a device's memory: the rest fragments


@dataclass(frozen=True)
class Plan:
    """One layout with what it costs. time: seconds by part, `correction` the learned one; memory: bytes by part."""

    layout: Layout
    replicas: int
    micro: int  # sequences of a microbatch on one rank
    count: int  # microbatches of a step on one rank
    recompute: str
    schedule: str
    chunks: int
    zero: int
    time: dict[str, float]
    memory: dict[str, float]
    low: float
    high: float
    extrapolates: bool
    choice: Choice

    @property
    def step(self) -> float:
        return sum(self.time.values())

    @property
    def bytes(self) -> float:
        return sum(self.memory.values())

    def settings(self) -> dict[str, Any]:
        """What the run file's layout section says of it."""
        said: dict[str, Any] = {"axes": str(self.layout), "recompute": self.recompute, "zero": self.zero}
        if self.layout.pp > 1:
            said |= {"schedule": self.schedule, "chunks": self.chunks}
        return said

    @property
    def name(self) -> str:
        parts = [str(self.layout) or "one rank a replica", f"x{self.replicas}"]
        return " ".join(parts)


@dataclass(frozen=True)
class Space:
    """All candidates of a search, and which of them fit."""

    run: Run
    model: Transformer
    where: Where
    choice: Choice
    replicas: Floats
    memory: Memory
    fits: Any
    foreign: bool = False  # the model is a module of the user's, not the run's

    @property
    def cluster(self) -> Cluster:
        return self.where.cluster

    @property
    def precision(self) -> str:
        return self.run.train.precision

    def time(self, choice: Choice) -> Time:
        """Seconds of a step of choices, by part, nothing learned in it."""
        length = self.run.batch.sequence_length
        return step_time(self.model, choice, length, self.cluster, self.precision, self.where.rates, ours=True)

    @property
    def size(self) -> int:
        return len(self.fits)


def candidates(run: Run, model: Transformer, devices: int, fast: int) -> tuple[Choice, Floats]:
    """Choices (arrays) that divide the devices and that the run's model and batch allow, and their replicas."""
    rows = list(_degrees(run, model, devices, fast))
    if not rows:
        return Choice(), np.zeros(0)
    pp, fsdp, cp, ep, tp, replicas, micro, count = np.array(rows, dtype=float).T
    kinds = [
        (recompute, SCHEDULES.index(schedule), chunks, zero)
        for recompute in range(len(RECOMPUTE))
        for schedule in SCHEDULES
        for chunks in _chunks(schedule)
        for zero in (0, 1, 2)
    ]
    n, k = len(rows), len(kinds)
    recompute, schedule, chunks, zero = np.array(kinds).T

    def each(a: Floats) -> Floats:
        return np.repeat(a, k)

    def every(a: Floats) -> Floats:
        return np.tile(a, n)

    size = micro * fsdp * ep
    kept = (run.batch.lanes % replicas == 0) & (run.batch.sequences % (run.batch.lanes * size) == 0)
    choice = Choice(
        data=each(replicas * fsdp * ep),
        lanes=each(np.where(kept, run.batch.lanes / replicas, 1)),  # as `report.chosen` has them
        fsdp=each(fsdp),
        pp=each(pp),
        cp=each(cp),
        ep=each(ep),
        tp=each(tp),
        expert_tp=each(tp),
        chunks=every(chunks),
        micro=each(micro),
        count=each(count),
        recompute=every(recompute),
        schedule=every(schedule),
        zero=every(zero),
    )
    piped = choice.pp > 1
    keep = np.where(piped, choice.pp * choice.chunks <= model.layers, (choice.schedule == 0) & (choice.chunks == 1))
    keep &= (choice.zero == 0) | (choice.data * choice.cp / choice.fsdp > 1)
    looped = choice.chunks > 1
    keep &= ~looped | (choice.count % choice.pp == 0)  # a looped schedule goes round in whole rounds
    return choice.at(np.flatnonzero(keep)), each(replicas)[keep]


def _chunks(schedule: str) -> Sequence[int]:
    return {"1f1b": (1,), "gpipe": (1,), "zbv": (2,), "dualpipev": (2,)}.get(schedule, (2, 3, 4, 6, 8))


def _degrees(run: Run, model: Transformer, devices: int, fast: int) -> Iterator[tuple[int, ...]]:
    total, sequence = run.batch.sequences, run.batch.sequence_length
    experts = model.experts
    for tp in _divisors(gcd(devices, 2**20), min(fast, model.heads)):
        for cp in _divisors(gcd(devices // tp, 2**20), max(sequence // 2048, 1)):
            if sequence % ((2 * cp if cp > 1 else 1) * tp):
                continue
            for pp in _divisors(devices // tp // cp, model.layers):
                for ep in _divisors(gcd(devices // tp // cp // pp, experts), experts) if experts else [1]:
                    rest = devices // tp // cp // pp // ep
                    for fsdp in _divisors(gcd(rest, 2**20), rest):
                        replicas = rest // fsdp
                        if total % (replicas * fsdp * ep):
                            continue
                        own = total // (replicas * fsdp * ep)  # sequences of a rank in a step
                        for micro in (1, 2, 4, 8, 16, 32):
                            if own % micro == 0:
                                yield pp, fsdp, cp, ep, tp, replicas, micro, own // micro


def _divisors(n: int, most: int) -> list[int]:
    return [d for d in range(1, min(n, most) + 1) if n % d == 0]


def explore(run: Run, where: Where, vocab: int = 0) -> Space:
    """All candidates with their memory. vocab: the tokenizer's, if the run file leaves it open."""
    model = describe(run.model, vocab)
    choice, replicas = candidates(run, model, where.cluster.devices, where.cluster.fast)
    return _space(run, model, where, choice, replicas)


def explore_foreign(run: Run, where: Where, model: Transformer) -> Space:
    """The same for a module of the user's: what `parallelize` can do, which is not context parallelism."""
    choice, replicas = candidates(run, model, where.cluster.devices, where.cluster.fast)
    can = np.flatnonzero(choice.cp == 1)
    return replace(_space(run, model, where, choice.at(can), replicas[can]), foreign=True)


def fixed(run: Run, where: Where, schedule: str, chunks: int) -> Space:
    """The one candidate that is the run's own layout. Raises UserError if it cannot be."""
    layout = Layout.parse(run.layout.axes)
    check(layout, run, where.cluster.devices)
    replicas, rows = layout.replicas(where.cluster.devices), layout.fsdp * layout.ep
    lanes = -(-run.batch.lanes // replicas)  # of the replica that has most
    numbers = {
        **layout.degrees,
        "data": replicas * rows,
        "expert_tp": layout.tp,
        "chunks": chunks,
        "lanes": lanes,
        "micro": run.batch.size // rows,
        "count": lanes * run.batch.microbatches,
        "recompute": RECOMPUTE.index(run.layout.recompute),
        "schedule": SCHEDULES.index(schedule),
        "zero": run.layout.zero,
    }
    choice = Choice(**{name: np.array([float(number)]) for name, number in numbers.items()})
    model = describe(run.model, run.model.vocab_size or run.data.vocab_size)
    return _space(run, model, where, choice, np.array([float(replicas)]))


def _space(run: Run, model: Transformer, where: Where, choice: Choice, replicas: Floats) -> Space:
    engine = where.engine
    # a run in fp32 has no separate masters, and what travels and is kept is twice as wide
    if run.train.precision == "fp32":
        engine = replace(engine, weight=4.0, optimizer=8.0, activations=2 * engine.activations)
    held = memory(model, choice, run.batch.sequence_length, engine)
    usable = where.cluster.device.memory * USABLE
    fits = np.atleast_1d(held.total <= usable) if len(replicas) else np.zeros(0, dtype=bool)
    return Space(run, model, where, choice, replicas, held, fits)


def rank(space: Space) -> list[Plan]:
    """Every layout that fits, best first, each with its best microbatch, recompute, schedule and ZeRO stage."""
    place = np.flatnonzero(space.fits)
    plans = cost_out(space, _best_of_each(space, place)) if len(place) else []
    return sorted(plans, key=lambda plan: (plan.step, plan.layout.size, str(plan.layout)))


def best_of(space: Space, layout: Layout) -> Plan | None:
    """The candidate of this layout that is fastest if any fits, else the smallest. None: it is no candidate."""
    same = np.logical_and.reduce([getattr(space.choice, axis) == degree for axis, degree in layout.degrees.items()])
    place = np.flatnonzero(np.broadcast_to(same, (space.size,)))
    if not len(place):
        return None
    fitting = place[space.fits[place]]
    if len(fitting):
        return cost_out(space, _best_of_each(space, fitting))[0]
    return cost_out(space, place[np.argmin(space.memory.total[place])][None])[0]


def _best_of_each(space: Space, place: Any) -> Any:
    """Of the candidates at `place`, the fastest of each layout. Ties go to what keeps more and shards less."""
    choice = space.choice.at(place)
    time = space.time(choice)
    total = np.broadcast_to(np.round(time.total, 9), (len(place),))
    keys = np.stack([choice.pp, choice.fsdp, choice.cp, choice.ep, choice.tp])
    order = np.lexsort((choice.zero, choice.recompute, total))
    _, first = np.unique(keys[:, order], axis=1, return_index=True)
    return place[order[first]]


def cost_out(space: Space, place: Any) -> list[Plan]:
    """The candidates at `place` in detail."""
    choice, run, cluster = space.choice.at(place), space.run, space.cluster
    time = space.time(choice)
    total = np.broadcast_to(time.total, (len(place),))
    length = run.batch.sequence_length
    factor, low, high, far = space.where.correct(features(space.model, choice, length, cluster, space.precision, time))
    seconds = {f.name: np.broadcast_to(getattr(time, f.name), total.shape) for f in fields(Time)}
    held = {f.name: np.broadcast_to(getattr(space.memory, f.name), space.fits.shape)[place] for f in fields(Memory)}
    numbers = [getattr(choice, f.name) for f in fields(Choice)]
    made = []
    for i, at in enumerate(place):
        parts = {name: float(values[i]) for name, values in seconds.items()}
        parts["correction"] = float(total[i] * (factor[i] - 1))
        axes = {axis: int(getattr(choice, axis)[i]) for axis in ("pp", "fsdp", "cp", "ep", "tp")}
        made.append(
            Plan(
                Layout(**axes),
                int(space.replicas[at]),
                int(choice.micro[i]),
                int(choice.count[i]),
                RECOMPUTE[int(choice.recompute[i])],
                SCHEDULES[int(choice.schedule[i])] if axes["pp"] > 1 else "none",
                int(choice.chunks[i]),
                int(choice.zero[i]),
                parts,
                {name: float(values[i]) for name, values in held.items()},
                float(total[i] * low[i]),
                float(total[i] * high[i]),
                bool(far[i]),
                Choice(*(values[i] for values in numbers)),
            )
        )
    return made
