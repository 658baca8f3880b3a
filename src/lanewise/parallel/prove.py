"""Does a layout compute what one process computes? Measured, number by number, for a given model."""

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lanewise.checkpoint.store import Checkpoints
from lanewise.config import Run
from lanewise.elastic.world import World
from lanewise.errors import EXIT_DONE, EXIT_FAILED
from lanewise.models.build import build
from lanewise.parallel.build import build_part
from lanewise.parallel.layout import Layout
from lanewise.parallel.mesh import Mesh
from lanewise.parallel.stages import turns_back
from lanewise.parallel.trace import STEPS, MadeUp, Trace, assembled, reference, trace
from lanewise.replica import Replica

# Sums of fp32 numbers in another order. Measured on both families in every layout: at most 6e-6. A sum that is missing,
# or made twice, is off by 1e-2 and more in the parameters it belongs to.
TOLERANCE = 5e-5
# Adam divides a gradient by its own size: where that is tiny, its rounding weighs as much as itself elsewhere.
AFTER_STEPS = 5e-4
# Scores of experts lie in (0, 1) and differ by about 1e-6 after three steps of differently rounded sums.
MARGIN, DRAWS = 2e-5, 12
EXACT = ("pp",)  # besides replicas: these axes may change no bit


@dataclass(frozen=True)
class Finding:
    """what: 'gradient of norm', ...; error: the worst, of `worst`; None if a comparison of bits found no difference."""

    what: str
    error: float
    worst: str
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance  # False for NaN


@dataclass(frozen=True)
class Proof:
    """What a prove worker is asked to do (see `lanewise.worker`)."""

    run: Run
    layout: Layout
    as_json: bool

    def work(self, world: World, _status: Any, _stop: Any) -> int:
        findings = prove(self.run, self.layout, world)
        if world.rank == 0:
            show(findings, self.layout, world.size, self.as_json)
        verdict = torch.tensor([float(all(f.passed for f in findings))])
        if world.side is not None:
            dist.broadcast(verdict, 0, group=world.side)
        return EXIT_DONE if verdict.item() else EXIT_FAILED


def prove(run: Run, layout: Layout, world: World) -> list[Finding]:
    """All ranks call it; the findings are on the first."""
    right, data = _decided(run, world)
    mesh = Mesh(world, layout, turns_back(run.layout))
    found, replica = trace(run, mesh, data)
    base = Layout(**{axis: 1 if axis in EXACT else degree for axis, degree in layout.degrees.items()})
    simpler = None if base.size == world.size else _traced_on_fewer(run, base, world, data)
    round_trip = _saved_and_loaded(run, replica)
    if found is None or right is None:
        return []
    kinds: dict[str, str] = {spec.name: spec.kind for spec in build(run.model).table()}
    findings = [
        _worst("loss of each step", _numbers(found.losses, right.losses)),
        _worst("gradient norm of each step", _numbers(found.norms, right.norms)),
        _worst("held-out loss", _numbers([found.held_out], [right.held_out])),
    ]
    trained = {name: kind for name, kind in kinds.items() if name in right.gradients}
    for kind in dict.fromkeys(trained.values()):
        names = [name for name in trained if trained[name] == kind]
        findings.append(_worst(f"gradient of {kind}", {n: _error(found.gradients, right.gradients, n) for n in names}))
    for kind in dict.fromkeys(kinds.values()):
        names = [f"model/{name}" for name in kinds if kinds[name] == kind]
        errors = {name: _error(found.weights, right.weights, name) for name in names}
        findings.append(_worst(f"{kind} after {STEPS} steps", errors, AFTER_STEPS))
    findings.append(_exact("state after saving and loading in other layouts", found.weights, round_trip))
    if simpler is not None:
        what = f"bits of {base}, one replica" if base.size > 1 else "bits of one rank"
        findings.append(_exact(what, _all(found), _all(simpler)))
    return findings


def _decided(run: Run, world: World) -> tuple[Trace | None, MadeUp]:
    """What is right (on the first rank), and data in which no choice of experts hangs on the rounding of its scores:
    there a layout that is right would compute another function."""
    right, best = None, 0
    if world.rank == 0:
        for draw in range(DRAWS):
            found = reference(run, MadeUp(run, draw))
            if right is None or found.margin > right.margin:
                right, best = found, draw
            if right.margin > MARGIN:
                break
    shared = torch.tensor([best])
    if world.side is not None:
        dist.broadcast(shared, 0, group=world.side)
    return right, MadeUp(run, int(shared))


def _traced_on_fewer(run: Run, layout: Layout, world: World, data: MadeUp) -> Trace | None:
    """The trace of one replica of `layout` on the first ranks of the world, on the first of them."""
    ranks = list(range(layout.size))
    if world.rank not in ranks:
        return None
    group = None if len(ranks) == 1 else dist.new_group(ranks, use_local_synchronization=True)
    return trace(run, Mesh(World(world.rank, layout.size, world.device, group), layout), data)[0]


def _saved_and_loaded(run: Run, replica: Replica) -> dict[str, Tensor]:
    """The state after: saved in this layout, loaded by one process, saved by that, and loaded in this layout again."""
    world = replica.mesh.world
    with tempfile.TemporaryDirectory() as folder:
        shared: list[Any] = [folder]
        if world.side is not None:
            dist.broadcast_object_list(shared, 0, group=world.side)

        def checkpoints(name: str, group: dist.ProcessGroup | None) -> Checkpoints:
            return Checkpoints(Path(shared[0]) / name, keep=1, background=False, group=group, alarm=_alarm)

        here = checkpoints("here", world.side)
        here.save(1, replica.state(share=True), {})
        if world.rank == 0:
            alone = Mesh.alone(world.device)
            whole = Replica(run, build_part(run, alone), alone)
            _load(checkpoints("here", None), whole)
            checkpoints("alone", None).save(1, whole.state(share=True), {})
        if world.side is not None:
            dist.barrier(world.side)
        again = Replica(run, build_part(run, replica.mesh), replica.mesh)
        _load(checkpoints("alone", world.side), again)
        state = assembled(again.state(share=True).items(), replica.mesh)
        if world.side is not None:
            dist.barrier(world.side)
    return state


def _load(checkpoints: Checkpoints, replica: Replica) -> None:
    found = checkpoints.find()
    assert found is not None
    checkpoints.load(found, replica.state(share=False))
    replica.loaded()


def _alarm(event: str, details: dict[str, Any]) -> None:
    raise RuntimeError(f"{event}: {details}")


# ------------------------------------------------------------------------------------------------------ comparing


def _error(found: dict[str, Tensor], right: dict[str, Tensor], name: str) -> float:
    """Largest difference relative to the tensor's largest element."""
    a, b = found[name].double(), right[name].double()
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item()


def _numbers(found: list[float], right: list[float]) -> dict[str, float]:
    return {f"number {i}": abs(a - b) / abs(b) for i, (a, b) in enumerate(zip(found, right, strict=True), 1)}


def _worst(what: str, errors: dict[str, float], tolerance: float = TOLERANCE) -> Finding:
    name = max(errors, key=lambda name: float("inf") if errors[name] != errors[name] else errors[name])
    return Finding(what, errors[name], name, tolerance)


def _all(trace: Trace) -> dict[str, Tensor]:
    numbers = torch.tensor([*trace.losses, *trace.norms, trace.held_out], dtype=torch.float64)
    return {"losses and norms": numbers, **{f"gradient {n}": g for n, g in trace.gradients.items()}, **trace.weights}


def _exact(what: str, found: dict[str, Tensor], right: dict[str, Tensor]) -> Finding:
    """The first tensor that differs in a bit; its error is infinite if it has no size to compare."""
    assert found.keys() == right.keys()
    for name in sorted(found):
        if not torch.equal(found[name], right[name]):
            return Finding(what, _error(found, right, name) or float("inf"), name, 0.0)
    return Finding(what, 0.0, "", 0.0)


def show(findings: list[Finding], layout: Layout, workers: int, as_json: bool) -> None:
    passed = all(f.passed for f in findings)
    replicas = layout.replicas(workers)
    if as_json:
        rows = [{**asdict(f), "passed": f.passed} for f in findings]
        print(json.dumps({"layout": str(layout), "replicas": replicas, "passed": passed, "findings": rows}))
        return
    print(f"{'':52} {'worst error':>11} {'tolerance':>9}")
    for f in findings:
        mark = "ok" if f.passed else "WRONG"
        of = f"  {f.worst}" if f.worst and not f.worst.startswith("number") else ""
        print(f"{f.what:52} {f.error:11.1e} {f.tolerance:9.0e}  {mark}{of}")
    print("errors are relative to a tensor's largest element; the reference is one process in fp32, plain PyTorch")
    print(
        f"tolerances: {TOLERANCE:.0e}, fp32 sums in another order; {AFTER_STEPS:.0e}, the same after Adam has divided "
        "gradients by their size; 0, the same bits are promised"
    )
    what = f"layout {str(layout) or 'of one rank'}, {replicas} replica{'s' * (replicas > 1)}"
    first = next((f for f in findings if not f.passed), None)
    print(f"{what}: " + ("proven" if first is None else f"WRONG, first in {f'{first.what} ({first.worst})'}"))
