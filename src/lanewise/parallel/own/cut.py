"""Pipeline parallel for code that knows nothing of stages: the module runs as written, and only its blocks differ.

On a later stage the blocks before its own all return the state that was received; what comes before them still runs
(masks and rotary angles are made there, from the tokens), on parameters of zero that take no memory. The block after a
stage's own leaves the forward pass with the state in hand, so nothing behind it runs.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lanewise.parallel.own.flow import Chain


class Left(Exception):
    """The forward pass has come to the end of this stage."""

    def __init__(self, state: Tensor) -> None:
        super().__init__()
        self.state = state


class Door:
    """Where the state of another stage comes in."""

    received: Tensor | None = None

    def enter(self, chain: Chain) -> Any:
        """What a block before this stage returns, in the form in which blocks return it."""
        assert self.received is not None
        return (self.received, *(None,) * (chain.returned - 1)) if chain.returned else self.received


def cut(module: nn.Module, chain: Chain, held: range, owned: set[str]) -> Door:
    """Keep the blocks `held` and the parameters `owned` (names, any of tied ones). Memory of all others is released."""
    door = Door()

    def leave(*args: Any, **kwargs: Any) -> Any:
        raise Left(kwargs[chain.state] if isinstance(chain.state, str) else args[chain.state])

    def enter(*args: Any, **kwargs: Any) -> Any:
        return door.enter(chain)

    for number, path in enumerate(chain.paths):
        if number not in held:
            # An attribute of this one module: the code around may read others of the block.
            module.get_submodule(path).forward = enter if number < held.start else leave
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if name not in owned:
            path, _, leaf = name.rpartition(".")
            holder = module.get_submodule(path)
            delattr(holder, leaf)
            zero = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
            holder.register_buffer(leaf, zero.expand(parameter.shape), persistent=False)
    return door
