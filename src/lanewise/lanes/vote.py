"""The vote that makes a step true or void: one small fp64 all-reduce, exact in any order.

Each number in it is either filled in by one rank and zero on the others (losses by lane and part, norm by block), or an
integer below 2^53. Adding zeros and such integers is exact, so the sum has the same bits on any number of replicas.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lanewise.lanes.flat import Bucket, norm_positions
from lanewise.lanes.norm import block_squares


@dataclass(frozen=True)
class Verdict:
    """What all replicas agree on about a step.

    loss: mean loss of a valid token; gradient_norm: of the mean gradient, before clipping (both may be non-finite).
    tokens: valid labels in the step. counts: tokens sent to each expert, [moe layers, experts] int64, or None.
    stop, switch: whether any rank asks to stop, or has another layout for all.
    """

    loss: float
    gradient_norm: float
    tokens: int
    counts: Tensor | None
    stop: bool
    switch: bool

    @property
    def finite(self) -> bool:
        return bool(torch.isfinite(torch.tensor([self.loss, self.gradient_norm], dtype=torch.float64)).all())


class Ballot:
    """One rank's part of the vote, filled in as its lanes run. The tokens of a microbatch may be divided among the
    ranks of a replica in `parts`, of which this rank has number `part`, or None: another one speaks for it."""

    def __init__(self, lanes: int, device: torch.device, parts: int = 1, part: int | None = 0) -> None:
        self.part = part
        self.loss = torch.zeros(lanes, parts, dtype=torch.float64, device=device)
        self.tokens = torch.zeros(lanes, dtype=torch.float64, device=device)
        self.counts: Tensor | None = None

    def add(self, lane: int, nll_sum: Tensor, valid: int, counts: Tensor | None) -> None:
        """One microbatch: sum of its token losses, its valid labels, own tokens sent to each expert (None: no experts).

        valid counts the whole microbatch: the first part speaks for it. Experts' tokens add up over all ranks.
        """
        if self.part is not None:
            self.loss[lane, self.part] += nll_sum.double()
        if self.part == 0:
            self.tokens[lane] += valid
        if counts is not None:
            self.counts = counts.double() if self.counts is None else self.counts + counts


class Voter:
    """Casts and counts the ballots of all ranks (`group`; None for one alone).

    numels: the elements of each box of each parameter of the whole model.
    """

    def __init__(
        self, buckets: Sequence[Bucket], numels: Mapping[str, Sequence[int]], group: dist.ProcessGroup | None
    ) -> None:
        self.group = group
        positions, self.blocks = norm_positions(buckets, numels)
        self.trained = [(b, at) for b, at in zip(buckets, positions, strict=True) if b.trainable]

    def vote(
        self, ballot: Ballot, chunks: Iterable[Tensor], stop: bool, switch: bool = False
    ) -> tuple[Verdict, list[Tensor]]:
        """The verdict, and the reduced chunks, which are looked at as they arrive.

        Raises no error on non-finite numbers: they reach every replica and the step is void on all of them.
        """
        squares = ballot.loss.new_zeros(self.blocks)
        arrived = []
        for (bucket, positions), chunk in zip(self.trained, chunks, strict=True):
            first = bucket.own.start // bucket.block
            mine = positions[first : first + bucket.chunk // bucket.block].to(squares.device)
            real = mine >= 0
            squares[mine[real]] = block_squares(chunk, bucket.block)[real]
            arrived.append(chunk)
        flags = ballot.loss.new_tensor([float(stop), float(switch)])
        counts = [] if ballot.counts is None else [ballot.counts.flatten()]
        parts = [ballot.loss.flatten(), ballot.tokens, flags, squares, *counts]
        numbers = torch.cat(parts)
        if self.group is not None:
            dist.all_reduce(numbers, group=self.group)
        losses, tokens, flags, squares, *counts = numbers.split([p.numel() for p in parts])
        valid = int(tokens.sum().item())
        verdict = Verdict(
            loss=losses.sum().item() / max(valid, 1),
            gradient_norm=squares.sum().sqrt().item() / max(valid, 1),
            tokens=valid,
            counts=counts[0].view_as(ballot.counts).to(torch.int64) if ballot.counts is not None else None,
            stop=flags[0].item() > 0,
            switch=flags[1].item() > 0,
        )
        return verdict, arrived
