"""Fully sharded data parallel: each rank of the axis keeps a shard of every parameter, its gradient and its optimizer
state (ZeRO-3, arXiv:1910.02054). A block's weights are gathered before it runs and dropped after: PyTorch's FSDP2.

The shards are fp32, whatever the model computes in, so they are the master weights themselves: FSDP2 casts what it
gathers. Gradients are added up in fp32 over the axis, in rank order, and go on to the lanes' sums like any others.
"""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import Shard

from lanewise.lanes.wire import Message, exchange, gather, others
from lanewise.models.base import LanguageModel
from lanewise.parallel.boxes import shard_dim
from lanewise.parallel.mesh import Mesh


def shard(model: LanguageModel, mesh: Mesh, dtype: torch.dtype, offload: bool) -> None:
    """Shard the model, whose parameters may be on the meta device still, over the axis; it computes in `dtype`.

    offload: shards, their gradients and optimizer states live in host memory.
    """
    group = mesh.group(("fsdp",))
    assert group is not None
    device = mesh.world.device.type
    device_mesh = DeviceMesh.from_group(group, device, mesh_dim_names=("fsdp",))
    # Inputs are token ids and states that are of the dtype already.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    where = CPUOffloadPolicy(pin_memory=device == "cuda") if offload else OffloadPolicy()
    ranks = mesh.size["fsdp"]
    for module in (*model.blocks(), model):
        sharded = fully_shard(
            module,
            mesh=device_mesh,
            mp_policy=policy,
            offload_policy=where,
            shard_placement_fn=lambda parameter: Shard(shard_dim(parameter.shape, ranks)),
        )
        assert isinstance(sharded, FSDPModule)
        sharded.set_gradient_divide_factor(1.0)  # sums over tokens are divided once, at the commit
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_custom_reduce_scatter(_SumInRankOrder())  # type: ignore[arg-type]
        sharded.set_custom_all_gather(_Gather())  # type: ignore[arg-type]
        if mesh.size["pp"] > 1:  # a stage's weights serve all microbatches of a step: gathered once
            sharded.set_reshard_after_forward(False)
            sharded.set_reshard_after_backward(False)
    if mesh.size["pp"] > 1:  # a pipeline's stage calls this instead of the module
        register_fsdp_forward_method(model, "part")
    # It warns of outputs that are views, which must not be written in place. The models write nothing in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)


def drop_gathered(model: nn.Module) -> None:
    """After a step of a pipeline: keep only the shards, which are about to change."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class _Allocates:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _SumInRankOrder(_Allocates):
    """Each rank's chunk summed over the ranks in their order, so that no algorithm or topology is in the bits. On gloo
    it also sends half the bytes of the library's own, which is an all-reduce."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        chunks = input_tensor.chunk(size) if input_tensor.numel() else [input_tensor] * size
        received = {peer: torch.empty_like(output_tensor) for peer in others(rank, size)}
        works = exchange(
            [Message(chunks[peer], peer, 0) for peer in others(rank, size)],
            [Message(received[peer], peer, 0) for peer in others(rank, size)],
            group,
        )
        for work in works:
            work.wait()
        received[rank] = chunks[rank]
        torch.add(received[0], received[1], out=output_tensor)
        for peer in range(2, size):
            output_tensor.add_(received[peer])


class _Gather(_Allocates):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        assert not async_op  # on CUDA it overlaps by its stream
        if output_tensor.numel():
            mine = output_tensor.chunk(dist.get_world_size(group))[dist.get_rank(group)]
            if mine.data_ptr() != input_tensor.data_ptr():
                mine.copy_(input_tensor)
        for work in gather(output_tensor, group, tag=1):
            work.wait()
