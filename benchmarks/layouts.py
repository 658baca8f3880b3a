"""Every axis and some hybrids, at 4 and 8 processes: ours against the same thing composed by hand (by_hand.py).

    python benchmarks/layouts.py
    python benchmarks/layouts.py --only tp4 pp2.fsdp2 --rounds 20

Both train the same model from the same weights on the same 8 x 256 tokens a step in the same microbatches (fp32, one
thread a process), and must report the same losses and gradient norms. Tokens/s: both live in the same processes and
take turns; the ratio is the median over rounds. Peak memory: each alone in fresh processes, the highest resident set of
a rank in its steps above what the process had before the model. Bytes: what went over the loopback device in a step,
all ranks together, headers included; the device is one of a network namespace of its own (where the system does not
allow that, bytes are not measured). The minimum is explained at `least_bytes`.
"""

import argparse
import ctypes
import gc
import itertools
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from math import isclose, prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import by_hand
from lanewise import config
from lanewise.data.dataset import Slot
from lanewise.elastic.launcher import listening_socket
from lanewise.elastic.world import World, local_store
from lanewise.models.build import build
from lanewise.parallel.boxes import cut_axes
from lanewise.parallel.build import build_part
from lanewise.parallel.layout import ROWS, Layout
from lanewise.parallel.mesh import Mesh
from lanewise.replica import Replica

LAYOUTS = [f"{axis}{n}" for n in (4, 8) for axis in ("tp", "pp", "fsdp", "cp", "ep")]
LAYOUTS[5:5] = ["pp2.tp2", "fsdp2.tp2", "pp2.fsdp2"]
LAYOUTS += ["pp2.fsdp2.tp2", "fsdp2.cp2.tp2"]
SEQUENCES, LENGTH, FIRST = 8, 256, 3
OURS, BY_HAND = "ours", "by hand"
ISOLATED = "LAYOUTS_ISOLATED"  # environment: this process has a network namespace of its own

DENSE = ["preset=small-dense", "vocab_size=4096", "hidden=256", "layers=8", "heads=8", "kv_heads=8", "ffn_hidden=768"]
DEEPSEEK = ["preset=tiny", "vocab_size=4096", "layers=8", "experts=16", "expert_groups=1", "mtp_layers=0"]


def settings(layout: Layout) -> config.Run:
    """A pipeline has as many microbatches as the other axes leave it; without one the whole step is one microbatch."""
    rows = prod(layout.degrees[axis] for axis in ROWS) if layout.pp > 1 else SEQUENCES
    batch = [f"batch.size={rows}", f"batch.microbatches={SEQUENCES // rows}", f"batch.sequence_length={LENGTH}"]
    model = [f"model.{word}" for word in (DEEPSEEK if layout.ep > 1 else DENSE)]
    rest = [f"layout.axes={layout}", "optimizer.no_decay=[]", "optimizer.lr=1e-3"]
    return config.load(None, [*model, "batch.lanes=1", *batch, *rest])


# ------------------------------------------------------------------------------------------------------ the variants


def ours(run: config.Run, layout: Layout, rank: int) -> by_hand.Step:
    world = World(rank, layout.size, torch.device("cpu"), dist.group.WORLD)
    mesh = Mesh(world, layout)
    replica = Replica(run, build_part(run, mesh), mesh)
    updates = itertools.count()

    def step(tokens: Tensor, labels: Tensor) -> tuple[float, float]:
        parts = [x.chunk(run.batch.microbatches) for x in (tokens, labels)]

        def slot(_step: int, _lane: int, k: int) -> Slot:
            x, y = (part[k].numpy() for part in parts)
            return Slot(x, y, [], y.size)

        ballot = replica.compute(1, slot, lambda phase: None)
        verdict, chunks = replica.voter.vote(ballot, replica.reducer.finish(), stop=False)
        replica.commit(verdict, chunks, run.optimizer.lr, next(updates))
        return verdict.loss / layout.size, verdict.gradient_norm

    return step


# ------------------------------------------------------------------------------------------------------- the measuring


@dataclass
class Found:
    """One rank's, by variant. losses: its part of each first step's loss. sent: bytes by all ranks in the last of them;
    rows: that left this rank for others' experts in it."""

    losses: dict[str, list[float]] = field(default_factory=dict)
    norms: dict[str, list[float]] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)
    rows: int = 0
    peak: float = 0.0


def work(rank: int, axes: str, names: list[str], rounds: int, port: int, listener: Any, pipe: Any) -> None:
    torch.set_num_threads(1)
    layout = Layout.parse(axes)
    run = settings(layout)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = local_store(rank, layout.size, port, listener)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=layout.size)
    text = torch.randint(run.model.vocab_size, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    before = resident_mb("VmRSS")
    steps: dict[str, by_hand.Step] = {}
    dispatch = None
    for name in names:
        if name == OURS:
            steps[name] = ours(run, layout, rank)
        elif layout.ep > 1:
            steps[name], dispatch = by_hand.experts(run, layout)
        else:
            steps[name] = by_hand.dense(run, layout)
    forget_peak()
    found = Found()
    for name, step in steps.items():
        found.losses[name], found.norms[name], found.times[name] = [], [], []
        for _ in range(FIRST):
            sent, rows = loopback_bytes(), dispatch.sent if dispatch else 0
            dist.barrier()  # so that none sends before all have read; barriers' own bytes are few
            loss, norm = step(tokens, labels)
            dist.barrier()
            found.sent[name], found.rows = loopback_bytes() - sent, dispatch.sent - rows if dispatch else 0
            dist.barrier()
            found.losses[name].append(loss)
            found.norms[name].append(norm)
    found.peak = resident_mb("VmHWM") - before
    for _ in range(rounds):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step(tokens, labels)
            dist.barrier()
            found.times[name].append(time.perf_counter() - start)
    pipe.send(found)
    dist.barrier()


def loopback_bytes() -> int:
    """Sent so far through this network namespace's loopback device."""
    (line,) = (line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def resident_mb(which: str) -> float:
    """VmRSS: the resident set now; VmHWM: the highest so far; MB (10^6)."""
    return int(Path("/proc/self/status").read_text().split(f"{which}:")[1].split()[0]) * 1024 / 1e6


def forget_peak() -> None:
    """Give what building the model left behind back to the system, and start the highest resident set anew."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def on_ranks(axes: str, names: list[str], rounds: int) -> list[Found]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lanewise.replica", "by_hand"])
    listener, port = listening_socket()
    pipes, workers = [], []
    for rank in range(Layout.parse(axes).size):
        near, far = context.Pipe(duplex=False)
        given = listener if rank == 0 else None
        worker = context.Process(target=work, args=(rank, axes, names, rounds, port, given, far))
        worker.start()
        far.close()
        pipes.append(near)
        workers.append(worker)
    listener.close()
    results = [pipe.recv() for pipe in pipes]
    for worker in workers:
        worker.join()
    return results


# --------------------------------------------------------------------------------------------------------- the minimum


def least_bytes(layout: Layout, run: config.Run, rows: float) -> float:
    """What all ranks together must send in a step, in fp32. A gather or a scattered sum of x over n ranks costs
    (n - 1) x at least, the sum known to all twice that (a ring's). For each microbatch, S being its states:

    tp    8 gathers or sums of S a layer (around attention and feed-forward, forward and backward), 4 at the ends
    pp    S forward and S backward from each stage to the next
    fsdp  weights gathered for the forward and again for the backward, the gradient summed; what is outside the blocks
          stays between the two
    cp    keys and values gathered, their gradients summed
    ep    each row to its expert and back, forward and backward: `rows`, as really routed

    and once a step, for weights that several ranks of a replica have a copy of, the gradient summed and known to all.
    """
    model, batch = run.model, run.batch
    states = 4 * batch.size * batch.sequence_length * model.hidden
    per_microbatch = 2 * (layout.pp - 1) * states
    once = 4 * model.hidden * rows
    if isinstance(model, config.DenseModel):
        per_microbatch += (8 * model.layers + 4) * (layout.tp - 1) * states
        keys_and_values = states // model.hidden * 2 * model.kv_heads * model.head_size
        per_microbatch += 2 * model.layers * (layout.cp - 1) * keys_and_values
    with torch.device("meta"):
        table = build(model).table()
    for spec in table:
        weights = 4 * prod(spec.shape)
        copies = prod(layout.degrees[a] for a in ("cp", "ep", "tp") if a not in cut_axes(spec, layout.degrees))
        once += 2 * (copies - 1) * weights
        passes = 3 if spec.name.startswith("layers.") else 2
        per_microbatch += passes * (layout.fsdp - 1) * copies * weights
    return batch.microbatches * per_microbatch + once


# --------------------------------------------------------------------------------------------------------------- output


def agree(results: list[Found]) -> None:
    """Raises AssertionError unless both reported the same losses and norms: same function, gradients and updates."""
    for step in range(FIRST):
        losses = [sum(result.losses[name][step] for result in results) for name in (OURS, BY_HAND)]
        norms = [result.norms[name][step] for result in results for name in (OURS, BY_HAND)]
        assert isclose(*losses, rel_tol=1e-5), f"step {step}: losses {losses}"
        assert isclose(min(norms), max(norms), rel_tol=1e-4), f"step {step}: norms {norms}"


def measure(axes: str, rounds: int) -> None:
    both = on_ranks(axes, [OURS, BY_HAND], rounds)
    agree(both)
    peak = [max(rank.peak for rank in on_ranks(axes, [name], 0)) for name in (OURS, BY_HAND)]
    times, sent = both[0].times, both[0].sent  # barriers on both sides: every rank measures the same
    speed = [SEQUENCES * LENGTH / statistics.median(times[name]) for name in (OURS, BY_HAND)]
    ratio = statistics.median(b / a for a, b in zip(times[OURS], times[BY_HAND], strict=True))
    layout = Layout.parse(axes)
    line = f"{axes:15}{layout.size:6}{speed[0]:9,.0f}{speed[1]:9,.0f}{ratio:7.2f}{peak[0]:9.0f}{peak[1]:9.0f}"
    if ISOLATED in os.environ:
        least = least_bytes(layout, settings(layout), sum(rank.rows for rank in both))
        line += f"{sent[OURS] / 1e6:10.1f}{sent[BY_HAND] / 1e6:9.1f}{least / 1e6:9.1f}"
        line += f"{sent[OURS] / least:8.3f}{sent[BY_HAND] / least:9.3f}"
    print(line, flush=True)


def isolate() -> None:
    """Start again in a network namespace in which nobody else sends, if there may be one."""
    enter = ["unshare", "--net", "--map-root-user"]
    if shutil.which("unshare") and subprocess.call([*enter, "ip", "link"], stdout=subprocess.DEVNULL) == 0:
        again = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh", sys.executable, *sys.argv]
        os.execvpe(enter[0], [*enter, *again], os.environ | {ISOLATED: "yes", "TORCH_CPP_LOG_LEVEL": "ERROR"})
    print("no network namespace of our own to be had: bytes are not measured")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=LAYOUTS, metavar="LAYOUT", help="e.g. tp4 pp2.fsdp2.tp2")
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    if ISOLATED not in os.environ:
        isolate()
    print(
        f"{SEQUENCES} x {LENGTH} tokens a step, {arguments.rounds} rounds; peak MB a rank; MB sent a step by all ranks"
    )
    print(
        f"{'':15}{'':6}{'tokens/s':>18}{'':7}{'peak MB':>18}{'MB sent':>19}{'':9}{'x minimum':>17}\n"
        f"{'layout':15}{'proc.':>6}{'ours':>9}{'by hand':>9}{'ratio':>7}{'ours':>9}{'by hand':>9}"
        f"{'ours':>10}{'by hand':>9}{'minimum':>9}{'ours':>8}{'by hand':>9}"
    )
    for axes in arguments.only:
        measure(axes, arguments.rounds)


if __name__ == "__main__":
    main()
