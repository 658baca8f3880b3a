"""The reducer, the vote and the optimizer against one process and against sums worked out independently."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lanewise.config import Optimizer
from lanewise.lanes.adamw import ShardedAdamW
from lanewise.lanes.copies import Copies
from lanewise.lanes.flat import Held, lay_out
from lanewise.lanes.reducer import Reducer
from lanewise.lanes.vote import Ballot, Voter
from lanewise.models.spec import ParamSpec
from processes import on_ranks


class Toy(nn.Module):
    """Odd sizes, a parameter that only some lanes use, one that none uses, an empty one, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.a = nn.Parameter(torch.randn(37, 53, generator=generator))
        self.b = nn.Parameter(torch.randn(53, generator=generator))
        self.c = nn.Parameter(torch.randn(1025, 3, generator=generator))
        self.sometimes = nn.Parameter(torch.randn(11, generator=generator))
        self.never = nn.Parameter(torch.randn(5, generator=generator))
        self.empty = nn.Parameter(torch.randn(0, 4, generator=generator))
        self.frozen = nn.Parameter(torch.randn(6, generator=generator), requires_grad=False)

    def table(self) -> list[ParamSpec]:
        kinds = {"b": "bias"}
        return [ParamSpec(n, tuple(p.shape), kinds.get(n, "linear"), "normal", 1.0) for n, p in self.named_parameters()]

    def forward(self, x: torch.Tensor, lane: int) -> torch.Tensor:
        y = torch.tanh(x @ self.a + self.b).sum() + (self.c * x.sum()).sin().sum() + self.empty.sum()
        return y * self.sometimes.prod() if lane % 3 == 1 else y


def inputs(step: int, lane: int, k: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10007 * step + 101 * lane + k)
    return torch.randn(4, 37, generator=generator)


def train(rank, size, lanes, microbatches, zero, dtype=torch.float32, steps=3, poison=None):
    """Three steps; returns (losses, norms, weights, moments of this rank by name)."""
    group = dist.group.WORLD if size > 1 else None
    model = Toy()
    values = [(n, p.detach().clone()) for n, p in model.named_parameters()]
    copies = Copies(group, size, rank)
    named = list(model.named_parameters())
    buckets = lay_out(named, model.table(), lambda spec: Held((0,) * len(spec.shape), 0, 1, copies), dtype, 0.005)
    assert len(buckets) >= 3
    optimizer = ShardedAdamW(Optimizer(lr=0.01), buckets, zero)
    with torch.no_grad():
        for part in optimizer.parts:
            for place in part.bucket.places:
                value = dict(values)[place.spec.name].flatten()
                part.bucket.weights[place.start : place.stop] = value
                a, b = max(part.start, place.start), min(part.stop, place.stop)
                part.master[max(a - part.start, 0) : max(b - part.start, 0)] = value[a - place.start : b - place.start]
    reducer = Reducer(buckets, lanes, microbatches, size, rank, zero == 2)
    voter = Voter(buckets, {name: [p.numel()] for name, p in named}, group)
    losses, norms = [], []
    for step in range(steps):
        ballot = Ballot(lanes, torch.device("cpu"))
        for lane in reducer.mine:
            for k in range(microbatches):
                reducer.begin(lane, k)
                loss = model(inputs(step, lane, k).to(dtype), lane)
                if poison == (step, lane):
                    loss = loss * float("inf")
                loss.backward()
                reducer.end()
                ballot.add(lane, loss.detach(), 3 + lane, torch.tensor([[lane, 1]]))
        verdict, chunks = voter.vote(ballot, reducer.finish(), stop=False)
        losses.append(verdict.loss)
        norms.append(verdict.gradient_norm)
        assert verdict.tokens == microbatches * sum(3 + lane for lane in range(lanes))
        assert verdict.counts.tolist() == [[microbatches * sum(range(lanes)), microbatches * lanes]]
        if verdict.finite:
            optimizer.step(chunks, verdict.tokens, 0.01, step)
    held = sum(part.exp_avg.numel() for part in optimizer.parts)
    return losses, norms, {n: p.detach().clone() for n, p in model.named_parameters()}, held


def same(a, b):
    return a[0] == b[0] and a[1] == b[1] and all(torch.equal(a[2][n], b[2][n]) for n in a[2])


@pytest.mark.parametrize(("lanes", "microbatches"), [(8, 1), (8, 2), (5, 1), (6, 3), (7, 2)])
def test_same_bits_on_any_number_of_replicas(lanes, microbatches):
    alone = train(0, 1, lanes, microbatches, 1)
    for size, zero in [(2, 0), (2, 2), (3, 1), (4, 2), (5, 1), (5, 0)]:
        results = on_ranks(size, train, lanes, microbatches, zero)
        assert all(same(alone, result) for result in results), (size, zero)


def test_same_bits_in_bf16_with_fp32_masters():
    alone = train(0, 1, 4, 2, 1, torch.bfloat16)
    for size, zero in [(2, 0), (3, 1), (4, 2)]:
        assert all(same(alone, r) for r in on_ranks(size, train, 4, 2, zero, torch.bfloat16))


def test_against_plain_autograd_and_adamw():
    """The reference knows no buckets, lanes or trees: one backward over the sum, torch.optim.AdamW."""
    lanes, microbatches = 6, 2
    losses, norms, weights, _ = train(0, 1, lanes, microbatches, 1)
    model = Toy()
    groups = [{"params": [p for n, p in model.named_parameters() if n != "b" and p.requires_grad], "weight_decay": 0.1}]
    groups.append({"params": [model.b], "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        total = sum(
            model(inputs(step, lane, k), lane) for lane, k in itertools.product(range(lanes), range(microbatches))
        )
        tokens = microbatches * sum(3 + lane for lane in range(lanes))
        (total / tokens).backward()
        for p in model.parameters():
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.stack([g.double().square().sum() for g in grads]).sum().sqrt().item()
        assert losses[step] == pytest.approx(total.item() / tokens, rel=1e-5)
        assert norms[step] == pytest.approx(norm, rel=1e-5)
        optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(weights[name], p.detach(), rtol=2e-4, atol=2e-4, msg=name)
    assert torch.equal(weights["frozen"], Toy().frozen), "a frozen parameter neither moves nor decays"


def test_one_lane_that_is_not_finite_voids_the_step_everywhere():
    """P3: the weights after a poisoned last step are those of the steps before it, on every replica and layout."""
    for zero in (0, 1, 2):
        for poisoned in on_ranks(3, train, 5, 1, zero, torch.float32, 3, (2, 4)):
            clean = train(0, 1, 5, 1, 1, torch.float32, 2)
            assert poisoned[0][:2] == clean[0]
            assert not torch.isfinite(torch.tensor(poisoned[0][2]))
            assert all(torch.equal(poisoned[2][n], clean[2][n]) for n in clean[2])


def test_zero_shards_the_optimizer():
    (*_, alone), full, sharded = train(0, 1, 4, 1, 1), on_ranks(4, train, 4, 1, 0), on_ranks(4, train, 4, 1, 1)
    assert all(held >= alone for *_, held in full)
    assert all(held < 0.5 * alone for *_, held in sharded)


def test_slots_out_of_order_are_refused():
    """In every stage by itself: another order would add up to other bits."""
    model = Toy()
    whole = Held((0, 0), 0, 1, Copies())
    buckets = lay_out(list(model.named_parameters()), model.table(), lambda spec: whole, torch.float32, 0.005)
    reducer = Reducer(buckets, 2, 2, 1, 0, free_early=False)
    reducer.begin(0, 0, stage=3)
    with pytest.raises(AssertionError, match="in order"):
        reducer.begin(0, 1)
    reducer.begin(0, 1, stage=3)
    with pytest.raises(AssertionError, match="in order"):
        reducer.begin(1, 1, stage=3)
