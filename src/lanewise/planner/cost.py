"""Step time, as a waterfall of parts that add up. Elementwise: a choice of arrays gives arrays.

First principles and a handful of constants; what they miss, the learned correction adds as a part of its own.
"""

from dataclasses import dataclass, fields

import numpy as np

from lanewise.planner.choice import SCHEDULES, Choice, Number
from lanewise.planner.cluster import Cluster
from lanewise.planner.model import Transformer

LAUNCH = 4.5e-6  # seconds an operator takes at least; a block has about OPERATORS of them, forward
OPERATORS = 22
HALF = 512.0  # rows of a matrix product at which its rate halves for want of work, times a width of 4096
ATTENTION_SHARE = 0.55  # rate of a fused attention, of that of a matrix product
LINK_SHARE = 0.75  # of a link's bandwidth that a collective attains
HIDDEN_TENSOR = 0.25  # share of tensor-parallel traffic under compute
HIDDEN_EXPERT = 0.3
HIDDEN_DATA = 0.8  # share of compute under which gradient and weight traffic may hide
JITTER = 0.012  # of the step, for each doubling of nodes: the slowest of many sets the pace
STORED = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 2.0, "fp4": 2.0}  # bytes an element that travels


@dataclass(frozen=True)
class Time:
    """Seconds of a step, by part."""

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


def product(m: Number, k: Number, n: Number, rate: float, bandwidth: float) -> Number:
    """Seconds of an [m, k] x [k, n] product: work at the device's best rate, slowed where a side is small, and its
    operands' way through memory."""
    small = 1 + HALF * 4096 / (np.maximum(m, 1) * np.minimum(np.minimum(k, n), 4096))
    return 2.0 * m * k * n / rate * small + 2.0 * (m * k + k * n + m * n) / bandwidth * 0.3


def ring(bytes_: Number, size: Number, stride: Number, cluster: Cluster) -> Number:
    """Seconds to all-gather (or reduce-scatter) `bytes_` in all among `size` ranks that lie `stride` apart.

    The part of the ring that leaves a node runs at the network's rate per device; a hierarchical algorithm takes the
    same bytes over the network, once for each node.
    """
    span = size * stride
    inside = np.clip(cluster.fast / stride, 1, size)  # of them in one node
    nodes = np.maximum(size / inside, 1)
    over = np.where(span > (cluster.pod_nodes or np.inf) * cluster.per_node, cluster.oversubscription, 1.0)
    within = bytes_ * (size - 1) / size / cluster.link
    between = bytes_ * (nodes - 1) / nodes * over / (cluster.inter * inside)
    moved = np.where(nodes > 1, np.maximum(within, between), within) / LINK_SHARE
    hops = np.where(nodes > 1, np.log2(np.maximum(nodes, 1)) * cluster.latency[1] * 2, 0) + inside * cluster.latency[0] / 2
    return np.where(size > 1, moved + hops, 0.0)


def exchange(bytes_: Number, size: Number, stride: Number, cluster: Cluster) -> Number:
    """Seconds of an all-to-all in which each of `size` ranks sends `bytes_` in all."""
    inside = np.clip(cluster.fast / stride, 1, size)
    leaving = np.maximum(1 - inside / size, 0)
    over = np.where(size * stride > (cluster.pod_nodes or np.inf) * cluster.per_node, cluster.oversubscription, 1.0)
    moved = np.maximum(bytes_ * (inside - 1) / size / cluster.link, bytes_ * leaving * over / cluster.inter)
    return np.where(size > 1, moved / LINK_SHARE + cluster.latency[1] * np.log2(np.maximum(size, 2)), 0.0)


def step_time(model: Transformer, choice: Choice, sequence: int, cluster: Cluster, precision: str = "bf16") -> Time:
    device, c = cluster.device, choice
    rate, bandwidth = device.rate(precision), device.bandwidth
    wide = device.rate("fp16" if precision == "fp16" else "bf16")
    tokens = c.micro * sequence / c.cp  # of a microbatch on one rank
    H, tp = model.hidden, c.tp
    routed = model.routed_layers / model.layers

    # one block, one microbatch, forward
    if model.latent is None:
        qkv = product(tokens, H, (model.heads * model.head_dim + model.kv_heads * (model.head_dim + model.v_dim)) / tp, rate, bandwidth)
    else:
        q_rank, kv_rank, rotary = model.latent
        down = product(tokens, H, q_rank + kv_rank + rotary, rate, bandwidth)
        q = product(tokens, q_rank or H, model.heads * model.head_dim / tp, rate, bandwidth)
        qkv = down + q + product(tokens, kv_rank, model.heads * (model.head_dim - rotary + model.v_dim) / tp, rate, bandwidth)
    out = product(tokens, model.heads * model.v_dim / tp, H, rate, bandwidth)
    dense = model.matrices * product(tokens, H, model.ffn / tp, rate, bandwidth)
    products = qkv + out + (1 - routed) * dense
    if model.experts:
        local = np.maximum(model.experts / c.ep, 1)
        rows = tokens / tp * model.top_k * c.expert_tp / local  # of one expert: every rank's share meets here
        grouped = local * model.matrices * product(rows, H, model.expert_ffn / c.expert_tp, rate, bandwidth)
        shared = model.shared * model.matrices * product(tokens, H, model.expert_ffn / tp, rate, bandwidth)
        products = products + routed * (grouped + shared)
    products = products + 2.0 * tokens * model.extra_active / tp / rate
    attention = tokens * model.attention_flops(sequence) / tp / (wide * ATTENTION_SHARE)
    moved = 12 * H + 3 * (model.heads * model.head_dim) + (1 - routed) * 3 * model.ffn
    moved = moved + routed * (3 * model.expert_ffn * (model.top_k + model.shared) + 4 * model.top_k * H)
    pointwise = tokens * moved * 2.0 / tp / bandwidth
    launch = LAUNCH * OPERATORS * (1 + routed)

    # how often: blocks of a rank, microbatches of a step
    blocks = model.blocks / c.pp
    passes = blocks * c.count
    again = np.select([c.recompute == 0, c.recompute == 1], [0.0, 0.1], 1.0)
    head = c.count / c.pp * (1 + model.ahead) * 3 * product(tokens, H, model.vocab / tp, wide, bandwidth)
    head = head + c.count / c.pp * 8.0 * tokens * model.vocab / tp * 2 / bandwidth

    # communication within a replica
    stored = STORED[precision]
    state = tokens * H * stored
    collectives = (4 + 2 * again) * 2  # gathers and scatters of a block, forward and backward
    tensor = passes * collectives * ring(state, tp, 1, cluster) * (1 - HIDDEN_TENSOR)
    sent = tokens / tp * model.top_k * H * stored if model.experts else 0.0
    expert = routed * passes * (4 + 2 * again) * exchange(sent, c.ep, np.maximum(tp / c.expert_tp, 1) * 0 + 1, cluster) * (1 - HIDDEN_EXPERT)
    keys = c.micro * sequence * model.kv_heads * (model.head_dim + model.v_dim) * stored / tp
    around = passes * (3 + again) * ring(keys, c.cp, tp, cluster)
    context = np.maximum(around - 0.5 * passes * 3.5 * attention, 0.15 * around)

    busy = passes * (3 * products + 3.5 * attention + 2.5 * pointwise + 3 * launch)
    redone = passes * (np.where(c.recompute == 2, products + attention + pointwise + launch, np.where(c.recompute == 1, attention + 0.5 * pointwise, 0)))
    steady = busy + redone + head + tensor + expert + context
    # a pipeline's first and last microbatch, and stages that are not equal
    uneven = np.ceil(model.blocks / (c.pp * c.chunks)) * c.pp * c.chunks / model.blocks - 1
    idle = (c.pp - 1) / (c.count * c.chunks)
    zero_bubble = np.isin(c.schedule, [SCHEDULES.index(s) for s in ("interleaved-zb", "zbv", "dualpipev")])
    idle = np.where(zero_bubble, idle / 3, idle)
    hops = np.where(c.pp > 1, 2 * c.count * c.chunks * (state / tp / cluster.inter * 0.5 + cluster.latency[1]), 0.0)
    bubble = np.where(c.pp > 1, steady * (idle + 0.5 * uneven + (c.pp - 1.0) / c.pp * np.where(c.chunks > 1, 0.0, 0.0)) + hops, 0.0)

    # between copies: gradients once a step; weights sharded by fsdp are gathered twice a microbatch
    ends = 2 * model.embedding / c.pp
    own = (blocks * model.block_dense + ends) / tp
    owned_experts = blocks * model.block_experts / (c.ep * c.expert_tp)
    copies = c.data * c.cp / c.fsdp
    inner = c.cp * tp
    reduce = ring((own + owned_experts) / c.fsdp * 6.0, copies, inner * c.fsdp, cluster)
    gathers = (2 + np.where(c.recompute == 2, 0.0, 0.0)) * c.count
    sharded = (gathers * 2.0 + 2.0 * c.count) * ring(own + owned_experts, c.fsdp, inner, cluster)
    one_micro = (busy + redone) / c.count
    data = np.maximum(reduce - HIDDEN_DATA * one_micro, 0.1 * reduce)
    data = data + np.maximum(sharded - HIDDEN_DATA * (busy + redone), 0.05 * sharded)

    held = (own + owned_experts) / c.fsdp
    owned = np.where(c.zero >= 1, held / np.maximum(copies, 1), held)
    optimizer = owned * 30.0 / bandwidth + 300e-6
    nodes = np.maximum(c.ranks / cluster.per_node, 1)
    jitter = JITTER * np.log2(nodes) * (steady + bubble)
    return Time(
        passes * 3 * products, passes * 3.5 * attention, passes * 2.5 * pointwise, passes * 3 * launch, redone, head,
        tensor, expert, context, bubble, data, optimizer, jitter,
    )  # fmt: skip
