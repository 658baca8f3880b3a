"""Activation recomputation: a block's forward runs again in the backward instead of being kept. No bit changes: dropout
is keyed, not drawn, and the block is the same code on the same input."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

# Kept by `selective`: the products, in which the time goes; what is recomputed is pointwise. Experts' products, which
# are written into slices of one tensor, cannot be kept apart and are recomputed.
PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
)


def recompute(block: nn.Module, how: str) -> None:
    """Make `block` recompute when it is differentiated. how: 'full' or 'selective'."""
    contexts = noop_context_fn if how == "full" else partial(create_selective_checkpoint_contexts, _policy)
    forward = block.forward

    def recomputed(*arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments)
        return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)

    block.forward = recomputed


def _policy(_context: Any, operation: Any, *_arguments: Any, **_named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE
