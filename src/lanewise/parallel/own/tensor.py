"""Tensor parallel by DTensor: a plan's layers get their share of the weight; inputs and outputs are converted.

Between those layers everything is a plain tensor, so the module's own code is none the wiser.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor

from lanewise.parallel.own.experiment import owner, share
from lanewise.parallel.own.plan import Entry, Plan

WHOLE, WIDTH = Replicate(), Shard(-1)


class Splitter:
    """Divides `module` in place. mesh: that of tp alone."""

    def __init__(self, module: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
        self.module, self.plan, self.mesh = module, plan, mesh
        self.entries = {name: entry for entry in plan.table for name in (entry.name, *entry.tied)}
        self.made: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay one

    def split(self, blocks: dict[int, str]) -> None:
        """blocks: paths of those that are on this stage, by number."""
        for path in self.plan.embeddings:
            self._give(path, (WHOLE, WHOLE), WHOLE)
            _keep_padding(self.module.get_submodule(path))
        for path in self.plan.heads:
            self._give(path, (WHOLE, WHOLE), WHOLE)
        for group in self.plan.groups:
            inner = WIDTH if group.local else WHOLE
            for number in set(group.inside(self.plan.depth)) & blocks.keys():
                for name in group.columns:
                    self._give(f"{blocks[number]}.{name}", (WHOLE, WHOLE), inner)
                self._give(f"{blocks[number]}.{group.row}", (inner, WIDTH), WHOLE)
                for name in group.divided:
                    module, leaf = owner(self.module.get_submodule(blocks[number]), name)
                    setattr(module, leaf, getattr(module, leaf) // self.mesh.size())

    def _give(self, path: str, inputs: tuple[Placement, Placement], outputs: Placement) -> None:
        """inputs: as they come and as the layer takes them; outputs: as they are passed on."""
        module = self.module.get_submodule(path)
        if not any(True for _ in module.parameters()):
            return  # another stage's

        def place(_: str, each: nn.Module, mesh: DeviceMesh) -> None:
            for name, parameter in each.named_parameters(recurse=False):
                if parameter not in self.made:
                    self.made[parameter] = _share(parameter, self.entries[f"{path}.{name}"], mesh)
                setattr(each, name, self.made[parameter])

        def take(_: nn.Module, args: Any, mesh: DeviceMesh) -> Any:
            given = DTensor.from_local(args[0], mesh, [inputs[0]], run_check=False)
            return (given.redistribute(placements=[inputs[1]]), *args[1:])

        def pass_on(_: nn.Module, made: Any, mesh: DeviceMesh) -> Tensor:
            return made.redistribute(placements=[outputs]).to_local()

        distribute_module(module, self.mesh, place, take, pass_on)  # type: ignore[arg-type]


def _share(parameter: nn.Parameter, entry: Entry, mesh: DeviceMesh) -> nn.Parameter:
    """This rank's part. A fused weight is put in order first, so that a rank's shares of its pieces stand together."""
    whole = parameter.detach()
    if entry.pieces:
        whole = whole.index_select(entry.split_dim or 0, order(entry.pieces, mesh.size()))
    placement = WHOLE if entry.split_dim is None else Shard(entry.split_dim)
    # No rank sends: `parallelize` has seen to it that all have the same weights.
    part = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
    return nn.Parameter(part, requires_grad=parameter.requires_grad)


def order(pieces: tuple[int, ...], tp: int) -> Tensor:
    """Where each output of a fused weight, as it is stored, was before: rank by rank."""
    return torch.cat([share(pieces, tp, rank) for rank in range(tp)])


def _keep_padding(module: nn.Module) -> None:
    """The padding token's row gets no gradient. An embedding knows the row by its number, in a part that of another."""
    padding = getattr(module, "padding_idx", None)
    if padding is None:
        return

    def detach(_: nn.Module, args: Any, made: Tensor) -> Tensor:
        tokens = args[0].to_local() if isinstance(args[0], DTensor) else args[0]
        return torch.where((tokens == padding).unsqueeze(-1), made.detach(), made)

    module.padding_idx = None  # type: ignore[assignment]
    module.register_forward_hook(detach)
