"""Measure this machine in a minute: products, copies, whole small steps, and two processes that talk to each other.

What the time model multiplies is fitted to the measured steps (non-negative least squares on relative errors), so that
a prediction for this machine rests on this machine alone.
"""

import functools
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F

from lanewise import config
from lanewise.lanes.vote import Ballot
from lanewise.parallel.build import build_part
from lanewise.parallel.mesh import Mesh
from lanewise.planner.choice import RECOMPUTE, Choice, Floats
from lanewise.planner.cluster import Cluster
from lanewise.planner.cost import A100_RATE, Rates, Time, step_time
from lanewise.planner.hardware import Device
from lanewise.planner.machine import probe_path
from lanewise.planner.model import describe
from lanewise.replica import Replica

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WATTS_PER_CORE = 10.0  # of a server's processor, by data sheets: 200 to 400 W for 24 to 48 cores
UNIT = Rates(
    rows=0.0, launch=0.0, launch_routed=0.0, scores=0.0, products=1.0, attention=1.0, pointwise=1.0, head=1.0, link=1.0,
    network=1.0, hidden_tensor=0.0, hidden_expert=0.0, hidden_data=0.0, seen=1.0, bubble=1.0, uneven=1.0, jitter=0.0,
    fixed=0.0,
)  # fmt: skip
SHAPES = (  # small runs, one lane: preset, layers, hidden, feed-forward, sequences, length
    ("tiny-dense", 2, 256, 768, 4, 128),
    ("tiny-dense", 6, 256, 768, 4, 128),
    ("tiny-dense", 2, 256, 768, 8, 256),
    ("tiny-dense", 2, 512, 1536, 4, 128),
    ("tiny-dense", 4, 512, 1536, 8, 128),
    ("tiny-dense", 2, 256, 768, 1, 1024),
    ("tiny-dense", 4, 128, 384, 2, 64),
    ("tiny-dense", 2, 384, 1024, 1, 64),
    ("tiny-dense", 8, 192, 576, 2, 128),
    ("tiny-dense", 5, 256, 1024, 6, 64),
    ("tiny-dense", 1, 256, 768, 2, 512),
)


def seconds(
    function: Callable[[], Any], least: float = 0.05, most: int = 30, clock: Callable[[], float] = time.perf_counter
) -> float:
    """The lower quartile of repeated calls, after one to warm up: what others do on the machine only adds.

    clock: `time.process_time` for what one thread does alone, so that waiting for a core does not count.
    """
    function()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < least and len(times) < most):
        start = clock()
        function()
        times.append(clock() - start)
    return float(np.quantile(times, 0.25))


def matmul_rate(kind: str) -> float:
    """Best FLOP/s over a sweep of shapes."""
    best = 0.0
    for m, k, n in itertools.product((256, 1024), (256, 1024), (256, 1024)):
        a, b = torch.randn(m, k).to(DTYPES[kind]), torch.randn(n, k).to(DTYPES[kind])
        took = seconds(functools.partial(F.linear, a, b), 0.03, clock=time.process_time)
        best = max(best, 2.0 * m * k * n / took)
    return best


def bandwidth() -> float:
    """Bytes/s of a copy that no cache holds, reading and writing counted."""
    a, b = torch.zeros(2**24), torch.ones(2**24)
    return 2 * 4 * 2**24 / seconds(lambda: a.copy_(b), 0.2, clock=time.process_time)


def small_run(
    shape: tuple[str, int, int, int, int, int], precision: str = "fp32", recompute: str = "none"
) -> config.Run:
    preset, layers, hidden, ffn, sequences, length = shape
    return config.load(
        None,
        [
            f"model.preset={preset}", "model.vocab_size=1024", f"model.layers={layers}", f"model.hidden={hidden}",
            f"model.ffn_hidden={ffn}", "batch.lanes=1", f"batch.size={sequences}", f"batch.sequence_length={length}",
            f"train.precision={precision}", f"layout.recompute={recompute}",
        ],
    )  # fmt: skip


def measure_step(run: config.Run) -> float:
    """Seconds of a training step in one process, without its data and records."""
    mesh = Mesh.alone(torch.device("cpu"))
    replica = Replica(run, build_part(run, mesh), mesh)
    shape = (run.batch.size, run.batch.sequence_length)
    tokens = torch.randint(run.model.vocab_size, shape)
    updates = itertools.count()

    def step() -> None:
        ballot = Ballot(1, torch.device("cpu"))
        replica.reducer.begin(0, 0)
        output = replica.model(tokens, tokens)
        output.loss_sum.backward()
        replica.reducer.end()
        ballot.add(0, output.nll_sum, tokens.numel(), output.expert_counts)
        verdict, chunks = replica.voter.vote(ballot, replica.reducer.finish(), stop=False)
        replica.optimizer.step(chunks, verdict.tokens, 1e-3, next(updates))

    return seconds(step, 0.4, clock=time.process_time)


def fit_rates(runs: Sequence[config.Run], measured: Sequence[float], cluster: Cluster) -> Rates:
    """The rates with which the time model comes nearest to the measured steps of one process."""
    rows = []
    for run in runs:
        model, batch = describe(run.model), run.batch
        choice = Choice(micro=float(batch.size), zero=0)
        time_ = step_time(model, choice, batch.sequence_length, cluster, run.train.precision, UNIT)
        parts = {f.name: float(getattr(time_, f.name)) for f in fields(Time)}
        weights = model.blocks * (model.block_dense + model.block_experts)
        rate = cluster.device.rate(run.train.precision)
        # a row of a product costs as much as `rows` more of them would: 6 FLOPs a weight
        rows.append(
            [
                parts["products"], parts["attention"], parts["pointwise"], parts["head"], parts["optimizer"],
                3.0 * model.blocks, 6.0 * weights / rate, 1.0,
            ]
        )  # fmt: skip
    x = _positive(np.array(rows) / np.array(measured)[:, None])
    product, attention, pointwise, head, update, issue, full, fixed = (max(float(v), 1e-12) for v in x)
    return replace(
        UNIT,
        products=1 / product,
        attention=1 / attention,
        pointwise=1 / pointwise,
        head=1 / head,
        update=update,
        issue=issue,
        rows=full / product * A100_RATE / (cluster.device.rate("fp32") / product),
        fixed=fixed,
    )


def _positive(a: Floats) -> Floats:
    """Non-negative x with a x nearest to 1: coordinate descent, from a start near equal shares. A little of each prior
    (what the device's best rates would give) keeps parts apart that the runs do not tell apart."""
    prior = np.array([1.2, 2.0, 1.5, 1.2, 1.0, 5e-5, 50.0, 5e-4])
    weight = 0.01 / prior
    a = np.concatenate((a, np.diag(weight)))
    b = np.concatenate((np.ones(len(a) - len(prior)), weight * prior))
    x = prior.copy()
    for _ in range(20000):
        for j in range(len(x)):
            column = a[:, j]
            rest = b - a @ x + column * x[j]
            x[j] = max(float(column @ rest / (column @ column)), 0.0)
    return x


def collectives() -> dict[str, Any]:
    """Two processes on this machine, gloo: all-gathers of three sizes, and one under compute."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_talk, args=(folder,), nprocs=2, join=True)
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))
    return found


def _talk(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    times = {}
    for size in (2**10, 2**16, 2**22):
        own, everyone = torch.ones(size), torch.empty(2 * size)
        times[size * 4] = seconds(functools.partial(gather, everyone, own), 0.2)
    a = torch.randn(768, 768)
    alone = seconds(lambda: [a @ a for _ in range(8)], 0.2)

    def under() -> None:
        work = gather(everyone, own, async_op=True)
        for _ in range(8):
            a @ a
        work.wait()

    both = seconds(under, 0.2)
    large = times[4 * 2**22]
    hidden = float(np.clip((alone + large - both) / min(alone, large), 0, 0.95))
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        link = 4 * (2**22 - 2**10) / max(large - times[4 * 2**10], 1e-9)
        text = json.dumps({"seconds": times, "latency": times[4 * 2**10], "link": link, "hidden": hidden})
        (Path(folder) / "found.json").write_text(text, encoding="utf-8")


def probe(cache: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure, store under the cache folder, and return what was found."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    rates = {kind: matmul_rate(kind) for kind in DTYPES}
    say(", ".join(f"products in {kind}: {rate / 1e9:,.0f} GFLOP/s" for kind, rate in rates.items()))
    copies = bandwidth()
    say(f"copies: {copies / 1e9:.1f} GB/s")
    device = Device("this machine", rates, rates, 1e12, copies, 1e9, 1, 1e9, WATTS_PER_CORE)
    cluster = Cluster(device, 1, 1, 1e9, 1e9)
    runs = [small_run(shape) for shape in SHAPES]
    measured = [measure_step(run) for run in runs]
    fitted = fit_rates(runs, measured, cluster)
    predicted = [predict_alone(run, cluster, fitted) for run in runs]
    off = [abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)]
    say(f"{len(runs)} small steps: the time model comes within {np.median(off):.1%} (median) of them")
    talk = collectives()
    say(
        f"two processes: {talk['link'] / 1e9:.2f} GB/s, {talk['latency'] * 1e6:.0f} us; "
        f"{talk['hidden']:.0%} hides under compute"
    )
    found = {
        "matmul": rates,
        "bandwidth": copies,
        "link": talk["link"],
        "latency": talk["latency"],
        "collectives": talk["seconds"],
        "memory": psutil.virtual_memory().total,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "watts_per_core": WATTS_PER_CORE,
        "rates": vars(replace(fitted, hidden_data=talk["hidden"])),
        "steps": [[*shape, m, p] for shape, m, p in zip(SHAPES, measured, predicted, strict=True)],
        "off": float(np.median(off)),
        "took": time.perf_counter() - started,
        "time": time.time(),
    }
    path = probe_path(cache)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1), encoding="utf-8")
    say(f"stored in {path}, after {found['took']:.0f} s")
    return found


def predict_alone(run: config.Run, cluster: Cluster, rates: Rates) -> float:
    """Seconds of a step of one process."""
    count = float(run.batch.lanes * run.batch.microbatches)
    again = RECOMPUTE.index(run.layout.recompute)
    choice = Choice(micro=float(run.batch.size), count=count, recompute=again, zero=0)
    return float(
        step_time(describe(run.model), choice, run.batch.sequence_length, cluster, run.train.precision, rates).total
    )
