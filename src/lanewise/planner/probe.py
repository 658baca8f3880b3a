"""Measure this machine in a minute: products, copies, whole small steps, and ranks that talk to each other.

What the time model multiplies is fitted to the measured steps (`fit`), so that a prediction for this machine rests on
this machine alone. Under a launcher (torchrun, Slurm, MPI) the link between nodes is measured too.
"""

import functools
import itertools
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F

from lanewise import config
from lanewise.elastic.environment import Place
from lanewise.elastic.world import World, connect, store_of
from lanewise.planner.cluster import Cluster
from lanewise.planner.fit import fit_alone, fit_traffic, predict
from lanewise.planner.hardware import Device
from lanewise.planner.machine import probe_path
from lanewise.planner.resident import holes
from lanewise.planner.steps import alone, on_two, step_seconds

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WATTS_PER_CORE = 10.0  # of a server's processor, by data sheets: 200 to 400 W for 24 to 48 cores
DENSE = (  # layers, hidden, feed-forward, sequences, length, lanes
    (2, 256, 768, 4, 128, 1), (6, 256, 768, 4, 128, 1), (2, 256, 768, 8, 256, 1), (2, 512, 1536, 4, 128, 1),
    (2, 256, 768, 1, 1024, 1), (4, 128, 384, 2, 64, 1), (2, 384, 1024, 1, 64, 1), (8, 192, 576, 2, 128, 1),
    (1, 256, 768, 2, 512, 1), (4, 384, 1024, 1, 64, 4),
)  # fmt: skip
ROUTED = (  # the same with experts: layers, hidden, feed-forward of an expert, sequences, length, lanes, experts
    (4, 256, 192, 4, 128, 1, 8), (4, 256, 192, 1, 64, 2, 8), (2, 256, 192, 2, 512, 1, 8), (3, 384, 256, 2, 128, 2, 16),
    (6, 128, 96, 2, 128, 1, 8),
)  # fmt: skip
SPREAD = ((2, 256, 768, 4, 128, 2), (3, 256, 768, 4, 64, 2), (2, 384, 1152, 4, 128, 2))  # on two ranks, each axis alone
AXES = ("", "tp2", "pp2", "cp2", "fsdp2")
SPREAD_ROUTED = ((3, 256, 192, 4, 128, 2, 8), (2, 384, 256, 2, 256, 2, 8))
# Memory: one microbatch, several, recomputed, and next to nothing; shape, axes, recompute.
HELD = (
    ((4, 256, 768, 8, 256, 1),), ((4, 256, 768, 8, 256, 4),), ((4, 256, 768, 8, 256, 4), "", "full"),
    ((1, 64, 128, 1, 32, 1),),
)  # fmt: skip


def dense(shape: Sequence[int], axes: str = "", recompute: str = "none") -> config.Run:
    """A small run without experts: layers, hidden, feed-forward, sequences, length, lanes."""
    return _run(shape, {"preset": "tiny-dense", "ffn_hidden": shape[2], "kv_heads": 2}, axes, recompute)


def routed(shape: Sequence[int], axes: str = "") -> config.Run:
    """The same with experts: the last number is how many."""
    model = {"preset": "tiny", "ffn_hidden": 3 * shape[1], "expert_hidden": shape[2], "experts": shape[6]}
    return _run(shape, model, axes, "none")


def _run(shape: Sequence[int], model: dict[str, Any], axes: str, recompute: str) -> config.Run:
    """On GPUs in bf16 and wider and longer: small models leave them idle."""
    gpu = torch.cuda.is_available()
    layers, hidden, _, sequences, length, lanes = shape[:6]
    model = {**model, "layers": layers, "hidden": hidden, "vocab_size": 1024, "heads": 4}
    if gpu:
        widths = ("hidden", "ffn_hidden", "expert_hidden", "vocab_size", "heads", "kv_heads")
        model |= {key: 8 * model[key] for key in widths if key in model}
    words = [f"model.{key}={json.dumps(value)}" for key, value in model.items()]
    words += [f"batch.lanes={lanes}", f"batch.size={sequences}", f"batch.sequence_length={length * (4 if gpu else 1)}"]
    words += [f'layout.axes="{axes}"', f"layout.recompute={recompute}", f"train.precision={'bf16' if gpu else 'fp32'}"]
    return config.load(None, words)


def seconds(function: Callable[[], Any], times: int, device: torch.device) -> float:
    """The lower quartile of so many calls, after one to warm up: what others do on the machine only adds. The number is
    given, so that ranks which talk to each other make equally many."""
    took = []
    for _ in range(times + 1):
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
    return float(np.quantile(took[1:], 0.25))


def matmul_rate(kind: str, device: torch.device) -> float:
    """Best FLOP/s over a sweep of shapes."""
    best, sides = 0.0, (256, 1024) if device.type == "cpu" else (1024, 8192)
    for m, k, n in itertools.product(sides, sides, sides):
        a, b = torch.randn(m, k, device=device).to(DTYPES[kind]), torch.randn(n, k, device=device).to(DTYPES[kind])
        took = seconds(functools.partial(F.linear, a, b), 20, device)
        best = max(best, 2.0 * m * k * n / took)
    return best


def attention_rate(kind: str, device: torch.device) -> float:
    """Best FLOP/s of causal attention, forward, over a sweep of lengths; a causal mask leaves half of the scores."""
    best, heads, width = 0.0, 4 if device.type == "cpu" else 32, 64
    for length in (128, 512, 1024) if device.type == "cpu" else (1024, 4096, 8192):
        q, k, v = (torch.randn(1, heads, length, width, device=device).to(DTYPES[kind]) for _ in range(3))
        took = seconds(functools.partial(F.scaled_dot_product_attention, q, k, v, is_causal=True), 10, device)
        best = max(best, 2.0 * heads * width * length**2 / took)
    return best


def bandwidth(device: torch.device) -> float:
    """Bytes/s of a copy that no cache holds, reading and writing counted."""
    a, b = torch.zeros(2**24, device=device), torch.ones(2**24, device=device)
    return 2 * 4 * 2**24 / seconds(lambda: a.copy_(b), 15, device)


def collectives(group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """Two ranks: all-gathers of three sizes, and one under compute. link: bytes/s one way; latency: seconds."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    took = {}
    for size, times in ((2**10, 50), (2**16, 50), (2**22, 8)):
        own, everyone = torch.ones(size, device=device), torch.empty(2 * size, device=device)
        took[size * 4] = seconds(functools.partial(gather, everyone, own, group=group), times, device)
    a = torch.randn(768, 768, device=device)
    alone = seconds(lambda: [a @ a for _ in range(8)], 8, device)

    def under() -> None:
        work = gather(everyone, own, group=group, async_op=True)
        for _ in range(8):
            a @ a
        work.wait()

    both = seconds(under, 8, device)
    large, small = took[4 * 2**22], took[4 * 2**10]
    return {
        "seconds": took,
        "latency": small,
        "link": 4 * (2**22 - 2**10) / max(large - small, 1e-9),
        "hidden": float(np.clip((alone + large - both) / min(alone, large), 0, 0.95)),
    }


def spread() -> list[config.Run]:
    return [dense(shape, axes) for shape in SPREAD for axes in AXES] + [routed(s, "ep2") for s in SPREAD_ROUTED]


def _talk(world: World) -> dict[str, Any]:
    assert world.group is not None
    return collectives(world.group, world.device)


def _launched(place: Place) -> tuple[World, dict[str, Any] | None]:
    """This rank's world of the launcher, and what two ranks of two nodes find; None if there is one node."""
    world = connect(place.rank, place.world, place.local_rank, store_of(place), threads=1, deterministic=False)
    hosts = world.gather(f"{socket.gethostname()} {place.rank - place.local_rank}")
    other = next((rank for rank, host in enumerate(hosts) if host != hosts[0]), None)
    if other is None:
        return world, None
    group = dist.new_group([0, other], timeout=timedelta(minutes=10))
    found = collectives(group, world.device) if world.rank in (0, other) else None
    return world, {**found, "per_node": hosts.count(hosts[0]), "nodes": len(set(hosts))} if found else None


def probe(cache: str, say: Callable[[str], None], place: Place | None = None) -> dict[str, Any] | None:
    """Measure, store under the cache folder, and return what was found: on the launcher's first rank, or alone. None:
    on any other rank."""
    started = time.perf_counter()
    world, between = _launched(place) if place is not None else (None, None)
    if world is not None and world.group is not None:
        dist.barrier()
        dist.destroy_process_group()
        if world.rank > 0:
            return None
    device = alone().device
    rates = {kind: matmul_rate(kind, device) for kind in DTYPES}
    say(", ".join(f"products in {kind}: {rate / 1e9:,.0f} GFLOP/s" for kind, rate in rates.items()))
    copies = bandwidth(device)
    attention = {kind: attention_rate(kind, device) for kind in DTYPES}
    say(f"copies: {copies / 1e9:.1f} GB/s; attention in fp32: {attention['fp32'] / 1e9:,.0f} GFLOP/s")
    this = Device("this machine", rates, rates, 1e12, copies, 1e9, 2, 1e9, WATTS_PER_CORE)
    runs = [dense(shape) for shape in DENSE] + [routed(shape) for shape in ROUTED]
    measured = step_seconds(runs, alone())
    one = Cluster(this, 1, 1, 1e9, 1e9)
    fitted = fit_alone(runs, measured, one, attention)
    off = [abs(predict(run, one, fitted) / m - 1) for run, m in zip(runs, measured, strict=True)]
    say(f"{len(runs)} small steps: the time model comes within {np.median(off):.1%} (median) of them")
    talk: dict[str, Any] = {"seconds": {}, "latency": 0.0, "link": copies, "hidden": 0.0}
    together: list[float] = []
    if device.type == "cpu" or torch.cuda.device_count() > 1:
        together, talk = on_two(spread(), _talk)
        two = Cluster(this, 1, 2, 1e9, 1e9)
        fitted = replace(fitted, costs=fit_traffic(spread(), together, two, fitted))
        off_two = [abs(predict(run, two, fitted) / m - 1) for run, m in zip(spread(), together, strict=True)]
        say(
            f"two processes: {talk['link'] / 1e9:.2f} GB/s, {talk['latency'] * 1e6:.0f} us; {talk['hidden']:.0%} hides "
            f"under compute; {len(off_two)} small steps over each axis: within {np.median(off_two):.1%}"
        )
    base, lost = 0.0, [0.0] * 3
    if device.type == "cpu":
        base, lost = holes([dense(*case) for case in HELD], one)
        say(f"a process: {base / 1e6:.0f} MB; of activations {', '.join(f'{s:.0%}' for s in lost)} more in holes")
    if between is not None:
        say(f"two nodes: {between['link'] / 1e9:.2f} GB/s, {between['latency'] * 1e6:.0f} us")
    found = {
        "device": device.type,
        "matmul": rates,
        "attention": attention,
        "bandwidth": copies,
        "link": talk["link"],
        "latency": talk["latency"],
        "collectives": talk["seconds"],
        "between": between,
        "memory": _memory(device),
        "resident": {"base": base, "holes": lost},
        "cores": _ranks(device),
        "watts_per_core": WATTS_PER_CORE,
        "rates": vars(replace(fitted, hidden_data=talk["hidden"])),
        "steps": measured,
        "steps_of_two": together,
        "off": float(np.median(off)),
        "took": time.perf_counter() - started,
        "time": time.time(),
    }
    path = probe_path(cache)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1), encoding="utf-8")
    say(f"stored in {path}, after {found['took']:.0f} s")
    return found


def _memory(device: torch.device) -> int:
    """Bytes of all ranks that this machine can have."""
    if device.type == "cuda":
        return sum(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
    return int(psutil.virtual_memory().total)


def _ranks(device: torch.device) -> int:
    """Ranks that this machine can have at full speed."""
    if device.type == "cuda":
        return torch.cuda.device_count()
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
