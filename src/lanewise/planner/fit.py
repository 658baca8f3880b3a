"""The time model's rates for a machine, from the steps that were measured on it.

Both fits are least squares on relative errors in which nothing is negative. A little of a prior keeps apart what the
runs do not tell apart.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from lanewise.config import Run
from lanewise.parallel.layout import Layout
from lanewise.planner.choice import Floats
from lanewise.planner.cluster import Cluster
from lanewise.planner.cost import A100_RATE, STORED, Rates, Time
from lanewise.planner.machine import LOCAL, Where
from lanewise.planner.memory import Engine
from lanewise.planner.search import Space, fixed
from lanewise.planner.traffic import Costs, traffic

UNIT = Rates(
    rows=0.0, launch=0.0, launch_routed=0.0, scores=0.0, products=1.0, attention=1.0, pointwise=1.0, head=1.0, link=1.0,
    network=1.0, hidden_tensor=0.0, hidden_expert=0.0, hidden_data=0.0, seen=1.0, bubble=1.0, uneven=1.0, jitter=0.0,
    fixed=0.0, added=12.0,  # read, read and written, in fp32
)  # fmt: skip
# Usual: factors on products, attention (measured instead), pointwise, head and optimizer, seconds of a
# block and of its routing, rows that every product costs beyond its own, seconds of a step.
PRIOR = (1.2, 2.0, 1.5, 1.2, 1.0, 5e-5, 1e-4, 50.0, 5e-4)
DEAREST = (1e-9, 5e-4)  # prior seconds of a byte and of a call
FREE: Costs = dict.fromkeys(("tensor", "context", "expert", "sharded", "copies", "stages"), (0.0, 0.0))
AXES = {"tp": "tensor", "cp": "context", "ep": "expert", "fsdp": "sharded", "pp": "stages", "replica": "copies"}


def fit_alone(
    runs: Sequence[Run], measured: Sequence[float], cluster: Cluster, attention: Mapping[str, float]
) -> Rates:
    """The rates with which the time model comes nearest to the measured steps of one process. attention: FLOP/s of it
    alone, by precision."""
    precision = runs[0].train.precision
    rate = cluster.device.rate(precision)
    prior = np.array(PRIOR)
    prior[1] = rate / attention[precision]
    rows = []
    for run in runs:
        space = space_of(run, cluster, UNIT)
        model, time = space.model, space.time(space.choice)
        parts = {f.name: float(np.atleast_1d(getattr(time, f.name))[0]) for f in fields(Time)}
        passes = float(space.choice.count[0]) * model.blocks
        rows.append(
            [
                *(parts[name] for name in ("products", "attention", "pointwise", "head", "optimizer")),
                3.0 * passes, 3.0 * passes * model.routed_layers / model.layers,
                # a row of a product costs as much as `rows` more of them would: 6 FLOPs a weight
                6.0 * passes * (model.block_dense + model.block_experts) / rate, 1.0,
            ]
        )  # fmt: skip
    found = _positive(np.array(rows), np.array(measured), prior, np.array(measured), 0.01)
    product, scores, pointwise, head, update, issue, routed, full, once = (max(float(v), 1e-12) for v in found)
    return replace(
        UNIT,
        products=1 / product,
        attention=1 / scores,
        pointwise=1 / pointwise,
        head=1 / head,
        update=update,
        issue=issue,
        issue_routed=routed,
        rows=full / product * A100_RATE / (rate / product),
        fixed=once,
    )


def fit_traffic(runs: Sequence[Run], measured: Sequence[float], cluster: Cluster, rates: Rates) -> Costs:
    """What bytes and calls cost, from steps of runs that each have one axis of the mesh above 1, or two replicas."""
    took: dict[str, list[tuple[Run, float]]] = defaultdict(list)
    for run, seconds in zip(runs, measured, strict=True):
        layout = Layout.parse(run.layout.axes)
        took[next((AXES[axis] for axis, degree in layout.degrees.items() if degree > 1), "copies")].append(
            (run, seconds)
        )
    costs = dict(FREE)
    for axis in sorted(took, key=lambda axis: axis != "copies"):  # ranks of cp and ep are copies of one another too
        rows = []
        for run, seconds in took[axis]:
            space = space_of(run, cluster, replace(rates, costs=costs))
            alone = float(np.atleast_1d(space.time(space.choice).total)[0])
            found = traffic(space.model, space.choice, run.batch.sequence_length, STORED[run.train.precision])[axis]
            rows.append((float(found.sent[0]), float(found.calls[0]), seconds - alone, seconds))
        sent, calls, exposed, whole = np.array(rows).T
        # relative to the whole step: what counts is how far that is off
        byte, call = _positive(np.stack((sent, calls), -1), exposed, np.array(DEAREST), whole, 0.001)
        costs[axis] = (float(byte), float(call))
    return costs


def space_of(run: Run, cluster: Cluster, rates: Rates, engine: Engine = LOCAL) -> Space:
    """The one candidate that is the run itself."""
    return fixed(run, Where(cluster, engine, rates), getattr(run.layout, "schedule", "1f1b"), 1)


def predict(run: Run, cluster: Cluster, rates: Rates) -> float:
    """Seconds of a step, nothing learned in it."""
    space = space_of(run, cluster, rates)
    return float(np.atleast_1d(space.time(space.choice).total)[0])


def _positive(a: Floats, b: Floats, prior: Floats, scale: Floats, pull: float) -> Any:
    """Non-negative x with (a x - b) / scale least, drawn a little to `prior`, by `pull`: coordinate descent."""
    weight = pull / prior
    a = np.concatenate((a / scale[:, None], np.diag(weight)))
    b = np.concatenate((b / scale, weight * prior))
    x = prior.copy()
    for _ in range(20000):
        for j in range(len(x)):
            column = a[:, j]
            rest = b - a @ x + column * x[j]
            x[j] = max(float(column @ rest / (column @ column)), 0.0)
    return x
