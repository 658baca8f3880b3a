"""A module spread over ranks: forward and backward over microbatches, whole gradients, clipping, whole tensors."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate

from lanewise.lanes.keys import slot_key
from lanewise.parallel.own.absent import fill_absent
from lanewise.parallel.own.batches import Loss, microbatches
from lanewise.parallel.own.cut import Door, Left, cut
from lanewise.parallel.own.derive import arguments
from lanewise.parallel.own.flow import Chain
from lanewise.parallel.own.place import Place
from lanewise.parallel.own.plan import Entry, Plan
from lanewise.parallel.own.tensor import Splitter, order


class Parallel:
    """This rank's part of a module.

    module: the module itself, its parameters now this rank's part (DTensor where divided). plan: how it is divided.
    """

    def __init__(self, module: nn.Module, plan: Plan, chain: Chain, place: Place, loss: Loss, seed: int) -> None:
        self.module, self.plan, self.place = module, plan, place
        self.step = 0
        held = plan.stages()[place.at["pp"]]
        self.entries = [entry for entry in plan.table if place.at["pp"] in plan.holders(entry)]
        owned = {name for entry in self.entries for name in (entry.name, *entry.tied)}
        door = cut(module, chain, held, owned) if place.size["pp"] > 1 else Door()
        module.to(place.device)
        blocks = {number: chain.paths[number] for number in held}
        if place.size["tp"] > 1:
            Splitter(module, plan, place.along("tp")).split(blocks)
        self.stage = _Stage(module, door, loss, seed, place)
        if place.size["fsdp"] > 1:
            sharded = [module.get_submodule(path) for path in blocks.values()]
            for block in sharded:
                fill_absent(block, chain.returned)
            _shard(self.stage, sharded, place)
        self.chain = chain
        self._schedules: dict[Any, Schedule1F1B | ScheduleGPipe] = {}
        # FSDP makes new parameters; a tied one has the name of its entry, or one of its others on a later stage.
        by_name = dict(module.named_parameters(remove_duplicate=False))
        self._parameters = {entry.name: by_name[entry.name] for entry in self.entries}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those that this rank has a part of, by their names in the module."""
        yield from self._parameters.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from self._parameters.values()

    # --------------------------------------------------------------------------------------------------- running

    def forward_backward(self, inputs: Any, labels: Any, microbatches: int = 1) -> float:
        """The mean loss of the batch, on every rank; gradients of that mean replace those that were there.

        inputs: what the module is called with, [B, ...], a tensor or a dict of tensors; labels: what the loss takes.
        Both are the whole batch, the same on every rank. Raises UserError if its rows do not divide.
        """
        for parameter in self._parameters.values():
            parameter.grad = None
        self.step += 1
        total, count = self._run(inputs, labels, microbatches, train=True)
        self._finish(count)
        return total / max(count, 1)

    @torch.no_grad()
    def evaluate(self, inputs: Any, labels: Any, microbatches: int = 1) -> float:
        """The mean loss of the batch, on every rank. Call `module.eval()` first if there is dropout."""
        total, count = self._run(inputs, labels, microbatches, train=False)
        return total / max(count, 1)

    def _run(self, inputs: Any, labels: Any, count: int, train: bool) -> tuple[float, float]:
        stage, place = self.stage, self.place
        stage.begin(microbatches(inputs, labels, count, *place.share), self.step)
        if place.size["pp"] > 1:
            self._pipelined(count, train)
        else:
            for number in range(count):
                if isinstance(stage, FSDPModule):
                    stage.set_requires_gradient_sync(number == count - 1)
                loss = stage(number=torch.tensor([number]))
                if train:
                    loss.backward()
        mine = stage.made if place.last and place.at["tp"] == 0 else []
        total, valid = place.sum_all([sum(float(pair[0]) for pair in mine), sum(float(pair[1]) for pair in mine)])
        return total, valid

    def _pipelined(self, count: int, train: bool) -> None:
        stage, place = self.stage, self.place
        shape = stage.state_shape(self.chain)
        key = (count, train, shape)
        if key not in self._schedules:
            state = torch.empty(shape, dtype=self.chain.dtype, device="meta").requires_grad_(train)
            loss = torch.empty((), dtype=torch.float32, device="meta").requires_grad_(train)
            made = PipelineStage(
                stage,
                place.at["pp"],
                place.size["pp"],
                place.device,
                input_args=() if place.first else (state,),
                output_args=(loss,) if place.last else (state,),
                group=place.along("pp").get_group(),
            )
            # With fewer microbatches than stages there is no steady state for 1F1B; the sums are the same.
            if train and count >= place.size["pp"]:
                self._schedules[key] = Schedule1F1B(made, count, loss_fn=_as_it_is, scale_grads=False)
            else:
                self._schedules[key] = ScheduleGPipe(
                    made, count, loss_fn=_as_it_is if train else None, scale_grads=False
                )
        schedule = self._schedules[key]
        numbers = torch.arange(count)
        if train:
            schedule.step(number=numbers, target=numbers if place.last else None, return_outputs=False)
        else:
            schedule.eval(number=numbers, return_outputs=False)

    # ------------------------------------------------------------------------------------------------- gradients

    @torch.no_grad()
    def _finish(self, count: float) -> None:
        """What no axis has summed by itself; then one division by the number of what the loss was summed over."""
        for entry in self.entries:
            if not entry.trained:
                continue
            parameter = self._parameters[entry.name]
            if parameter.grad is None:  # no path led there in this batch; to other ranks one may have
                parameter.grad = torch.zeros_like(parameter)
            if isinstance(parameter.grad, DTensor) and isinstance(parameter, DTensor):
                # An embedding's, and a row's bias, may come out whole or as parts of a sum.
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
            for reduce in self.reductions(entry):
                reduce(_local(parameter.grad))
            _local(parameter.grad).div_(max(count, 1))

    def reductions(self, entry: Entry) -> Iterator[Any]:
        """Sums in place that a parameter's gradient still needs after the backward pass."""
        holders = self.plan.holders(entry)
        if entry.kind == "summed":
            yield lambda gradient: self.place.sum(gradient, "tp")
        if len(holders) > 1:
            yield lambda gradient: self.place.sum_stages(gradient, holders)
        yield lambda gradient: self.place.sum(gradient, "replica")

    def gradient_norm(self) -> float:
        """Of all gradients as one vector, summed in fp64: each parameter once, tied, split and whole ones alike."""
        squares = 0.0
        for entry in self.entries:
            gradient = self._parameters[entry.name].grad
            if gradient is not None and self._speaks_for(entry):
                squares += _local(gradient).double().square().sum().item()
        return self.place.sum_all([squares])[0] ** 0.5

    @torch.no_grad()
    def clip(self, most: float) -> float:
        """Scale all gradients down if their norm is above `most`; returns the norm before."""
        norm = self.gradient_norm()
        if norm > most:
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    _local(parameter.grad).mul_(most / norm)
        return norm

    def _speaks_for(self, entry: Entry) -> bool:
        at = self.place.at
        split = entry.split_dim is not None
        return at["replica"] == 0 and at["pp"] == self.plan.holders(entry)[0] and (split or at["tp"] == 0)

    # --------------------------------------------------------------------------------------------- whole tensors

    @torch.no_grad()
    def whole(self, gradients: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Names and whole tensors (or gradients) as the module had them, one at a time. Every rank takes them all."""
        for entry in self.plan.table:
            holder = self.plan.holders(entry)[0]
            tensor = torch.empty(entry.shape, device=self.place.device)
            if entry.name in self._parameters:
                parameter = self._parameters[entry.name]
                held = parameter.grad if gradients else parameter
                tensor = self._joined(torch.zeros_like(parameter) if held is None else held, entry)
            if self.place.size["pp"] > 1:
                tensor = tensor.to(self.chain.dtype) if not gradients else tensor
                dist.broadcast(tensor, group=self.place.along("pp").get_group(), group_src=holder)
            yield entry.name, tensor

    def _joined(self, tensor: Tensor, entry: Entry) -> Tensor:
        if isinstance(tensor, DTensor):
            for axis in range(len(tensor.placements)):  # one by one, fsdp first: torch cannot gather both in one
                gathered = [Replicate()] * (axis + 1) + list(tensor.placements[axis + 1 :])
                tensor = tensor.redistribute(placements=gathered)
        # A copy: the whole of what every rank holds is its own memory.
        whole = _local(tensor).detach().clone()
        if entry.pieces and self.place.size["tp"] > 1:
            assert entry.split_dim is not None
            back = order(entry.pieces, self.place.size["tp"]).argsort().to(whole.device)
            whole = whole.index_select(entry.split_dim, back)
        return whole.contiguous()


class _Stage(nn.Module):
    """What a schedule calls: a forward pass of this stage for one microbatch, looked up by its number."""

    def __init__(self, module: nn.Module, door: Door, loss: Loss, seed: int, place: Place) -> None:
        super().__init__()
        self.module, self.door, self.loss, self.seed, self.place = module, door, loss, seed, place

    def begin(self, batches: Iterator[tuple[Any, Any]], step: int) -> None:
        self.batches, self.step = list(batches), step
        self.made: list[tuple[Tensor, Tensor | int]] = []

    def state_shape(self, chain: Chain) -> tuple[int, ...]:
        """Rows and tokens of this batch, width of the chain's state."""
        inputs = self.batches[0][0]
        first = next(iter(inputs.values())) if isinstance(inputs, dict) else inputs
        return (*first.shape[:2], *chain.shape[2:])

    def forward(self, *received: Tensor, number: Tensor) -> Tensor:
        inputs, labels = self.batches[int(number)]
        self.door.received = received[0] if received else None
        args, kwargs = arguments(_moved(inputs, self.place.device))
        with torch.random.fork_rng(devices=[self.place.device] if self.place.device.type == "cuda" else []):
            # The ranks of tp draw the same numbers: what they hold whole must stay the same.
            key = slot_key(self.seed, self.step, self.place.share[0], int(number))
            torch.manual_seed(key ^ self.place.at["pp"])
            try:
                outputs = self.module(*args, **kwargs)
            except Left as left:
                return left.state
        total, valid = self.loss(outputs, _moved(labels, self.place.device))
        self.made.append((total.detach(), valid))  # read when all are under way: reading one waits for the device
        return total.float()


def _shard(stage: nn.Module, blocks: Sequence[nn.Module], place: Place) -> None:
    """FSDP2, block by block, then what is left; gradients are reduced as sums in fp32."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for each in (*blocks, stage):
        fully_shard(each, mesh=place.along("fsdp"), mp_policy=policy)
    for each in stage.modules():
        if isinstance(each, FSDPModule):
            each.set_gradient_divide_factor(1.0)
            each.set_force_sum_reduction_for_comms(True)  # gloo has no sum that divides


def _as_it_is(loss: Tensor, _: Any) -> Tensor:
    return loss


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _moved(value: Any, device: torch.device) -> Any:
    return {name: _moved(each, device) for name, each in value.items()} if isinstance(value, dict) else value.to(device)
