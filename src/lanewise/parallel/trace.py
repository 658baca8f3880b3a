"""What a few steps of a run compute: by the machinery in any layout, and by plain PyTorch in one process."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lanewise.checkpoint.pieces import Entry
from lanewise.config import Run
from lanewise.data.dataset import Slot
from lanewise.evaluation import evaluate, inputs
from lanewise.lanes.keys import slot_key
from lanewise.models.build import build
from lanewise.models.init import fill
from lanewise.models.loss import Objective
from lanewise.models.spec import IGNORE
from lanewise.parallel.build import build_part
from lanewise.parallel.mesh import Mesh
from lanewise.replica import Replica, entries

STEPS = 3
CPU = torch.device("cpu")


@dataclass
class Trace:
    """losses, norms: of each step; gradients: of the first step's mean loss, whole tensors by name, unclipped;
    weights, buffers: after the last step; held_out: the evaluation loss then."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    held_out: float = 0.0


class MadeUp:
    """Random slots that have what real data may have: ignored labels anywhere, a sequence with one valid label, one
    with none, unequal numbers of valid tokens, and in every other slot several documents in a row."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def slot(self, step: int, lane: int, k: int) -> Slot:
        batch = self.run.batch
        random = np.random.default_rng([self.run.train.seed, step, lane, k])
        shape = (batch.size, batch.sequence_length)
        tokens_BT, labels_BT = random.integers(self.run.model.vocab_size, size=(2, *shape))
        labels_BT[random.random(shape) < 0.1 * (1 + lane)] = IGNORE
        if lane == 1:
            labels_BT[0] = IGNORE
        if lane == 0:
            labels_BT[-1, 1:] = IGNORE
        starts_BT = None
        if (step + lane + k) % 2:
            first_BT = random.random(shape) < 4 / batch.sequence_length
            starts_BT = np.maximum.accumulate(first_BT * np.arange(batch.sequence_length), axis=1)
            labels_BT[:, :-1][first_BT[:, 1:]] = IGNORE
        return Slot(tokens_BT, labels_BT, [], int(np.count_nonzero(labels_BT != IGNORE)), starts_BT)

    def held(self, i: int) -> Slot:
        return self.slot(0, i, 0)


def trace(run: Run, mesh: Mesh, data: MadeUp) -> tuple[Trace | None, Replica]:
    """STEPS steps in the layout of `mesh`; the trace on the first rank, and each rank's replica as they leave it."""
    replica = Replica(run, build_part(run, mesh), mesh)
    found = Trace()
    for step in range(1, STEPS + 1):
        ballot = replica.compute(step, data.slot, lambda phase: None)
        verdict, chunks = replica.voter.vote(ballot, replica.reducer.finish(), stop=False)
        found.losses.append(verdict.loss)
        found.norms.append(verdict.gradient_norm)
        if step == 1:
            pairs = zip(replica.buckets, chunks, strict=True)
            mean = ((bucket, chunk / verdict.tokens) for bucket, chunk in pairs)
            held = (pair for bucket, chunk in mean for pair in entries(bucket, bucket.own.start, chunk))
            found.gradients = assembled(held, mesh)
        replica.commit(verdict, chunks, run.optimizer.lr, step - 1)
    found.weights = assembled(replica.state(share=True).items(), mesh)
    found.held_out, _ = evaluate(replica.model, replica.losses, data.held, 3, mesh)
    return (found if mesh.world.rank == 0 else None), replica


def assembled(held: Any, mesh: Mesh) -> dict[str, Tensor]:
    """Whole tensors, on the first rank, from the pieces that all ranks hold; {} elsewhere.

    Raises AssertionError if they do not make up each element exactly once.
    """
    mine = [(name, entry) for name, entry in held]
    everyone: list[Any] = [mine]
    if mesh.world.group is not None:
        everyone = [None] * mesh.world.size if mesh.world.rank == 0 else None  # type: ignore[assignment]
        dist.gather_object(mine, everyone, group=mesh.world.group)
    whole: dict[str, Tensor] = {}
    times: dict[str, Tensor] = {}
    for name, entry in (pair for rank in everyone or () for pair in rank):
        assert isinstance(entry, Entry)
        whole.setdefault(name, torch.zeros(entry.shape, dtype=entry.dtype))
        times.setdefault(name, torch.zeros(entry.shape, dtype=torch.int32))
        for piece in entry.pieces:
            box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.tensor.shape, strict=True))
            whole[name][box] = piece.tensor.detach().cpu()
            times[name][box] += 1
    for name, count in times.items():
        assert bool((count == 1).all()), f"{name}: an element is held {count.unique().tolist()} times"
    return whole


def reference(run: Run, data: MadeUp) -> Trace:
    """The same steps by one process without lanes, buckets or mesh: one gradient, torch.optim.AdamW, fp32."""
    model = build(run.model)
    model.objective = Objective(run.train.label_smoothing, run.train.z_loss)
    fill(model, run.train.seed)
    kinds = {spec.name: spec.kind for spec in model.table()}
    named = dict(model.named_parameters())
    free = [p for name, p in named.items() if kinds[name] in run.optimizer.no_decay]
    decaying = [p for name, p in named.items() if kinds[name] not in run.optimizer.no_decay]
    optimizer = torch.optim.AdamW(
        [{"params": decaying, "weight_decay": run.optimizer.weight_decay}, {"params": free, "weight_decay": 0.0}],
        lr=run.optimizer.lr,
        betas=run.optimizer.betas,
        eps=run.optimizer.eps,
    )
    found = Trace()
    for step in range(1, STEPS + 1):
        nll, tokens, counts = 0.0, 0, None
        model.train()
        for slot, key in _slots(run, data, step):
            output = model(key=key, **inputs(slot, CPU))
            output.loss_sum.backward()
            nll += output.nll_sum.double().item()
            tokens += slot.valid
            if output.expert_counts is not None:
                counts = output.expert_counts if counts is None else counts + output.expert_counts
        for parameter in named.values():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = gradient / tokens
        norm = sqrt(sum(p.grad.double().square().sum().item() for p in named.values() if p.grad is not None))
        found.losses.append(nll / tokens)
        found.norms.append(norm)
        if step == 1:
            found.gradients = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        if run.optimizer.clip:
            torch.nn.utils.clip_grad_norm_(named.values(), run.optimizer.clip)
        optimizer.step()
        optimizer.zero_grad()
        if counts is not None:
            model.balance(counts)
    found.weights = {f"model/{name}": p.detach() for name, p in named.items()}
    for name, parameter in named.items():
        for kind in ("exp_avg", "exp_avg_sq"):
            found.weights[f"{kind}/{name}"] = optimizer.state[parameter][kind]
    found.weights |= {f"buffer/{name}": b for name, b in model.state_dict().items() if name not in named}
    model.eval()
    with torch.no_grad():
        held = [data.held(i) for i in range(3)]
        losses = [model(**inputs(slot, CPU)).nll_sum.item() for slot in held]
    found.held_out = sum(losses) / sum(s.valid for s in held)
    return found


def _slots(run: Run, data: MadeUp, step: int) -> Iterator[tuple[Slot, Tensor]]:
    for lane in range(run.batch.lanes):
        for k in range(run.batch.microbatches):
            yield data.slot(step, lane, k), torch.tensor(slot_key(run.train.seed, step, lane, k))
