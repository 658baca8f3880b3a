"""Does a foreign module on a layout compute what it computes in one process? Measured, number by number."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lanewise.config import Run
from lanewise.elastic.world import World
from lanewise.errors import EXIT_DONE, EXIT_FAILED
from lanewise.models.spec import IGNORE
from lanewise.parallel.layout import Layout
from lanewise.parallel.own.batches import Loss, next_token_loss, rows_of
from lanewise.parallel.own.derive import arguments
from lanewise.parallel.own.parallelize import parallelize
from lanewise.parallel.own.plan import KINDS, Plan
from lanewise.parallel.own.source import made
from lanewise.parallel.prove import AFTER_STEPS, TOLERANCE, Finding, show

STEPS = 3
CLIP = 0.05  # small enough to be felt
TOKENS = 12
NOISE = 1e-5  # relative; a gradient that another order of its sums changes more is rounding itself

Batch = tuple[Any, Any]


@dataclass(frozen=True)
class OwnProof:
    """What a prove worker is asked to do with a module of the user's (see `lanewise.worker`)."""

    source: str
    layout: Layout
    full: bool
    as_json: bool
    run: Run

    def work(self, world: World, _status: Any, _stop: Any) -> int:
        module, batch = made(self.source, self.layout, self.full)
        microbatches = max(2, self.layout.pp)
        if batch is None:
            batches = made_up(module, 2 * microbatches * self.layout.fsdp * self.layout.replicas(world.size))
        else:
            batches, microbatches = [batch] * STEPS, 1
        findings = prove(module, self.layout, batches, microbatches, shown=not self.as_json)
        if world.rank == 0:
            show(findings, self.layout, world.size, self.as_json)
        return EXIT_DONE if all(finding.passed for finding in findings) else EXIT_FAILED


@dataclass
class Trace:
    """losses, norms: of each step; gradients: of the first, before clipping; weights: after the last; held_out: the
    loss of the first batch then."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    held_out: float = 0.0


def prove(
    module: nn.Module,
    layout: Layout,
    batches: Sequence[Batch],
    microbatches: int,
    loss: Loss = next_token_loss,
    plan: Plan | None = None,
    shown: bool = False,
) -> list[Finding]:
    """Every rank calls it, with a module in fp32; the findings are the same on all. Dropout is switched off.

    batches: inputs and labels of STEPS steps, the same on every rank.
    """
    module.eval()
    alone = copy.deepcopy(module) if not dist.is_initialized() or dist.get_rank() == 0 else None
    parallel = parallelize(module, layout, plan, example=rows_of(batches[0][0], slice(0, 2)), loss=loss, show=shown)
    optimizer = _adam(parallel.parameters())
    found = Trace()
    for step, (inputs, labels) in enumerate(batches):
        found.losses.append(parallel.forward_backward(inputs, labels, microbatches))
        if step == 0:
            found.gradients = dict(parallel.whole(gradients=True))
        found.norms.append(parallel.clip(CLIP))
        optimizer.step()
    found.weights = dict(parallel.whole())
    found.held_out = parallel.evaluate(*batches[0], microbatches)
    findings: list[Any] = [None]
    if alone is not None:
        noise = _noise(copy.deepcopy(alone), batches[0], loss)
        findings = [_findings(found, _reference(alone, batches, loss), noise, parallel.plan)]
    if dist.is_initialized():
        dist.broadcast_object_list(findings, 0)
    return findings[0]


def made_up(module: nn.Module, rows: int) -> list[Batch]:
    """Token ids and labels of some sequences, with ignored labels anywhere, and rows that have one or none."""
    vocabulary = min(each.num_embeddings for each in module.modules() if isinstance(each, nn.Embedding))
    random = np.random.default_rng(0)
    batches = []
    for _ in range(STEPS):
        tokens_BT = random.integers(vocabulary, size=(rows, TOKENS))
        labels_BT = np.where(random.random(tokens_BT.shape) < 0.2, IGNORE, tokens_BT)
        labels_BT[0, 2:] = IGNORE
        labels_BT[-1] = IGNORE
        batches.append((torch.from_numpy(tokens_BT), torch.from_numpy(labels_BT)))
    return batches


# ------------------------------------------------------------------------------------------------- one process


def _reference(module: nn.Module, batches: Sequence[Batch], loss: Loss) -> Trace:
    right = Trace()
    optimizer = _adam(module.parameters())
    for step, batch in enumerate(batches):
        right.losses.append(_gradients(module, [batch], loss))
        if step == 0:
            right.gradients = _copied(module)
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP, foreach=False)
        right.norms.append(norm.item())
        optimizer.step()
    right.weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    right.held_out = _gradients(module, [batches[0]], loss)
    return right


def _gradients(module: nn.Module, batches: Iterable[Batch], loss: Loss) -> float:
    """The mean loss over batches, and its gradients."""
    module.zero_grad()
    total, count = 0.0, 0.0
    for inputs, labels in batches:
        args, kwargs = arguments(inputs)
        terms, valid = loss(module(*args, **kwargs), labels)
        terms.backward()
        total, count = total + float(terms.detach()), count + float(valid)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad / count
    return total / count


def _noise(module: nn.Module, batch: Batch, loss: Loss) -> dict[str, float]:
    """By how much gradients change, in one process, if the rows are summed one by one."""
    _gradients(module, [batch], loss)
    whole = _copied(module)
    rows = len(next(iter(batch[0].values())) if isinstance(batch[0], dict) else batch[0])
    single = [slice(row, row + 1) for row in range(rows)]
    _gradients(module, [(rows_of(batch[0], row), rows_of(batch[1], row)) for row in single], loss)
    return {name: (gradient - whole[name]).abs().max().item() for name, gradient in _copied(module).items()}


def _copied(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def _adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    # An epsilon that keeps the update a smooth function of the gradient, as `prove` has it for the project's models.
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4, foreach=False)


# ---------------------------------------------------------------------------------------------------- comparing


def _findings(found: Trace, right: Trace, noise: dict[str, float], plan: Plan) -> list[Finding]:
    findings = [
        _worst("loss of each step", _numbers(found.losses, right.losses)),
        _worst("gradient norm of each step", _numbers(found.norms, right.norms)),
        _worst("held-out loss", _numbers([found.held_out], [right.held_out])),
    ]
    kinds = {kind: [entry.name for entry in plan.table if entry.kind == kind] for kind in KINDS}
    for kind, names in kinds.items():
        errors = {name: _error(found.gradients[name], right.gradients[name], noise[name]) for name in names}
        findings += [_worst(f"gradient of {kind}", errors)] if errors else []
    for kind, names in kinds.items():
        errors = {name: _error(found.weights[name], right.weights[name]) for name in names}
        findings += [_worst(f"{kind} after {STEPS} steps", errors, AFTER_STEPS)] if errors else []
    return findings


def _error(found: Tensor, right: Tensor, noise: float = 0.0) -> float:
    """Largest difference relative to the largest element, or to what the rounding of one process is NOISE of."""
    scale = max(right.abs().max().item(), noise / NOISE, 1e-30)
    return (found.cpu() - right).abs().max().item() / scale


def _numbers(found: list[float], right: list[float]) -> dict[str, float]:
    return {f"number {i}": abs(a - b) / abs(b) for i, (a, b) in enumerate(zip(found, right, strict=True), 1)}


def _worst(what: str, errors: dict[str, float], tolerance: float = TOLERANCE) -> Finding:
    name = max(errors, key=lambda name: float("inf") if errors[name] != errors[name] else errors[name])
    return Finding(what, errors[name], name, tolerance)
