"""Step time, as a waterfall of parts that add up. Elementwise: a choice of arrays gives arrays.

First principles and a handful of constants (`Rates`, fitted once to measured runs: `benchmarks/planner.py --fit`);
what they miss, the learned correction adds as a part of its own.
"""

import tomllib
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lanewise.planner.choice import SCHEDULES, Choice, Number, among
from lanewise.planner.cluster import Cluster
from lanewise.planner.model import Transformer
from lanewise.planner.stages import cut
from lanewise.planner.traffic import Costs, traffic

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
    issue: float = 0.0  # seconds a block's forward takes beyond its work, where the host is the device
    update: float = 1.0  # of the optimizer's way through memory, how long it takes
    issue_routed: float = 0.0  # the same of a block's routing
    added: float = 0.0  # bytes a parameter to add a microbatch's gradient to those before, where no product does it
    costs: Costs | None = None  # of traffic, where it was measured on the machine itself; the links are then not used


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


def exchange(bytes_: Number, size: Number, cluster: Cluster, rates: Rates, choices: int) -> Number:
    """Seconds of an all-to-all among `size` neighbours in which each sends `bytes_` in all, as `choices` copies of its
    tokens. Between nodes a token goes to each node once, however many of its experts are there."""
    inside = np.clip(cluster.fast, 1, size)
    within = bytes_ * (inside - 1) / size / (cluster.link * rates.link)
    nodes = np.maximum(size / inside, 1)
    met = nodes * (1 - (1 - 1 / nodes) ** choices) / max(choices, 1)  # nodes a token's experts are in, a choice
    between = bytes_ * met * (1 - inside / size) * _over(size, cluster) / (cluster.inter * rates.network)
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
    ours: bool = False,
) -> Time:
    """rates: default, those of the precision. ours: pipelines are cut as our engine cuts them, with the head in the
    last stage; else as evenly as their layers allow."""
    rates = rates or rates_for(precision)
    c = choice
    block = _block(model, c, sequence, cluster, precision, rates)
    blocks = model.blocks / c.pp  # of a rank
    passes = blocks * c.count  # of a block, in a step
    full, selective = c.recompute == 2, c.recompute == 1
    once_more = np.where(selective, block.attention + 0.5 * block.pointwise, 0.0)
    redone = passes * np.where(full, block.busy + block.wait, once_more)
    compute = passes * (3 * block.products + 3.5 * block.attention + 2.5 * block.pointwise + 3 * block.wait) + redone
    head = _head(model, c, sequence, cluster, precision, rates)
    tensor, expert, context = (
        passes * seconds for seconds in _within(model, c, sequence, cluster, STORED[precision], rates, block.attention)
    )
    handed = 2 * c.count * c.chunks * hand_over(model, c, sequence, cluster, precision, rates)
    data = _between(model, c, cluster, compute, rates)
    if rates.costs is not None:
        sent = traffic(model, c, sequence, STORED[precision])
        took = {axis: sent[axis].seconds(*cost) for axis, cost in rates.costs.items()}
        tensor, expert, context = took["tensor"], took["expert"], took["context"]
        data = took["copies"] + took["sharded"]
    steady = compute + head + tensor + expert + context

    # a pipeline's first and last microbatch, and stages that are not equal
    uneven = rates.uneven * (np.ceil(blocks) * c.pp / model.blocks - 1)
    if ours:
        uneven = cut(model, c.pp * c.chunks)[2] / c.chunks  # one of a rank's stages is the fullest
    idle = (c.pp - 1) / (c.count * c.chunks)
    splits = (c.recompute == 0) & (c.fsdp == 1)  # else a backward is done in one piece
    idle = np.where(among(c.schedule, ZERO_BUBBLE) & splits, idle / 3, idle)
    bubble = np.where(c.pp > 1, steady * (rates.bubble * idle + uneven) + handed, 0.0)

    own, experts = _parameters(model, c)
    copies, expert_copies = _copies(c)
    split = c.zero >= 1
    owned = own / c.fsdp / np.where(split, copies, 1) + experts / c.fsdp / np.where(split, expert_copies, 1)
    # through memory: 30 bytes a parameter to update it
    added = (own + experts) / c.fsdp * c.count * rates.added
    optimizer = rates.update * (owned * 30.0 + added) / cluster.device.bandwidth + rates.fixed
    nodes = np.maximum(c.ranks / cluster.per_node, 1)
    jitter = rates.jitter * np.log2(nodes) * (steady + bubble)
    return Time(
        passes * 3 * block.products,
        passes * 3.5 * block.attention,
        passes * 2.5 * block.pointwise,
        passes * 3 * block.wait,
        redone,
        head,
        tensor,
        expert,
        context,
        bubble,
        data,
        optimizer,
        jitter,
    )


def hand_over(
    model: Transformer, c: Choice, sequence: int, cluster: Cluster, precision: str, rates: Rates | None = None
) -> Number:
    """Seconds between the end of a stage's work on a microbatch and the next stage's start."""
    rates = rates or rates_for(precision)
    if rates.costs is not None:
        sent = traffic(model, c, sequence, STORED[precision])["stages"]
        return sent.seconds(*rates.costs["stages"]) / (2 * c.count * c.chunks)
    state = c.micro * sequence / c.cp / c.tp * model.hidden * STORED[precision]
    return state / (cluster.inter * rates.network) * 0.5 + cluster.latency[1]


class _Block(NamedTuple):
    """Seconds of one block's forward of one microbatch on one rank; busy: of all but waiting for the host."""

    products: Number
    attention: Number
    pointwise: Number
    wait: Number

    @property
    def busy(self) -> Number:
        return self.products + self.attention + self.pointwise


def _product(rows: Number, weights: Number, rate: float, bandwidth: float, rates: Rates) -> Number:
    """Seconds of a product of `rows` with `weights` elements, which are read from memory at least once."""
    full = rates.rows * rate / A100_RATE
    return 2.0 * weights * (rows + full) / rate + 2.0 * weights / bandwidth


def _block(model: Transformer, c: Choice, sequence: int, cluster: Cluster, precision: str, rates: Rates) -> _Block:
    device, H, tp = cluster.device, model.hidden, c.tp
    rate, bandwidth = device.rate(precision) * rates.products, device.bandwidth
    tokens = c.micro * sequence / c.cp  # of a microbatch on one rank
    routed = model.routed_layers / model.layers
    shared = model.shared * model.expert + model.extra_active
    weights = model.attention + (1 - routed) * model.dense_ffn + routed * shared
    products = _product(tokens, weights / tp, rate, bandwidth, rates)
    if model.experts:
        local = np.maximum(model.experts / c.ep, 1)
        rows = tokens / tp * model.top_k * c.expert_tp / local  # of one expert: every rank's share meets here
        products = products + routed * local * _product(rows, model.expert / c.expert_tp, rate, bandwidth, rates)
    attention = tokens * model.attention_flops(sequence) / tp / (_wide(cluster, precision) * rates.attention)
    attention = attention + tokens * sequence * model.heads / tp * 2.0 * rates.scores / (bandwidth * rates.pointwise)
    moved = 12 * H + 3 * (model.heads * model.head_dim) + (1 - routed) * model.matrices * model.ffn
    moved = moved + routed * (3 * model.expert_ffn * (model.top_k + model.shared) + 6 * model.top_k * H)
    pointwise = tokens * moved * 2.0 / tp / (bandwidth * rates.pointwise)
    launch = rates.launch + routed * rates.launch_routed
    # the device is idle while the host issues
    wait = np.maximum(launch - products - attention - pointwise, 0.0) + rates.issue + routed * rates.issue_routed
    return _Block(products, attention, pointwise, wait)


def _wide(cluster: Cluster, precision: str) -> float:
    """The rate of what stays in 16 bits: attention and the head."""
    return cluster.device.rate(precision if precision in ("fp16", "fp32") else "bf16")


def _head(model: Transformer, c: Choice, sequence: int, cluster: Cluster, precision: str, rates: Rates) -> Number:
    """Seconds of the output head and the loss, shared among the stages as a balanced cut does."""
    tokens, rate = c.micro * sequence / c.cp, _wide(cluster, precision)
    bandwidth = cluster.device.bandwidth
    one = 3 * _product(tokens, model.embedding / c.tp, rate, bandwidth, rates)
    one = one + 12.0 * tokens * model.vocab / c.tp / bandwidth
    return one * c.count / c.pp * (1 + model.ahead) / rates.head


def _within(
    model: Transformer, c: Choice, sequence: int, cluster: Cluster, stored: float, rates: Rates, attention: Number
) -> tuple[Number, Number, Number]:
    """Seconds of a block's exposed traffic within a replica, forward and backward: tensor, expert, context."""
    tokens, H = c.micro * sequence / c.cp, model.hidden
    again = np.where(c.recompute == 2, 1.0, 0.0)
    tensor = (8 + 4 * again) * ring(tokens * H * stored, c.tp, 1, cluster, rates) * (1 - rates.hidden_tensor)
    sent = tokens / c.tp * model.top_k * H * stored
    expert = (4 + 2 * again) * exchange(sent, c.ep, cluster, rates, model.top_k) * (1 - rates.hidden_expert)
    expert = expert * model.routed_layers / model.layers
    keys = c.micro * sequence * model.kv_heads * (model.head_dim + model.v_dim) * stored / c.tp
    around = (3 + again) * ring(keys, c.cp, c.tp, cluster, rates)
    context = np.maximum(around - 0.5 * 3.5 * attention, rates.seen * around)
    return tensor, expert, context


def _parameters(model: Transformer, c: Choice) -> tuple[Number, Number]:
    """Of a rank, before fsdp cuts them: outside the experts, and theirs."""
    own = (model.blocks / c.pp * model.block_dense + 2 * model.embedding / c.pp) / c.tp
    return own, model.blocks / c.pp * model.block_experts / (c.ep * c.expert_tp)


def _copies(c: Choice) -> tuple[Number, Number]:
    """Ranks that hold the same weights: outside the experts, and theirs."""
    copies = c.data * c.cp / c.fsdp
    return copies, np.maximum(copies * c.tp / (c.ep * c.expert_tp), 1)


def _between(model: Transformer, c: Choice, cluster: Cluster, compute: Number, rates: Rates) -> Number:
    """Seconds of exposed traffic between copies. Gradients go once a step; weights sharded by fsdp are gathered for
    each pass and their gradients reduced after it."""
    own, experts = _parameters(model, c)
    copies, expert_copies = _copies(c)
    inner = c.cp * c.tp
    reduce = ring(own / c.fsdp * 6.0, copies, inner * c.fsdp, cluster, rates)
    reduce = reduce + ring(experts / c.fsdp * 6.0, expert_copies, inner * c.ep, cluster, rates)
    sharded = 6.0 * c.count * ring(own + experts, c.fsdp, inner, cluster, rates)
    data = np.maximum(reduce - rates.hidden_data * compute / c.count, rates.seen * reduce)
    return data + np.maximum(sharded - rates.hidden_data * compute, rates.seen * sharded)


@cache
def calibrated() -> dict[str, Rates]:
    """Rates by kind of software: `fused` (attention in one kernel), and `eager` as runs in fp16 were, before that."""
    raw = tomllib.loads((Path(__file__).parent / "rates.toml").read_text(encoding="utf-8"))
    return {kind: Rates(**raw[kind]) for kind in ("fused", "eager")}


def rates_for(precision: str) -> Rates:
    return calibrated()["eager" if precision == "fp16" else "fused"]
