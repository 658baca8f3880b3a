"""What a model says about its parameters, and what its forward returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

IGNORE = -100  # a label that is not predicted: padding, prompts, the end of a document

Kind = Literal["embedding", "head", "norm", "bias", "linear", "router", "expert"]


class Cut(NamedTuple):
    """How an axis of ranks cuts a parameter: along `dim`, between `units` of equal size (heads, channels, experts).

    finer: into how many smaller units instead when ranks outnumber `units`; with 0 the parameter is then not cut.
    """

    dim: int
    units: int
    finer: int = 0


@dataclass(frozen=True)
class ParamSpec:
    """One parameter: the row of a model's table, on which sharding, decay, initial values and checkpoints rest.

    `shape` is the whole, unsharded tensor's. `aliases` are other paths that reach the same tensor (tied weights):
    it is one parameter, counted, stored and updated once.
    `cuts` says which axes may cut it. Every other axis that divides the work of a replica holds a copy of it, and each
    copy's gradient is a part of the whole: they are summed.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    init: Literal["normal", "ones", "zeros"]
    std: float = 0.0
    aliases: tuple[str, ...] = ()
    cuts: Mapping[str, Cut] = field(default_factory=dict)


class Output(NamedTuple):
    """What a forward over one microbatch yields. Everything is a sum over tokens, so one division by the step's
    count of valid labels, after all sums, gives the mean.

    loss_sum: fp32 scalar to differentiate: the objective plus weighted auxiliary terms.
    nll_sum: fp32 scalar, detached: next-token cross-entropy alone, the loss that is displayed.
    expert_counts: int64 [L, E], tokens with a valid label that each layer sent to each expert (multi-token prediction
        blocks last); None for a dense model.
    """

    loss_sum: Tensor
    nll_sum: Tensor
    expert_counts: Tensor | None


class Passed(NamedTuple):
    """What a part of the model that is not the last hands on: states to the next part, and, as in `Output`, its own
    layers' rows of `expert_counts` (zeros in the others)."""

    states: tuple[Tensor, ...]
    expert_counts: Tensor | None


class Declared(nn.Module):
    """A module that owns parameters: each is created and described by the same call, so the two cannot disagree."""

    def __init__(self) -> None:
        super().__init__()
        self.specs: dict[str, ParamSpec] = {}

    def declare(self, spec: ParamSpec) -> nn.Parameter:
        """An uninitialised parameter, on the current default device. The spec's name is local to this module."""
        self.specs[spec.name] = spec
        return nn.Parameter(torch.empty(spec.shape))


def table(model: nn.Module) -> tuple[ParamSpec, ...]:
    """Every parameter of the model under its full name, sorted by name."""
    return tuple(
        sorted(
            (
                replace(spec, name=f"{path}.{spec.name}")
                for path, module in model.named_modules()
                if isinstance(module, Declared)
                for spec in module.specs.values()
            ),
            key=lambda spec: spec.name,
        )
    )
