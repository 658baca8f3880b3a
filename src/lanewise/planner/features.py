"""What the learned correction sees of a run: shares of the analytic time, sizes, scale, device. No names."""

import numpy as np

from lanewise.planner.choice import Choice, Floats, Number
from lanewise.planner.cluster import Cluster
from lanewise.planner.cost import Time
from lanewise.planner.model import Transformer

SHARES = (
    "products", "attention", "pointwise", "launches", "recompute", "head", "tensor", "expert", "context", "bubble",
    "data",
)  # fmt: skip
TOLD = ("activation_ckpt", "zero_stage", "micro_batch")  # cells whose absence says something


def features(
    model: Transformer,
    choice: Choice,
    sequence: int,
    cluster: Cluster,
    precision: str,
    time: Time,
    told: frozenset[str] = frozenset(TOLD),
) -> Floats:
    """[n, F], each scaled so that a difference of 1 is a marked one. n: choices (1 for a choice of numbers)."""
    c, device = choice, cluster.device
    tokens = c.micro * sequence / c.cp
    total = time.total
    rate = device.rate("bf16")
    columns: list[Number] = [2 * np.sqrt(np.maximum(getattr(time, name), 0) / total) for name in SHARES]
    columns += [
        np.log(model.hidden) / 0.8,
        np.log(sequence) / 0.8,
        np.log(tokens),
        np.log(tokens * model.hidden / c.tp) / 1.2,
        np.log(c.ranks) / 2,
        np.log(c.tp) / 0.8,
        np.log(c.pp) / 1.2,
        np.log(c.data) / 2,
        np.log(c.cp),
        np.log(c.ep) / 2,
        np.log(c.chunks),
        np.log(c.count) / 2,
        np.log(model.parameters) / 2,
        np.log(max(model.experts, 1)) / 2,
        float(model.experts > 0),
        np.log(1 + model.top_k),
        1.0 * (np.asarray(c.fsdp) > 1),
        1.0 * (np.asarray(c.recompute) == 2),
        1.0 * (np.asarray(c.recompute) == 1),
        *(float(name not in told) for name in TOLD),
        *(float(precision == kind) for kind in ("fp16", "fp8", "fp4")),
        np.log(rate / 1e12) / 0.7,
        np.log(device.bandwidth / 1e12) / 0.6,
        np.log(rate / device.power / 1e12) / 0.5,
        np.log(device.memory / 1e9) / 0.5,
        float(device.domain > 8),
        float(model.matrices == 2),
        model.kv_heads / model.heads,
        float(device.domain > 72),
    ]
    return np.stack(
        np.broadcast_arrays(*(np.atleast_1d(np.asarray(column, dtype=float)) for column in columns)), axis=-1
    )
