"""Layers that a batch does not reach, such as an expert that no token chose, still get a gradient: zero.

FSDP sums the gradients of a block in one piece. If a parameter had one on some ranks only, the pieces would not match.
"""

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def fill_absent(block: nn.Module, returned: int) -> None:
    """Every call of `block` gives each of its parameters a gradient. returned: see `flow.Chain`. Before fully_shard."""
    called: set[nn.Module] = set()

    def note(module: nn.Module, _: Any) -> None:
        called.add(module)

    def touch(_: nn.Module, args: Any, made: Any) -> Any:
        state = made[0] if returned else made
        for module in block.modules():
            for parameter in module.parameters(recurse=False) if module not in called else ():
                if parameter.requires_grad:
                    state = state + _nothing(parameter).to(state.dtype)
        called.clear()
        return (state, *made[1:]) if returned else state

    for module in block.modules():
        module.register_forward_pre_hook(note)
    block.register_forward_hook(touch)


def _nothing(parameter: Tensor) -> Tensor:
    """Zero, by way of an element of the parameter."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.flatten()[:1].sum() * 0
