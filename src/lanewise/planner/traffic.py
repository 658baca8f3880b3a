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

    def of(size: Number, whole: Number, times: Number, small: Number = 0.0) -> Traffic:
        """So many times a rank sends the others its share of `whole` bytes, or gets its share of their sums. small:
        calls beside those that carry next to nothing."""
        return Traffic(times * whole * (size - 1) / size, np.where(size > 1, times + small, 0.0))

    dense = blocks * model.block_dense + (2 - model.tied) * model.embedding / c.pp
    experts = blocks * model.block_experts / (c.ep * c.expert_tp)
    dense, experts = dense / c.tp / c.fsdp, experts / c.fsdp  # what a rank keeps
    # a block's weights come for the forward and again for the backward, those at the ends once; in a pipeline all once
    # a step. Gradients go each time.
    come = np.where(c.pp > 1, 1, 2 * c.count)
    edges = (2 - model.tied) * model.embedding / c.pp / c.tp / c.fsdp
    edges_come = np.where(c.pp > 1, 1, c.count)
    gathered = (dense + experts - edges) * come + edges * edges_come
    copies = c.data * c.cp / c.fsdp
    expert_copies = np.maximum(copies * c.tp / (c.ep * c.expert_tp), 1)
    exchanged = dense * (copies - 1) / copies + experts * (expert_copies - 1) / expert_copies
    back = np.where(c.zero == 0, 4.0, stored)  # what each copy gets: the whole gradient, or the new weights
    ends = c.count / c.pp * (1 + model.ahead)  # uses of embedding and head
    state = tokens / c.tp * H * stored
    return {
        # what a router decides travels beside the states
        "tensor": of(
            c.tp,
            tokens * H * stored,
            passes * (8 + 4 * again) + ends * 4,
            passes * routed * (6 + 3 * again) + ends * 2,
        ),
        "context": of(
            c.cp,
            c.micro * sequence * model.kv_heads * (model.head_dim + model.v_dim) * stored / c.tp,
            passes * (2 + again),
        ),
        "expert": of(
            c.ep, tokens / c.tp * model.top_k * H * stored, passes * routed * (4 + 2 * again), passes * routed
        ),
        "sharded": Traffic(
            (c.fsdp - 1) * (gathered * stored + (dense + experts) * 4 * c.count),
            np.where(c.fsdp > 1, blocks * (come + c.count) + edges_come + c.count, 0.0),
        ),
        "copies": Traffic(exchanged * (4 + back), np.where(exchanged > 0, 2.0, 0.0)),
        "stages": Traffic(
            np.where(c.pp > 1, 2 * c.count * c.chunks * state, 0.0), np.where(c.pp > 1, 2 * c.count * c.chunks, 0.0)
        ),
    }


Costs = Mapping[str, tuple[float, float]]  # by axis, seconds of a byte and of a call
