"""What a training process of this machine holds at its peak, beyond what it held before it had a model.

On a CPU that is resident memory: the allocator keeps holes between tensors, and how many is a property of its
implementation that `probe` measures. On a GPU it is what the caching allocator reserved.
"""

import json
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from lanewise.config import Run
from lanewise.elastic.world import connect
from lanewise.planner.cluster import Cluster
from lanewise.planner.fit import UNIT, space_of
from lanewise.planner.steps import Step

STEPS = 3  # until the peak no longer grows
PRELOAD = ["torch", "lanewise.planner.steps"]


def peaks(runs: Sequence[Run], workers: int = 1) -> list[float]:
    """Bytes of the fullest of `workers` fresh processes, for each run."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    found = []
    for run in runs:
        with tempfile.TemporaryDirectory() as folder:
            ranks = [context.Process(target=_work, args=(rank, workers, run, folder)) for rank in range(workers)]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()
            told = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(workers)]
        found.append(max(told))
    return found


def _work(rank: int, workers: int, run: Run, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", workers) if workers > 1 else None
    world = connect(rank, workers, rank, store, threads=1, deterministic=False)
    before = _resident("VmRSS") if world.device.type == "cpu" else 0
    step = Step(run, world)
    for _ in range(STEPS):
        step()
    after = _resident("VmHWM") if world.device.type == "cpu" else torch.cuda.max_memory_reserved()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(after - before), encoding="utf-8")
    if workers > 1:
        dist.barrier()
        dist.destroy_process_group()


def _resident(line: str) -> int:
    """Bytes: VmRSS is now, VmHWM the most so far. Where the kernel does not tell them apart: the most so far."""
    status = Path("/proc/self/status")
    if not status.exists():
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else 1024 * most
    told = dict(text.split(":", 1) for text in status.read_text().splitlines())
    return 1024 * int(told[line].split()[0])


def holes(runs: Sequence[Run], cluster: Cluster) -> tuple[float, list[float]]:
    """(bytes that the last run takes, which should be next to nothing; shares of the activations that the others lose
    to holes, in the order of `Engine.holes`)."""
    *measured, base = peaks(runs)
    shares = []
    for run, peak in zip(runs, measured, strict=False):
        held = space_of(run, cluster, UNIT).memory
        shares.append(float(np.ravel((peak - base - held.total) / held.activations)[0]))
    return base, [max(share, 0.0) for share in shares]
