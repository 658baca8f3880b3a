"""AdamW on flat chunks: each copy updates what it owns (ZeRO-1/2) or everything (ZeRO-0).

Bits do not depend on the chunk: the update is elementwise, and chunks are cut at block boundaries.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from lanewise.config import Optimizer
from lanewise.lanes.flat import Bucket, Place
from lanewise.lanes.wire import gather


@dataclass
class Part:
    """What one process updates of a bucket: flat [n] fp32 tensors over bucket positions [start, start + n)."""

    bucket: Bucket
    start: int
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor

    @property
    def stop(self) -> int:
        return self.start + self.master.numel()

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds of this part, by kind."""
        return {"model": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}


class ShardedAdamW:
    """AdamW over buckets (Loshchilov & Hutter, arXiv:1711.05101), with fp32 master weights.

    In fp32 the masters are the model's own weights; in bf16 they are a separate fp32 chunk.
    zero: 0 updates everything on every copy; 1 and 2 update the own chunk and all-gather the weights.
    """

    def __init__(self, config: Optimizer, buckets: Sequence[Bucket], zero: int) -> None:
        self.config, self.sharded = config, zero > 0
        self.parts = [self._part(bucket) for bucket in buckets]

    def _part(self, bucket: Bucket) -> Part:
        start, stop = (bucket.own.start, bucket.own.stop) if self.sharded else (0, bucket.size)
        weights = bucket.weights[start:stop]
        master = weights if weights.dtype == torch.float32 else torch.zeros_like(weights, dtype=torch.float32)
        return Part(bucket, start, master, torch.zeros_like(master), torch.zeros_like(master))

    def decay(self, place: Place) -> float | None:
        """Weight decay of a parameter; None if it is frozen: it gets no update at all."""
        if not place.parameter.requires_grad:
            return None
        return 0.0 if place.spec.kind in self.config.no_decay else self.config.weight_decay

    def _gradients(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        """What the parts are updated with. ZeRO-0: every copy gets every chunk. Else the chunks themselves."""
        if self.sharded:
            return list(chunks)
        full, works = [], []
        for part, chunk in zip(self.parts, chunks, strict=True):
            group = part.bucket.copies.group
            if group is None:
                full.append(chunk)
                continue
            gradient = torch.empty(part.bucket.size, dtype=torch.float32, device=chunk.device)
            gradient[part.bucket.own] = chunk
            works += gather(gradient, group, part.bucket.number)
            full.append(gradient)
        for work in works:
            work.wait()
        return full

    def step(self, chunks: Sequence[Tensor], divisor: float, lr: float, update: int) -> None:
        """Update number `update` (from 0) with gradients chunks / divisor; then every copy's weights are new."""
        works: list[dist.Work] = []
        scale = torch.tensor(divisor, dtype=torch.float32, device=chunks[0].device)
        for part, gradient in zip(self.parts, self._gradients(chunks), strict=True):
            for decay, a, b in self._segments(part):
                adamw(
                    [part.master[a:b]],
                    [gradient[a:b]],
                    [part.exp_avg[a:b]],
                    [part.exp_avg_sq[a:b]],
                    max_exp_avg_sqs=[],
                    state_steps=[torch.tensor(float(update), device=gradient.device)],
                    fused=True,
                    amsgrad=False,
                    beta1=self.config.betas[0],
                    beta2=self.config.betas[1],
                    lr=lr,
                    weight_decay=decay,
                    eps=self.config.eps,
                    maximize=False,
                    grad_scale=scale,
                    found_inf=None,
                )
            works += self._publish(part)
        self._finish(works)

    def _segments(self, part: Part) -> Iterator[tuple[float, int, int]]:
        """(decay, from, to) of the part: runs of parameters with the same decay, padding with its left neighbour."""
        runs: list[tuple[float | None, int]] = []
        for place, a, _ in part.bucket.overlaps(part.start, part.stop):
            if not runs or runs[-1][0] != self.decay(place):
                runs.append((self.decay(place), a - part.start))
        runs.append((None, part.master.numel()))
        for (decay, start), (_, end) in pairwise(runs):
            if decay is not None:
                yield decay, start, end

    def _publish(self, part: Part) -> list[dist.Work]:
        weights = part.bucket.weights[part.start : part.stop]
        if weights.dtype != torch.float32:
            weights.copy_(part.master)
        group = part.bucket.copies.group
        return gather(part.bucket.weights, group, part.bucket.number) if self.sharded and group is not None else []

    def publish(self) -> None:
        """Bring the model's weights up to date with the masters, on every copy."""
        self._finish([work for part in self.parts for work in self._publish(part)])

    def _finish(self, works: Sequence[dist.Work]) -> None:
        for work in works:
            work.wait()
        for part in self.parts:
            part.bucket.refresh()
