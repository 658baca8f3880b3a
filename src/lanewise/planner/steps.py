"""A training step of a run, again and again, without its data and records: what `probe` times.

Times are taken in rounds, every run once, then every run again, so that a neighbour who slows the machine down for some
seconds spoils a round, not a run.
"""

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lanewise.config import Run
from lanewise.data.dataset import Slot
from lanewise.elastic.world import World, connect
from lanewise.parallel.build import build_part
from lanewise.parallel.layout import Layout
from lanewise.parallel.mesh import Mesh
from lanewise.parallel.stages import turns_back
from lanewise.replica import Replica

ROUNDS = 3
WINDOW = 7  # products
ROUND_S = 0.1  # seconds that a run is repeated for in each


class Step:
    """One run's step, as one rank of a world: every slot holds the same random tokens."""

    def __init__(self, run: Run, world: World) -> None:
        mesh = Mesh(world, Layout.parse(run.layout.axes), turns_back(run.layout))
        self.replica = Replica(run, build_part(run, mesh), mesh)
        shape = run.batch.size, run.batch.sequence_length
        tokens = np.random.default_rng(0).integers(0, run.model.vocab_size, shape)
        self.slot = Slot(tokens, tokens, [], tokens.size)
        self.count = 0

    def __call__(self) -> None:
        replica = self.replica
        ballot = replica.compute(self.count, lambda step, lane, k: self.slot, lambda phase: None)
        verdict, chunks = replica.voter.vote(ballot, replica.reducer.finish(), stop=False)
        replica.commit(verdict, chunks, 1e-3, self.count)
        self.count += 1


def step_seconds(runs: Sequence[Run], world: World, rounds: int = ROUNDS) -> list[float]:
    """Seconds of a step of each run on an unhindered machine. All ranks of the world take part, with the same runs.

    Beside each step every rank times a product of which it knows the best time: who shares the machine's cores slows
    down both alike. What a step took is divided by how much the slowest rank was slowed down around it.
    """
    steps = [Step(run, world) for run in runs]
    for step in steps:
        step()
    first = [_timed(step, world) for step in steps]
    counts = torch.tensor([np.clip(ROUND_S / seconds, 1, 20) for seconds in first]).long()
    if world.group is not None:
        counts = counts.to(world.device)
        dist.broadcast(counts, 0)  # a step is a matter of all ranks: they make equally many
    pace = Pace(world.device)
    order = [i for _ in range(rounds) for i, count in enumerate(counts.tolist()) for _ in range(count)]
    took, beside = np.zeros(len(order)), np.zeros(len(order) + 1)
    beside[0] = pace()
    for at, i in enumerate(order):
        took[at], beside[at + 1] = _timed(steps[i], world), pace()
    # neighbours come and go in seconds, one product alone says little: a running median
    around = np.lib.stride_tricks.sliding_window_view(np.pad(beside, WINDOW // 2, mode="edge"), WINDOW)
    pace_at = np.median(around, axis=1)
    hindered = (pace_at[1:] + pace_at[:-1]) / 2 / pace_at.min()
    if world.group is not None:
        everyone = torch.from_numpy(hindered).to(world.device)
        dist.all_reduce(everyone, dist.ReduceOp.MAX)
        hindered = everyone.cpu().numpy()
    clean = took / hindered
    return [float(np.median(clean[np.array(order) == i])) for i in range(len(runs))]


def alone() -> World:
    """The world of this process alone."""
    torch.set_num_threads(1)
    return World(0, 1, torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))


def on_two(
    runs: Sequence[Run], also: Callable[[World], dict[str, Any]] | None = None
) -> tuple[list[float], dict[str, Any]]:
    """`step_seconds` on two processes of this machine, and what `also` says on the first of them."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_on_two, args=(list(runs), also, folder), nprocs=2, join=True)
        found = json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))
    return found["steps"], found["also"]


def _on_two(rank: int, runs: list[Run], also: Callable[[World], dict[str, Any]] | None, folder: str) -> None:
    world = connect(rank, 2, rank, dist.FileStore(f"{folder}/store", 2), threads=1, deterministic=False)
    said = also(world) if also is not None else {}
    found = {"steps": step_seconds(runs, world), "also": said}
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


class Pace:
    """Seconds of a small product, about a millisecond of work."""

    def __init__(self, device: torch.device) -> None:
        self.a, self.times = torch.randn(256, 256, device=device), 8
        while self() < 1e-3 and self.times < 2**16:
            self.times *= 2

    def __call__(self) -> float:
        started = time.perf_counter()
        for _ in range(self.times):
            self.a @ self.a
        _finish(self.a.device)
        return time.perf_counter() - started


def _timed(step: Step, world: World) -> float:
    started = time.perf_counter()
    step()
    _finish(world.device)
    return time.perf_counter() - started


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
