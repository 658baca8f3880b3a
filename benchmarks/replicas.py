"""Several processes, one model: our replicas against DDP and FSDP2 at the same global batch.

    python benchmarks/replicas.py                      2 and 4 processes, fp32 and bf16
    python benchmarks/replicas.py --processes 2 --precision fp32 --rounds 20

Every variant trains the same function from the same weights on the same 8 x 256 tokens a step, one lane per process.
"DDP" and "FSDP2" hold the hand-written model of step.py; "DDP, our net" holds our modules, so that it differs from
ours only between backward and the next forward. Times: all variants live in the same processes and take turns; ratios
are medians over rounds. Peak memory: each variant alone in fresh processes, the highest resident set of a rank above
what the process had before the model. The limit: bytes each rank must send in a step (2 (R-1)/R of the gradient) at the
measured copy rate.
"""

import argparse
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from lanewise import config
from lanewise.elastic.launcher import listening_socket
from lanewise.elastic.world import World, local_store
from lanewise.lanes.vote import Ballot
from lanewise.models.build import build
from lanewise.models.init import fill
from lanewise.parallel.layout import Layout
from lanewise.parallel.mesh import Mesh
from lanewise.replica import Replica
from step import plain_from

VOCAB, LENGTH, SEQUENCES, LR, CLIP = 4096, 256, 8, 1e-3, 1.0
VARIANTS = ("DDP", "DDP, our net", "FSDP2", "ours, ZeRO 1", "ours, ZeRO 0")

Step = Callable[[Tensor, Tensor], float]


def settings(processes: int, zero: int, precision: str) -> config.Run:
    sizes = ["model.preset=small-dense", f"model.vocab_size={VOCAB}", f"batch.lanes={processes}"]
    rest = [f"layout.zero={zero}", f"train.precision={precision}", "optimizer.no_decay=[]"]
    return config.load(None, [*sizes, f"batch.sequence_length={LENGTH}", *rest])


class MeanLoss(nn.Module):
    """Our network with the loss that DDP averages: the mean over a rank's tokens."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.inner(tokens, labels).loss_sum / labels.numel()


def peer(variant: str, processes: int, precision: str) -> Step:
    run = settings(processes, 1, precision)
    inner = build(run.model)
    fill(inner, run.train.seed)
    mixed = precision == "bf16"
    autocast = mixed and variant != "FSDP2"
    model: nn.Module = MeanLoss(inner) if "our" in variant else plain_from(inner)
    if variant.startswith("DDP"):
        model = DistributedDataParallel(model)
    else:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(tokens: Tensor, labels: Tensor) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def ours(zero: int, rank: int, processes: int, precision: str) -> Step:
    run = settings(processes, zero, precision)
    world = World(rank, processes, torch.device("cpu"), dist.group.WORLD)
    replica = Replica(run, build(run.model), Mesh(world, Layout()))
    updates = itertools.count()

    def step(tokens: Tensor, labels: Tensor) -> float:
        ballot = Ballot(processes, torch.device("cpu"))
        replica.reducer.begin(rank, 0)
        output = replica.model(tokens, labels)
        output.loss_sum.backward()
        replica.reducer.end()
        ballot.add(rank, output.nll_sum, labels.numel(), None)
        verdict, chunks = replica.voter.vote(ballot, replica.reducer.finish(), stop=False)
        shrink = min(1.0, CLIP / (verdict.gradient_norm + 1e-6))
        replica.optimizer.step(chunks, verdict.tokens / shrink, LR, next(updates))
        return verdict.loss

    return step


def make(variant: str, rank: int, processes: int, precision: str) -> Step:
    if variant.startswith("ours"):
        return ours(int(variant[-1]), rank, processes, precision)
    return peer(variant, processes, precision)


def work(
    rank: int, processes: int, precision: str, names: list[str], rounds: int, port: int, listener: Any, pipe: Any
) -> None:
    torch.set_num_threads(1)
    store = local_store(rank, processes, port, listener)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    generator = torch.Generator().manual_seed(rank)
    text = torch.randint(VOCAB, (SEQUENCES // processes, LENGTH + 1), generator=generator)
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    before = peak_mb()
    steps = {name: make(name, rank, processes, precision) for name in names}
    losses = {name: [step(tokens, labels) for _ in range(3)] for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            losses[name].append(step(tokens, labels))
            dist.barrier()
            times[name].append(time.perf_counter() - start)
    pipe.send((times, peak_mb() - before, {name: values[-1] for name, values in losses.items()}))
    dist.barrier()


def peak_mb() -> float:
    """Highest resident set so far, MB (10^6)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6


def run(
    processes: int, precision: str, names: list[str], rounds: int
) -> list[tuple[dict[str, list[float]], float, dict[str, float]]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lanewise.replica", "torch.distributed.fsdp"])
    listener, port = listening_socket()
    pipes, workers = [], []
    for rank in range(processes):
        ours_end, theirs = context.Pipe(duplex=False)
        given = listener if rank == 0 else None
        worker = context.Process(target=work, args=(rank, processes, precision, names, rounds, port, given, theirs))
        worker.start()
        theirs.close()
        pipes.append(ours_end)
        workers.append(worker)
    listener.close()
    results = [pipe.recv() for pipe in pipes]
    for worker in workers:
        worker.join()
    return results


def copy_rate() -> float:
    """Bytes/s of one large copy in memory: what a byte between two processes of one machine costs at least."""
    source, target = torch.randn(2**24), torch.empty(2**24)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        best = max(best, source.numel() * 4 / (time.perf_counter() - start))
    return best


def measure(processes: int, precision: str, rounds: int) -> None:
    numel = sum(p.numel() for p in build(settings(processes, 1, precision).model).parameters())
    wire = 2 * (processes - 1) / processes * numel * 4
    results = run(processes, precision, list(VARIANTS), rounds)
    times = results[0][0]  # barriers on both sides: every rank measures the same
    # Ours is the mean over all tokens on every rank, a peer's over the rank's own: their mean is comparable.
    losses = {name: statistics.mean(result[2][name] for result in results) for name in VARIANTS}
    print(f"\n{processes} processes, 1 thread each, {numel / 1e6:.1f}M parameters, {precision}, {rounds} rounds")
    print(f"limit: {wire / 1e6:.0f} MB sent per rank and step, {wire / copy_rate() * 1e3:.1f} ms at the copy rate")
    print(
        f"{'':14}{'ms/step':>9}{'tokens/s':>10}{'x DDP':>8}{'x DDP, our net':>16}{'x FSDP2':>9}"
        f"{'peak MB':>9}{'loss':>9}"
    )
    for name in VARIANTS:
        memory = max(result[1] for result in run(processes, precision, [name], 5))
        middle = statistics.median(times[name])
        ratios = [
            statistics.median(p / s for p, s in zip(times[against], times[name], strict=True))
            for against in ("DDP", "DDP, our net", "FSDP2")
        ]
        print(
            f"{name:14}{middle * 1e3:9.1f}{SEQUENCES * LENGTH / middle:10,.0f}"
            f"{ratios[0]:8.2f}{ratios[1]:16.2f}{ratios[2]:9.2f}{memory:9.0f}{losses[name]:9.4f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--precision", choices=["fp32", "bf16"], nargs="*", default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    for precision in arguments.precision:
        for processes in arguments.processes:
            measure(processes, precision, arguments.rounds)


if __name__ == "__main__":
    main()
