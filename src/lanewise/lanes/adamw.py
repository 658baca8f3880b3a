"""AdamW on flat chunks: each replica updates what it owns (ZeRO-1/2) or everything (ZeRO-0).

Bits do not depend on the chunk: the update is elementwise, and chunks are cut at block boundaries.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from lanewise.config import Optimizer
from lanewise.lanes.flat import Bucket
from lanewise.models.spec import ParamSpec


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
    zero: 0 updates everything on every replica; 1 and 2 update the own chunk and all-gather the weights.
    """

    def __init__(
        self, config: Optimizer, buckets: Sequence[Bucket], group: dist.ProcessGroup | None, zero: int
    ) -> None:
        self.config, self.group = config, group
        self.sharded = zero > 0 and group is not None
        self.parts = [self._part(bucket) for bucket in buckets]
        self.updates = 0

    def _part(self, bucket: Bucket) -> Part:
        start, stop = (bucket.own.start, bucket.own.stop) if self.sharded else (0, bucket.size)
        weights = bucket.weights[start:stop]
        master = weights if weights.dtype == torch.float32 else torch.zeros_like(weights, dtype=torch.float32)
        return Part(bucket, start, master, torch.zeros_like(master), torch.zeros_like(master))

    def decays(self, spec: ParamSpec) -> bool:
        return spec.kind not in self.config.no_decay

    def gather_gradients(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        """ZeRO-0: every replica gets every chunk. Else the chunks themselves."""
        if self.sharded or self.group is None:
            return list(chunks)
        full = [torch.empty(part.bucket.size, dtype=torch.float32, device=c.device) for part, c in zip(self.parts, chunks, strict=True)]
        works = [dist.all_gather_into_tensor(f, c, group=self.group, async_op=True) for f, c in zip(full, chunks, strict=True)]
        for work in works:
            assert work is not None
            work.wait()
        return full

    def step(self, chunks: Sequence[Tensor], divisor: float, lr: float) -> None:
        """Update with gradients chunks / divisor, then bring every replica's weights up to date."""
        works = []
        self.updates += 1
        scale = torch.tensor(divisor, dtype=torch.float32, device=chunks[0].device)
        for part, gradient in zip(self.parts, self.gather_gradients(chunks), strict=True):
            for decay, a, b in self._segments(part):
                adamw(
                    [part.master[a:b]],
                    [gradient[a:b]],
                    [part.exp_avg[a:b]],
                    [part.exp_avg_sq[a:b]],
                    max_exp_avg_sqs=[],
                    state_steps=[torch.tensor(float(self.updates - 1), device=gradient.device)],
                    fused=True,
                    amsgrad=False,
                    beta1=self.config.betas[0],
                    beta2=self.config.betas[1],
                    lr=lr,
                    weight_decay=self.config.weight_decay if decay else 0.0,
                    eps=self.config.eps,
                    maximize=False,
                    grad_scale=scale,
                    found_inf=None,
                )
            works.append(self._publish(part))
        for work in works:
            if work is not None:
                work.wait()

    def _segments(self, part: Part) -> Iterator[tuple[bool, int, int]]:
        """(decays, from, to): runs of the part whose parameters share their decay; padding goes with its neighbour."""
        current: tuple[bool, int] | None = None
        for place, a, _ in part.bucket.overlaps(part.start, part.stop):
            decay = self.decays(place.spec)
            if current is None:
                current = (decay, 0)
            elif decay != current[0]:
                yield current[0], current[1], a - part.start
                current = (decay, a - part.start)
        if current is not None:
            yield current[0], current[1], part.master.numel()

    def _publish(self, part: Part) -> dist.Work | None:
        weights = part.bucket.weights[part.start : part.stop]
        if weights.dtype != torch.float32:
            weights.copy_(part.master)
        if not self.sharded:
            return None
        return dist.all_gather_into_tensor(part.bucket.weights, weights, group=self.group, async_op=True)

    def publish(self) -> None:
        """Bring the model's weights up to date with the masters, on every replica."""
        for work in [self._publish(part) for part in self.parts]:
            if work is not None:
                work.wait()
