"""The peers of layouts.py: the same models, spread over processes as one would by hand, out of public parts of torch.

A dense model is written out here and starts from our weights; experts are in our own DeepSeek modules, of which only
the dispatch is replaced. Axes of degree 1 cost nothing.

    tp    parallelize_module with sequence parallel, loss_parallel
    fsdp  fully_shard of each block and of the rest; with cp on top of it the two-dimensional form
    pp    PipelineStage, Schedule1F1B
    cp    keys and values gathered as DTensors, the mask by hand, DistributedDataParallel
    ep    a differentiable all_to_all_single, the other gradients all-reduced in one piece

Then the gradient norm, clipping, and fused AdamW.
"""

import logging
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from lanewise.config import DenseModel, Run
from lanewise.models.build import build
from lanewise.models.deepseek import DeepSeek
from lanewise.models.init import fill
from lanewise.models.seams import Seams
from lanewise.parallel.layout import Layout
from lanewise.parallel.stages import stages

warnings.filterwarnings("ignore", "torch.distributed.nn.functional", FutureWarning)
logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # that a norm over two axes takes two steps

Step = Callable[[Tensor, Tensor], tuple[float, float]]


# ---------------------------------------------------------------------------------------------------- the dense model


class Attention(nn.Module):
    """cp: the ranks that have the other positions, of which this rank's begin at `first`."""

    def __init__(self, config: DenseModel, cp: DeviceMesh | None, first: int, length: int, tokens: int) -> None:
        super().__init__()
        width, kv_width = config.heads * config.head_size, config.kv_heads * config.head_size
        assert width == kv_width
        self.width, self.cp = config.head_size, cp
        self.q, self.k, self.v = (nn.Linear(config.hidden, width, bias=False) for _ in range(3))
        self.o = nn.Linear(width, config.hidden, bias=False)
        if cp is not None:
            self.seen = torch.ones(length, tokens, dtype=torch.bool).tril(first)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        if self.cp is None:
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            k, v = (all_positions(t, self.cp) for t in (k, v))
            a = F.scaled_dot_product_attention(q, k, v, attn_mask=self.seen)
        return self.o(a.transpose(1, 2).flatten(2))


def all_positions(x: Tensor, cp: DeviceMesh) -> Tensor:
    """From each rank's positions, along dim 2, all of them; their gradients are summed on the way back.

    Not torch.distributed.nn.functional.all_gather: on gloo (torch 2.13) its gradient is wrong where what flows back is
    a permuted view, as attention's is, and an error in a group of only some ranks.
    """
    whole = DTensor.from_local(x.contiguous(), cp, [Shard(2)]).redistribute(cp, [Replicate()])
    return whole.to_local(grad_placements=[Partial()])


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class FeedForward(nn.Module):
    def __init__(self, config: DenseModel) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(config.hidden, config.ffn_hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(config.ffn_hidden, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: DenseModel, *positions: Any) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(config.hidden, config.norm_eps) for _ in range(2))
        self.attention = Attention(config, *positions)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))


class Dense(nn.Module):
    """Some layers of the model: from tokens or states to states or logits. Named as ours, so that weights fit."""

    def __init__(self, run: Run, layers: range, cp: DeviceMesh | None, part: int, parts: int) -> None:
        super().__init__()
        config, tokens = run.model, run.batch.sequence_length
        assert isinstance(config, DenseModel)
        length = tokens // parts
        self.embed = nn.Embedding(config.vocab_size, config.hidden) if layers.start == 0 else None
        self.layers = nn.ModuleDict({str(i): Block(config, cp, part * length, length, tokens) for i in layers})
        ends = layers.stop == config.layers
        self.norm = nn.RMSNorm(config.hidden, config.norm_eps) if ends else None
        self.head = nn.Linear(config.hidden, config.vocab_size, bias=False) if ends else None
        powers = config.rope_theta ** (-torch.arange(0, config.head_size, 2) / config.head_size)
        angles = torch.outer(torch.arange(part * length, (part + 1) * length), powers).repeat(1, 2)
        self.cos, self.sin = angles.cos(), angles.sin()  # no buffers: DistributedDataParallel would make them equal

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for block in self.layers.values():
            x = block(x, self.cos, self.sin)
        return x if self.head is None else self.head(self.norm(x))


def parallelize(model: Dense, mesh: DeviceMesh) -> None:
    """Tensor parallel with sequence parallel between the products; logits stay cut along the vocabulary."""
    sequence, whole = Shard(1), Replicate()
    plan: dict[str, Any] = {}
    if model.embed is not None:
        plan["embed"] = RowwiseParallel(input_layouts=whole, output_layouts=sequence)
    if model.head is not None:
        plan["norm"] = SequenceParallel()
        plan["head"] = ColwiseParallel(input_layouts=sequence, output_layouts=Shard(-1), use_local_output=False)
    for i in model.layers:
        plan |= {
            f"layers.{i}.attention_norm": SequenceParallel(),
            f"layers.{i}.ffn_norm": SequenceParallel(),
            f"layers.{i}.attention": PrepareModuleInput(
                input_layouts=(sequence, None, None), desired_input_layouts=(whole, None, None)
            ),
            f"layers.{i}.ffn": PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(whole,)),
        }
        plan |= {f"layers.{i}.attention.{name}": ColwiseParallel() for name in "qkv"}
        plan |= {f"layers.{i}.ffn.{name}": ColwiseParallel() for name in ("gate", "up")}
        plan |= {f"layers.{i}.{name}": RowwiseParallel(output_layouts=sequence) for name in ("attention.o", "ffn.down")}
    parallelize_module(model, mesh, plan)


def dense(run: Run, layout: Layout) -> Step:
    # cp before fsdp: fully_shard takes the axis it copies along first.
    mesh = init_device_mesh(
        "cpu", (layout.pp, layout.cp, layout.fsdp, layout.tp), mesh_dim_names=("pp", "cp", "fsdp", "tp")
    )
    pp, cp, fsdp = (mesh.get_local_rank(axis) for axis in ("pp", "cp", "fsdp"))
    positions = mesh["cp"] if layout.cp > 1 else None
    model = Dense(run, stages(run.model, layout.pp)[pp], positions, cp, layout.cp)
    ours = build(run.model)
    fill(ours, run.train.seed)
    weights = ours.state_dict()
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    if layout.tp > 1:
        parallelize(model, mesh["tp"])
    if layout.fsdp > 1:
        data = mesh["cp", "fsdp"] if layout.cp > 1 else mesh["fsdp"]
        for block in model.layers.values():
            fully_shard(block, mesh=data)
        fully_shard(model, mesh=data)
    trained: nn.Module = model
    if layout.cp > 1 and layout.fsdp == 1:
        trained = DistributedDataParallel(model, process_group=mesh.get_group("cp"), gradient_as_bucket_view=True)
    parameters = list(model.parameters())
    optimizer = adamw(run, parameters)

    count, size = run.batch.microbatches, run.batch.size
    total = run.batch.sequences * run.batch.sequence_length
    averaged = layout.fsdp * layout.cp  # fully_shard and DistributedDataParallel make means of what is summed here

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") * (averaged / total)
        return loss.to_local() if isinstance(loss, DTensor) else loss

    def share(x: Tensor) -> Tensor:
        """This rank's rows and positions of each microbatch."""
        rows = size // layout.fsdp
        x = x.unflatten(0, (count, size))[:, fsdp * rows : (fsdp + 1) * rows].flatten(0, 1)
        return x.chunk(layout.cp, dim=1)[cp]

    def one_by_one(tokens: Tensor, labels: Tensor) -> list[Tensor]:
        losses = []
        for x, y in zip(tokens.chunk(count), labels.chunk(count), strict=True):
            losses.append(loss_of(trained(x), y))
            losses[-1].backward()
        return losses

    def piped(tokens: Tensor, labels: Tensor) -> list[Tensor]:
        losses: list[Tensor] = []
        given = (tokens,) if pp == 0 else ()
        wanted = {"target": labels, "losses": losses} if pp == layout.pp - 1 else {}
        schedule.step(*given, **wanted, return_outputs=False)
        return losses

    passes = one_by_one
    if layout.pp > 1:
        stage = PipelineStage(trained, pp, layout.pp, torch.device("cpu"), group=mesh.get_group("pp"))
        schedule = Schedule1F1B(stage, count, loss_fn=loss_of, scale_grads=False)
        passes = piped

    def step(tokens: Tensor, labels: Tensor) -> tuple[float, float]:
        with loss_parallel() if layout.tp > 1 else nullcontext():
            losses = passes(share(tokens), share(labels))
        norm = clip(run, parameters, mesh.get_group("pp") if layout.pp > 1 else None)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return sum(loss.item() for loss in losses) / averaged / layout.tp, norm

    return step


# --------------------------------------------------------------------------------------------------------- the experts


class Dispatch(Seams):
    """Rows of a microbatch dealt to the ranks of a group that have some of the experts each.

    sent: rows that left this rank so far, forward and backward.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.sent = 0

    def share(self, x_BT: Tensor) -> Tensor:
        return x_BT.chunk(self.ranks)[self.rank]

    def dispatched(self, x_PH: Tensor, sizes: list[int]) -> tuple[Tensor, list[int], Callable[[Tensor], Tensor]]:
        here = torch.tensor(sizes)
        there = torch.empty_like(here)
        dist.all_to_all_single(there, here, group=self.group)
        sends, receives = (counts.view(self.ranks, -1).sum(1).tolist() for counts in (here, there))
        experts = torch.arange(len(sizes) // self.ranks).repeat(self.ranks).repeat_interleave(there)
        order = experts.argsort(stable=True)
        self.sent += 2 * (sum(sends) - sends[self.rank] + sum(receives) - receives[self.rank])

        def back(y: Tensor) -> Tensor:
            return self._moved(y[order.argsort()], receives, sends)

        return self._moved(x_PH, sends, receives)[order], there.view(self.ranks, -1).sum(0).tolist(), back

    def _moved(self, x: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        y = x.new_empty(sum(receives), x.shape[1])
        return differentiable.all_to_all_single(y, x.contiguous(), receives, sends, self.group)


def experts(run: Run, layout: Layout) -> tuple[Step, Dispatch]:
    seams = Dispatch(dist.group.WORLD)
    model = build(run.model)
    assert isinstance(model, DeepSeek)
    fill(model, run.train.seed)
    cut = []
    for spec in model.table():
        if spec.kind == "expert":
            path, _, name = spec.name.rpartition(".")
            cut.append(nn.Parameter(model.get_parameter(spec.name).detach().chunk(seams.ranks)[seams.rank].clone()))
            setattr(model.get_submodule(path), name, cut[-1])
    for module in model.modules():
        if hasattr(module, "seams"):
            module.seams = seams  # type: ignore[assignment]
    copied = [p for p in model.parameters() if not any(p is other for other in cut)]
    optimizer = adamw(run, [*copied, *cut])
    count, total = run.batch.microbatches, run.batch.sequences * run.batch.sequence_length

    def step(tokens: Tensor, labels: Tensor) -> tuple[float, float]:
        nll, counts = 0.0, torch.zeros(())
        for x, y in zip(tokens.chunk(count), labels.chunk(count), strict=True):
            output = model(x, y)
            (output.loss_sum / total).backward()
            nll += output.nll_sum.item() / total
            counts = counts + output.expert_counts
        flat = torch.cat([p.grad.flatten() for p in copied])
        dist.all_reduce(flat)
        for p, g in zip(copied, flat.split([p.numel() for p in copied]), strict=True):
            p.grad = g.view_as(p)
        dist.all_reduce(counts)
        squares = torch.nn.utils.get_total_norm([p.grad for p in cut]).square()
        dist.all_reduce(squares)
        norm = (squares + torch.nn.utils.get_total_norm([p.grad for p in copied]).square()).sqrt()
        torch.nn.utils.clip_grads_with_norm_([*copied, *cut], run.optimizer.clip, norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        model.balance(counts)
        return nll, norm.item()

    return step, seams


# ------------------------------------------------------------------------------------------------------------- for both


def adamw(run: Run, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    o = run.optimizer
    return torch.optim.AdamW(parameters, o.lr, o.betas, o.eps, o.weight_decay, fused=True)


def clip(run: Run, parameters: list[nn.Parameter], pp: dist.ProcessGroup | None) -> float:
    """Clip by the norm of the whole gradient, of which the other stages have their own parts; returns it."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if pp is not None:
        squares = norm.square()
        dist.all_reduce(squares, group=pp)
        norm = squares.sqrt()
    torch.nn.utils.clip_grads_with_norm_(parameters, run.optimizer.clip, norm)
    return norm.item()
