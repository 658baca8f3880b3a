"""What the ranks of our own engine send each other in a step, by axis: bytes that leave a rank, and calls that wait.

`probe` measures what a byte and a call of each axis cost in seconds beyond the compute they hide under; a prediction
for the probed machine multiplies. Elementwise: a choice of arrays gives arrays.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from lanewise.planner.choice import Choice, Number
from lanewise.planner.model import Transformer


class Traffic(NamedTuple):
    """sent: bytes that leave a rank, to all its peers; calls: after which it goes on only with what they sent."""

    sent: Number
    calls: Number

    def seconds(self, byte: float, call: float) -> Number:
        return self.sent * byte + self.calls * call


def traffic(model: Transformer, c: Choice, sequence: int, stored: float) -> dict[str, Traffic]:
    """By axis, of one rank in a step; `copies` are all that hold the same weights. stored: bytes of an element that
    travels within a replica."""
    tokens, H, blocks = c.micro * sequence / c.cp, model.hidden, model.blocks / c.pp
    passes, again = blocks * c.count, np.where(c.recompute == 2, 1.0, 0.0)
    routed = model.routed_layers / model.layers

    def of(size: Number, whole: Number, calls: Number) -> Traffic:
        """`calls` times, a rank sends the others its share of `whole` bytes, or gets its share of their sums."""
        return Traffic(calls * whole * (size - 1) / size, np.where(size > 1, calls, 0.0))

    dense = blocks * model.block_dense + (2 - model.tied) * model.embedding / c.pp
    experts = blocks * model.block_experts / (c.ep * c.expert_tp)
    dense, experts = dense / c.tp / c.fsdp, experts / c.fsdp  # what a rank keeps
    # weights come for the forward and again for the backward, or in a pipeline once a step; gradients go each time
    weights = np.where(c.pp > 1, 1, 2 * c.count) * stored
    layers = blocks + 1
    copies = c.data * c.cp / c.fsdp
    expert_copies = np.maximum(copies * c.tp / (c.ep * c.expert_tp), 1)
    exchanged = dense * (copies - 1) / copies + experts * (expert_copies - 1) / expert_copies
    back = np.where(c.zero == 0, 4.0, stored)  # what each copy gets: the whole gradient, or the new weights
    state = tokens / c.tp * H * stored
    return {
        "tensor": of(c.tp, tokens * H * stored, passes * (8 + 4 * again) + 4 * c.count / c.pp),
        "context": of(
            c.cp,
            c.micro * sequence * model.kv_heads * (model.head_dim + model.v_dim) * stored / c.tp,
            passes * (2 + again),
        ),
        "expert": of(c.ep, tokens / c.tp * model.top_k * H * stored, passes * routed * (4 + 2 * again)),
        "sharded": Traffic(
            (dense + experts) * (c.fsdp - 1) * (weights + 4 * c.count),
            np.where(c.fsdp > 1, layers * (np.where(c.pp > 1, 1, 2 * c.count) + c.count), 0.0),
        ),
        "copies": Traffic(exchanged * (4 + back), np.where(exchanged > 0, 1.0, 0.0)),
        "stages": Traffic(
            np.where(c.pp > 1, 2 * c.count * c.chunks * state, 0.0), np.where(c.pp > 1, 2 * c.count * c.chunks, 0.0)
        ),
    }


Costs = Mapping[str, tuple[float, float]]  # by axis, seconds of a byte and of a call
