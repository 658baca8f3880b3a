"""Context parallel: the positions of a sequence dealt to ranks so that causal attention costs each the same.

The sequence is cut into 2n stretches, and rank r gets the r-th from the front and the r-th from the back: together as
many (query, key) pairs for everyone. Keys and values are gathered; a stretch of queries meets those before its end.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from lanewise.models.attention import causal_attention
from lanewise.parallel.collectives import gather


class Context:
    def __init__(self, group: dist.ProcessGroup, rank: int, ranks: int) -> None:
        self.group, self.rank, self.ranks = group, rank, ranks

    def pick(self, x: Tensor, dim: int) -> Tensor:
        """This rank's two stretches of all positions."""
        stretches = x.chunk(2 * self.ranks, dim)
        return torch.cat((stretches[self.rank], stretches[-1 - self.rank]), dim)

    def everywhere(self, x_BTX: Tensor) -> Tensor:
        """All positions in their order, from each rank's two stretches."""
        stretches = gather(x_BTX, self.group, 1).chunk(2 * self.ranks, dim=1)
        return torch.cat((*stretches[0::2], *stretches[::-2]), dim=1)

    def attend(self, q_BNTD: Tensor, k_BGTD: Tensor, v_BGTC: Tensor, scale: float, starts_BT: Tensor | None) -> Tensor:
        """Causal attention of this rank's two stretches of queries over the keys and values of all positions."""
        stretch = k_BGTD.shape[2] // (2 * self.ranks)
        numbers = (self.rank, 2 * self.ranks - 1 - self.rank)
        starts = (None, None) if starts_BT is None else starts_BT.split(stretch, dim=1)
        parts = []
        for q, number, start_BT in zip(q_BNTD.split(stretch, dim=2), numbers, starts, strict=True):
            seen = (number + 1) * stretch
            parts.append(causal_attention(q, k_BGTD[:, :, :seen], v_BGTC[:, :, :seen], scale, start_BT))
        return torch.cat(parts, dim=1)
