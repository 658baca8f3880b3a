"""One process, one sample at a time, fp64, plain autograd: what a step should come to.

It shares with the trainer the models (which tests/models checks against others) and their initial weights. Samples,
sums, denominators and norms are worked out here from the texts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from lanewise.config import Run
from lanewise.data import tokenizer
from lanewise.models.build import build
from lanewise.models.init import fill
from lanewise.models.router import Router
from system import tensors

BYTES = tokenizer.train([], 257)  # data.tokenizer=bytes


@dataclass
class Reference:
    """Of the mean over all valid tokens: loss in nats, gradients by name, their norm. `tokens`: how many are valid.

    sums: (sum of token losses, valid tokens) of each sample. loads: tokens sent to each expert, by router.
    """

    loss: float
    tokens: int
    gradients: dict[str, Tensor]
    norm: float
    sums: list[tuple[float, int]]
    loads: dict[str, Tensor] = field(default_factory=dict)


def window(text: str, length: int) -> tuple[Tensor, Tensor]:
    """(tokens [1, T], labels [1, T]) of a document no longer than T bytes: it predicts each next byte, then the end."""
    ids = [*BYTES.encode(text), BYTES.end]
    assert len(ids) == len(text.encode()) + 1
    pad = length - len(ids) + 1
    assert pad >= 0, text
    return torch.tensor([ids[:-1] + [BYTES.end] * pad]), torch.tensor([ids[1:] + [-100] * pad])


def reference(run: Run, texts: Sequence[str], keys: Sequence[int] | None = None) -> Reference:
    """One step on documents that fit into a window each. keys: of their dropout masks; without, no dropout."""
    model = build(run.model).double()
    fill(model, run.train.seed)
    routers = {name: module for name, module in model.named_modules() if isinstance(module, Router)}
    loads = {name: torch.zeros(module.weight.shape[0], dtype=torch.int64) for name, module in routers.items()}
    choices: dict[str, Tensor] = {}
    for name, module in routers.items():
        module.register_forward_hook(lambda _, __, choice, name=name: choices.update({name: choice.experts_BTK[0]}))
    sums, objectives = [], []
    for i, text in enumerate(texts):
        tokens, labels = window(text, run.batch.sequence_length)
        key = None if keys is None else torch.tensor(keys[i])
        output = model.train()(tokens, labels, key)
        for name, chosen_TK in choices.items():
            predicted = len(text.encode()) - name.startswith("mtp.")  # one token ahead there is one less to predict
            loads[name] += torch.bincount(chosen_TK[:predicted].flatten(), minlength=len(loads[name]))
        if key is None:
            logits = model.logits(tokens)[0]
            nll = F.cross_entropy(logits, labels[0], reduction="sum", ignore_index=-100)
            torch.testing.assert_close(nll, output.nll_sum)
        sums.append((output.nll_sum.item(), int((labels >= 0).sum())))
        objectives.append(output.loss_sum)
    valid = sum(n for _, n in sums)
    (torch.stack(objectives).sum() / valid).backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt().item()
    return Reference(sum(s for s, _ in sums) / valid, valid, gradients, norm, sums, loads)


def gradients_of(run: Run, checkpoint: Path) -> dict[str, Tensor]:
    """What the optimizer was given in the first step: the first moment after one update is (1 - beta1) * gradient."""
    return {name: m / (1 - run.optimizer.betas[0]) for name, m in tensors(checkpoint, "exp_avg/").items()}


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 2e-5) -> None:
    """Per parameter, by the norm of the difference. Where the gradient is exactly zero it must be so."""
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        error = (found[name].double() - want.double()).norm().item()
        assert error <= tolerance * want.double().norm().item(), f"{name}: {error} off {want.norm().item()}"
