"""How long the ranks of a pipeline stand idle in each schedule, beside what its formula says.

    python benchmarks/bubble.py                         pipelines of 2 and 4 ranks, tasks that sleep
    python benchmarks/bubble.py --compute               2 ranks, a real model; wants two cores of its own
    python benchmarks/bubble.py --ranks 4 --microbatches 16 --schedules zbv,dualpipev

A task that sleeps takes its time whatever else the machine does, so as many ranks can be timed as one likes: a forward
takes one unit for all stages of a rank together, the two halves of a backward one each. All else is real: the
pipeline, torch's schedules, the sends. Idle is the share of a step, from the first start on any rank to the last end,
in which a rank runs no forward and no backward; shown are the mean over the ranks and the worst one, medians over the
steps.
"""

import argparse
import multiprocessing
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lanewise import config
from lanewise.elastic.launcher import listening_socket
from lanewise.elastic.world import World, local_store
from lanewise.models.spec import Output, Passed
from lanewise.parallel.build import build_part
from lanewise.parallel.layout import Layout, check
from lanewise.parallel.mesh import Mesh
from lanewise.parallel.pipeline import CLASSES, Event, Microbatch, Pipeline
from lanewise.parallel.stages import chunks, dealt, turns_back
from lanewise.parallel.trace import MadeUp
from lanewise.replica import Replica

STEPS = 3


def settings(schedule: str, microbatches: int, compute: bool) -> config.Run:
    sizes = ["model.hidden=512", "model.layers=8", "model.vocab_size=512"] if compute else ["model.layers=16"]
    batch = [f"batch.lanes={microbatches}", f"batch.sequence_length={256 if compute else 16}"]
    return config.load(None, ["model.preset=tiny-dense", *sizes, *batch, f"layout.schedule={schedule}"])


def idle_units(schedule: str, ranks: int, stages: int) -> float:
    """What a rank stands idle in a step, in forwards of all its stages; a backward takes two, half of it the weights.

    GPipe, 1F1B: arXiv:1806.03377; interleaved: arXiv:2104.04473; looped BFS: arXiv:2211.05953; ZB1P, interleaved here,
    and ZBV, which has none but that the last rank starts later: arXiv:2401.10241; DualPipeV, its forwards and backwards
    not overlapped: https://github.com/deepseek-ai/DualPipe.
    """
    forward, backward, weights = 1.0, 2.0, 1.0
    of_stage = {
        "gpipe": forward + backward,
        "1f1b": forward + backward,
        "interleaved": forward + backward,
        "looped-bfs": forward + backward,
        "interleaved-zb": forward + backward - 2 * weights,
        "zbv": forward,
        "dualpipev": (forward + backward) + backward - 3 * weights,
    }
    return (ranks - 1) * of_stage[schedule] / stages


# ---------------------------------------------------------------------------------------------- tasks that sleep


class _Inputs(torch.autograd.Function):
    """Sleeps as a stage's forward, and as the half of its backward that goes on to the stage before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return g.contiguous(), None


class _Weights(torch.autograd.Function):
    """Sleeps as the other half of the backward."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return g, None


class Sleeper(nn.Module):
    """A stage whose forward takes `seconds`, and its backward twice that."""

    handed_on = 1

    def __init__(self, starts: bool, ends: bool, seconds: float, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.starts, self.ends, self.seconds, self.shape = starts, ends, seconds, shape
        self.weight = nn.Parameter(torch.zeros(()))

    def part(self, states: Any, *_microbatch: Any) -> Output | Passed:
        x = states[0] if states else torch.zeros(self.shape)
        y = _Inputs.apply(x + _Weights.apply(self.weight, self.seconds), self.seconds)
        return Output(y.sum(), y.detach().sum(), None) if self.ends else Passed((y,), None)


class _Nobody:
    """For the reducer: drops the gradients."""

    def begin(self, *_slot: int) -> None: ...

    def end(self, *_stage: int) -> None: ...


def sleeping(run: config.Run, mesh: Mesh, unit: float) -> tuple[Pipeline, Callable[[], object]]:
    count = chunks(run.layout) * mesh.size["pp"]
    shape = (run.batch.size, run.batch.sequence_length, run.model.hidden)
    parts: Any = {
        stage: Sleeper(stage == 0, stage == count - 1, unit / chunks(run.layout), shape)
        for stage in dealt(run.layout, mesh.size["pp"])[mesh.at["pp"]]
    }
    nobody: Any = _Nobody()
    pipeline = Pipeline(parts, mesh, run, nobody, torch.float32)
    nothing = torch.empty(0)
    microbatches = [Microbatch(lane, 0, nothing, nothing, 0, None) for lane in range(run.batch.lanes)]
    return pipeline, lambda: pipeline.train(microbatches, lambda *_made: None)


def computing(run: config.Run, mesh: Mesh) -> tuple[Pipeline, Callable[[], object]]:
    replica, data = Replica(run, build_part(run, mesh), mesh), MadeUp(run)
    assert replica.pipeline is not None

    def step() -> None:
        replica.compute(1, data.slot, lambda phase: None)
        for _ in replica.reducer.finish():
            pass

    return replica.pipeline, step


# ------------------------------------------------------------------------------------------------------ measuring


def rank(rank: int, size: int, port: int, given: Any, schedules: list[str], count: int, unit: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=local_store(rank, size, port, given), rank=rank, world_size=size)
    world = World(rank, size, torch.device("cpu"), dist.group.WORLD)
    for schedule in schedules:
        run = settings(schedule, count, compute=not unit)
        mesh = Mesh(world, Layout(pp=size), turns_back(run.layout))
        pipeline, step = sleeping(run, mesh, unit) if unit else computing(run, mesh)
        step()  # the first one sets up
        found = []
        for _ in range(STEPS):
            events: list[Event] = []
            pipeline.recorder = events.append
            dist.barrier()
            step()
            everyone: list[Any] = [None] * size
            dist.all_gather_object(everyone, events)
            found.append(shares([event for events in everyone for event in events]))
        if rank == 0:
            show(schedule, size, count, chunks(run.layout), found)
    dist.barrier()
    dist.destroy_process_group()


def shares(events: list[Event]) -> tuple[float, float, float]:
    """(mean idle share, the worst rank's, seconds of the step)."""
    busy: dict[int, float] = defaultdict(float)
    for event in events:
        busy[event.rank] += event.end - event.start
    seconds = max(event.end for event in events) - min(event.start for event in events)
    idle = [1 - spent / seconds for spent in busy.values()]
    return statistics.mean(idle), max(idle), seconds


def show(schedule: str, ranks: int, count: int, stages: int, found: list[tuple[float, float, float]]) -> None:
    mean, worst, seconds = (statistics.median(column) for column in zip(*found, strict=True))
    idle = idle_units(schedule, ranks, stages)
    formula = idle / (3 * count + idle)
    print(f"{schedule:15} {ranks:5} {count:12} {mean:7.1%} {worst:7.1%} {formula:8.1%} {seconds:8.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="idle share of a pipeline's ranks, by schedule")
    parser.add_argument("--compute", action="store_true", help="a real model on 2 ranks instead of tasks that sleep")
    parser.add_argument("--ranks", type=int, help="ranks of the pipeline (default: 2, then 4)")
    parser.add_argument("--microbatches", type=int, default=8, help="microbatches of a step")
    parser.add_argument("--unit", type=float, default=0.1, help="seconds that a forward on a rank sleeps")
    parser.add_argument("--schedules", default=",".join(CLASSES), help="names, joined by commas")
    asked = parser.parse_args()
    print(f"{'schedule':15} {'ranks':>5} {'microbatches':>12} {'idle':>7} {'worst':>7} {'formula':>8} {'seconds':>8}")
    for size in [asked.ranks] if asked.ranks else [2] if asked.compute else [2, 4]:
        names = asked.schedules.split(",")
        for name in names:
            check(Layout(pp=size), settings(name, asked.microbatches, asked.compute), size)
        given, port = listening_socket()
        context = multiprocessing.get_context("fork")
        unit = 0.0 if asked.compute else asked.unit
        workers = [
            context.Process(target=rank, args=(r, size, port, None if r else given, names, asked.microbatches, unit))
            for r in range(size)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()


if __name__ == "__main__":
    main()
