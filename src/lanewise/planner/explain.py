"""Why a plan wins, and why others do not."""

from dataclasses import replace

import numpy as np

from lanewise.parallel.layout import Layout
from lanewise.planner.cluster import Cluster
from lanewise.planner.replay import with_replay
from lanewise.planner.search import USABLE, Plan, Space, best_of, explore

SPOKEN = {
    "products": "matrix products", "pointwise": "memory-bound operators", "launches": "waiting for the host",
    "tensor": "tensor-parallel traffic", "expert": "expert traffic", "context": "context-parallel traffic",
    "bubble": "pipeline bubble", "data": "traffic between copies", "correction": "learned correction",
}  # fmt: skip


def against(one: Plan, other: Plan) -> str:
    """Why `one` is faster than `other`, or slower, by the parts that differ most."""
    gains = sorted(((other.time[name] - one.time[name], name) for name in one.time), reverse=True)
    more = [f"{_seconds(gain)} less {SPOKEN.get(name, name)}" for gain, name in gains[:2] if gain > 0.01 * one.step]
    less = [f"{_seconds(-gain)} more {SPOKEN.get(name, name)}" for gain, name in gains[-1:] if -gain > 0.01 * one.step]
    share = other.step / one.step - 1
    start = f"{other.name} is {abs(share):.1%} {'slower' if share >= 0 else 'faster'}"
    reasons = ", ".join(more) + (f", against {less[0]}" if less and more else less[0] if less else "")
    return f"{start}: {one.name} has {reasons}" if reasons else f"{start}: the two differ by less than 1% in every part"


def obvious(space: Space, first: Plan) -> list[str]:
    """What somebody would try without a plan, and what becomes of it."""
    tp = min(space.cluster.per_node, space.model.heads)
    tries = {"replicas alone": Layout(), "tensor parallel in each node": Layout(tp=tp)}
    if space.model.experts:
        tries["experts over all ranks"] = Layout(ep=int(np.gcd(space.cluster.devices, space.model.experts)))
    lines = []
    for title, layout in tries.items():
        if layout == first.layout:
            continue
        plan = best_of(space, layout)
        if plan is None:
            lines.append(f"{title}: the batch or the model does not divide so")
        elif (missing := missing_bytes(space, plan)) > 0:
            lines.append(f"{title}: does not fit by {missing / 1e9:.3g} GB a rank ({largest(plan)})")
        else:
            lines.append(f"{title}: {against(first, with_replay(space, plan))}")
    return lines


def lanes(space: Space, plan: Plan) -> list[str]:
    """What it costs that a replica holds several lanes, where that is much."""
    held = space.run.batch.lanes // plan.replicas if space.run.batch.lanes % plan.replicas == 0 else 1
    if held < 2 or plan.memory["gradients"] < 0.2 * plan.bytes:
        return []
    return [
        f"a replica holds {held} of the {space.run.batch.lanes} lanes, each with a gradient of its own along the "
        f"canonical tree: {plan.memory['gradients'] / 1e9:.3g} GB; fewer lanes (batch.lanes) take less, and allow "
        f"fewer replicas"
    ]


def missing_bytes(space: Space, plan: Plan) -> float:
    return plan.bytes - space.cluster.device.memory * USABLE


def largest(plan: Plan) -> str:
    name = max(plan.memory, key=lambda part: plan.memory[part])
    return f"{name} alone {plan.memory[name] / 1e9:.3g} GB"


def nothing_fits(space: Space) -> str:
    """By how much, and the nearest change that would help."""
    if not space.size:
        batch = space.run.batch
        return (
            f"no layout divides {space.cluster.devices} devices for {batch.sequences} sequences a step "
            f"(batch.lanes x microbatches x size): make it a multiple of the devices, or use fewer devices"
        )
    smallest = float(np.min(space.memory.total))
    usable = space.cluster.device.memory * USABLE
    start = (
        f"no layout fits: the smallest of {space.size} takes {smallest / 1e9:.3g} GB a rank, with recomputation and "
        f"the smallest microbatch, and a {space.cluster.device.name} has {usable / 1e9:.3g} GB to use, "
        f"{(smallest - usable) / 1e9:.3g} GB too little"
    )
    return f"{start}: {_remedy(space)}"


def _remedy(space: Space) -> str:
    for factor in (2, 4, 8, 16, 32, 64):
        cluster: Cluster = replace(space.cluster, nodes=space.cluster.nodes * factor)
        if explore(space.run, space.where._replace(cluster=cluster), space.model.vocab).fits.any():
            return f"{cluster.devices} devices would do"
    length = space.run.batch.sequence_length
    while length > 256:
        length //= 2
        run = space.run.model_copy(update={"batch": space.run.batch.model_copy(update={"sequence_length": length})})
        if explore(run, space.where, space.model.vocab).fits.any():
            return f"batch.sequence_length={length} would do"
    return "a smaller model or devices with more memory are needed"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
