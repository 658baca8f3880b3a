"""Where a rank stands in the mesh `replica, pp, fsdp, tp` of a foreign module, and the groups along its axes."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lanewise.errors import UserError
from lanewise.parallel.layout import Layout

AXES = ("replica", "pp", "fsdp", "tp")


class Place:
    """size, at: degree and coordinate by axis. One process alone needs no process group."""

    def __init__(self, layout: Layout) -> None:
        world = dist.get_world_size() if dist.is_initialized() else 1
        if layout.size > 1 and not dist.is_initialized():
            raise UserError(
                f"layout {layout} needs {layout.size} processes: start them with torchrun, and call "
                f"torch.distributed.init_process_group() first"
            )
        degrees = (layout.replicas(world), layout.pp, layout.fsdp, layout.tp)
        on_gpu = dist.is_initialized() and "nccl" in dist.get_backend()
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self.mesh: DeviceMesh | None = None
        if world > 1:
            self.mesh = init_device_mesh(self.device.type, degrees, mesh_dim_names=AXES)
        coordinates = self.mesh.get_coordinate() if self.mesh is not None else [0] * len(AXES)
        assert coordinates is not None
        self.size = dict(zip(AXES, degrees, strict=True))
        self.at = dict(zip(AXES, coordinates, strict=True))
        self._stages: dict[Sequence[int], dist.ProcessGroup] = {}

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def first(self) -> bool:
        return self.at["pp"] == 0

    @property
    def last(self) -> bool:
        return self.at["pp"] == self.size["pp"] - 1

    @property
    def share(self) -> tuple[int, int]:
        """Number and count of the ranks that divide a batch's rows: replicas and fsdp."""
        count = self.size["fsdp"]
        return self.at["replica"] * count + self.at["fsdp"], self.size["replica"] * count

    def along(self, axis: str) -> DeviceMesh:
        assert self.mesh is not None
        return self.mesh[axis]

    def sum(self, tensor: Tensor, axis: str) -> None:
        """In place, over the ranks of an axis."""
        if self.size[axis] > 1:
            dist.all_reduce(tensor, group=self.along(axis).get_group())

    def sum_stages(self, tensor: Tensor, stages: Sequence[int]) -> None:
        """In place, over the same place in several stages, this one among them."""
        assert self.mesh is not None
        if stages not in self._stages:
            here = [self.at[axis] for axis in AXES]
            ranks = [int(self.mesh.mesh[here[0], stage, here[2], here[3]]) for stage in stages]
            self._stages[stages] = dist.new_group(ranks, use_local_synchronization=True)
        dist.all_reduce(tensor, group=self._stages[stages])

    def sum_all(self, numbers: Sequence[float]) -> list[float]:
        """Sums over all ranks, in fp64."""
        totals = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        if self.mesh is not None:
            dist.all_reduce(totals)
        return totals.tolist()
