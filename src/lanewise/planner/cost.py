"""Step time, as a waterfall of parts that add up. Elementwise: a choice of arrays gives arrays.

First principles and a handful of constants (`Rates`, fitted once to measured runs: `benchmarks/planner.py --fit`);
what they miss, the learned correction adds as a part of its own.
"""

import tomllib
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

import numpy as np

from lanewise.planner.choice import SCHEDULES, Choice, Number
from lanewise.planner.cluster import Cluster
from lanewise.planner.model import Transformer

STORED = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 2.0, "fp4": 2.0}  # bytes an element that travels
ZERO_BUBBLE = [SCHEDULES.index(name) for name in ("interleaved-zb", "zbv", "dualpipev")]
A100_RATE = 271e12


@dataclass(frozen=True)
class Rates:
    """Constants of software and machines, none of them tied to a model or cluster.

    rows: of a product at which an A100 runs at half its rate; faster devices need more, in proportion. launch: seconds
    of host time to issue one block's forward. scores: passes over the scores in memory of an unfused attention (0:
    fused). Shares: of the rate or bandwidth attained; hidden: of communication that lies under compute.
    """

    rows: float
    launch: float
    launch_routed: float
    scores: float
    products: float
    attention: float
    pointwise: float
    head: float
    link: float
    network: float
    hidden_tensor: float
    hidden_expert: float
    hidden_data: float
    seen: float  # of traffic between copies, at least, is not hidden
    bubble: float
    uneven: float
    jitter: float  # of the step, for each doubling of nodes: the slowest of many sets the pace
    fixed: float  # seconds a step


@dataclass(frozen=True)
class Time:
    """Seconds of a step, by part. launches: waiting for the host; pipeline: bubble and hand-over between stages."""

    products: Number
    attention: Number
    pointwise: Number
    launches: Number
    recompute: Number
    head: Number
    tensor: Number
    expert: Number
    context: Number
    bubble: Number
    data: Number
    optimizer: Number
    jitter: Number

    @property
    def total(self) -> Number:
        return sum(getattr(self, f.name) for f in fields(self))

    @property
    def exposed(self) -> Number:
        """Communication that no compute hides."""
        return self.tensor + self.expert + self.context + self.data


def ring(bytes_: Number, size: Number, stride: Number, cluster: Cluster, rates: Rates) -> Number:
    """Seconds to all-gather (or reduce-scatter) `bytes_` in all among `size` ranks that lie `stride` apart.

    Within a node a ring; between nodes the faster of ring and tree, hierarchical: what a node needs comes in once, over
    the links of all its ranks.
    """
    inside = np.clip(cluster.fast / stride, 1, size)  # of them in one node
    nodes = np.maximum(size / inside, 1)
    within = bytes_ * (inside - 1) / inside / (cluster.link * rates.link)
    between = bytes_ * (nodes - 1) / nodes * _over(size * stride, cluster) / (cluster.inter * rates.network * inside)
    hops = np.minimum(nodes - 1, 2 * np.log2(np.maximum(nodes, 2)))  # a ring's, or a tree's
    wait = (inside - 1) * cluster.latency[0] / 4 + np.where(nodes > 1, hops * cluster.latency[1] / 2, 0)
    return np.where(size > 1, np.where(nodes > 1, np.maximum(within, between), within) + wait, 0.0)


def exchange(bytes_: Number, size: Number, cluster: Cluster, rates: Rates) -> Number:
    """Seconds of an all-to-all among `size` neighbours in which each sends `bytes_` in all."""
    inside = np.clip(cluster.fast, 1, size)
    within = bytes_ * (inside - 1) / size / (cluster.link * rates.link)
    between = bytes_ * (1 - inside / size) * _over(size, cluster) / (cluster.inter * rates.network)
    return np.where(size > 1, np.maximum(within, between) + cluster.latency[1] * np.log2(np.maximum(size, 2)), 0.0)


def _over(span: Number, cluster: Cluster) -> Number:
    pod = (cluster.pod_nodes or np.inf) * cluster.per_node
    return np.where(span > pod, cluster.oversubscription, 1.0)


def step_time(
    model: Transformer,
    choice: Choice,
    sequence: int,
    cluster: Cluster,
    precision: str = "bf16",
    rates: Rates | None = None,
) -> Time:
    """rates: default, those of the precision."""
    rates = rates or rates_for(precision)
    device, c = cluster.device, choice
    rate, bandwidth = device.rate(precision) * rates.products, device.bandwidth * rates.pointwise
    wide = device.rate("fp16" if precision == "fp16" else "bf16")
    tokens = c.micro * sequence / c.cp  # of a microbatch on one rank
    H, tp = model.hidden, c.tp
    routed = model.routed_layers / model.layers
    full_rows = rates.rows * rate / A100_RATE

    def product(rows: Number, weights: Number) -> Number:
        """Seconds of a product of `rows` with `weights` elements, which are read from memory at least once."""
        return 2.0 * weights * (rows + full_rows) / rate + 2.0 * weights / bandwidth

    # one block, one microbatch, forward
    attention_weights = model.attention
    ffn_weights = (1 - routed) * model.dense_ffn + routed * model.shared * model.expert + model.extra_active
    products = product(tokens, (attention_weights + ffn_weights) / tp)
    if model.experts:
        local = np.maximum(model.experts / c.ep, 1)
        rows = tokens / tp * model.top_k * c.expert_tp / local  # of one expert: every rank's share meets here
        products = products + routed * local * product(rows, model.expert / c.expert_tp)
    attention = tokens * model.attention_flops(sequence) / tp / (wide * rates.attention)
    attention = attention + tokens * sequence * model.heads / tp * 2.0 * rates.scores / bandwidth
    moved = 12 * H + 3 * (model.heads * model.head_dim) + (1 - routed) * model.matrices * model.ffn
    moved = moved + routed * (3 * model.expert_ffn * (model.top_k + model.shared) + 6 * model.top_k * H)
    pointwise = tokens * moved * 2.0 / tp / bandwidth
    busy = products + attention + pointwise
    launch = rates.launch + routed * rates.launch_routed
    wait = np.maximum(launch - busy, 0.0)  # the device is idle while the host issues

    # how often: blocks of a rank, microbatches of a step
    blocks = model.blocks / c.pp
    passes = blocks * c.count
    full, selective = c.recompute == 2, c.recompute == 1
    redone = passes * np.where(full, np.maximum(busy, launch), np.where(selective, attention + 0.5 * pointwise, 0.0))
    head = 3 * product(tokens, model.embedding / tp) * rate / wide + 12.0 * tokens * model.vocab / tp / bandwidth
    head = head * c.count / c.pp * (1 + model.ahead) / rates.head

    # communication within a replica
    stored = STORED[precision]
    state = tokens * H * stored
    again = np.where(full, 1.0, 0.0)
    tensor = passes * (8 + 4 * again) * ring(state, tp, 1, cluster, rates) * (1 - rates.hidden_tensor)
    sent = tokens / tp * model.top_k * H * stored
    expert = passes * (4 + 2 * again) * exchange(sent, c.ep, cluster, rates) * (1 - rates.hidden_expert)
    expert = routed * expert
    keys = c.micro * sequence * model.kv_heads * (model.head_dim + model.v_dim) * stored / tp
    around = passes * (3 + again) * ring(keys, c.cp, tp, cluster, rates)
    context = np.maximum(around - 0.5 * passes * 3.5 * attention, rates.seen * around)

    compute = passes * (3 * products + 3.5 * attention + 2.5 * pointwise + 3 * wait) + redone
    steady = compute + head + tensor + expert + context
    # a pipeline's first and last microbatch, and stages that are not equal
    uneven = np.ceil(model.blocks / c.pp) * c.pp / model.blocks - 1
    idle = (c.pp - 1) / (c.count * c.chunks)
    idle = np.where(np.isin(c.schedule, ZERO_BUBBLE), idle / 3, idle)
    hops = 2 * c.count * c.chunks * (state / tp / (cluster.inter * rates.network) * 0.5 + cluster.latency[1])
    bubble = np.where(c.pp > 1, steady * (rates.bubble * idle + rates.uneven * uneven) + hops, 0.0)

    # between copies: gradients once a step; weights sharded by fsdp are gathered for each pass and reduced after it
    own = (blocks * model.block_dense + 2 * model.embedding / c.pp) / tp
    experts = blocks * model.block_experts / (c.ep * c.expert_tp)
    copies = c.data * c.cp / c.fsdp
    expert_copies = np.maximum(copies * tp / (c.ep * c.expert_tp), 1)
    inner = c.cp * tp
    reduce = ring(own / c.fsdp * 6.0, copies, inner * c.fsdp, cluster, rates)
    reduce = reduce + ring(experts / c.fsdp * 6.0, expert_copies, inner * c.ep, cluster, rates)
    sharded = 6.0 * c.count * ring(own + experts, c.fsdp, inner, cluster, rates)
    data = np.maximum(reduce - rates.hidden_data * compute / c.count, rates.seen * reduce)
    data = data + np.maximum(sharded - rates.hidden_data * compute, rates.seen * sharded)

    held = own / c.fsdp / np.where(c.zero >= 1, copies, 1) + experts / c.fsdp / np.where(c.zero >= 1, expert_copies, 1)
    optimizer = held * 30.0 / bandwidth + rates.fixed
    nodes = np.maximum(c.ranks / cluster.per_node, 1)
    jitter = rates.jitter * np.log2(nodes) * (steady + bubble)
    return Time(
        passes * 3 * products, passes * 3.5 * attention, passes * 2.5 * pointwise, passes * 3 * wait, redone, head,
        tensor, expert, context, bubble, data, optimizer, jitter,
    )  # fmt: skip


@cache
def calibrated() -> dict[str, Rates]:
    """Rates by kind of software: `fused` (attention in one kernel), and `eager` as runs in fp16 were, before that."""
    raw = tomllib.loads((Path(__file__).parent / "rates.toml").read_text(encoding="utf-8"))
    return {kind: Rates(**raw[kind]) for kind in ("fused", "eager")}


def rates_for(precision: str) -> Rates:
    return calibrated()["eager" if precision == "fp16" else "fused"]
