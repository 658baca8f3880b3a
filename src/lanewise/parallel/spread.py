"""The seams of a model that is spread over the ranks of a replica (`models/seams.py` says what each is for)."""

from collections.abc import Callable

import torch
from torch import Tensor

from lanewise.config import Batch
from lanewise.models.loss import Objective, cross_entropy_sum
from lanewise.models.seams import Seams
from lanewise.parallel import expert, vocabulary
from lanewise.parallel.collectives import gather, scatter_sum, total
from lanewise.parallel.context import Context
from lanewise.parallel.layout import ROWS
from lanewise.parallel.mesh import Mesh


class Spread(Seams):
    """A microbatch's rows are dealt to the ranks of fsdp and ep, its positions to those of cp; the ranks of tp share
    rows and positions. Between the layers each of these keeps the states of its own stretch of tokens: what is done
    token by token (norms, residuals, dropout, the router, narrow projections) is then done once for each."""

    def __init__(self, mesh: Mesh, batch: Batch, vocabulary_size: int) -> None:
        self.tp, self.ep, self.sequence = mesh.group(("tp",)), mesh.group(("ep",)), mesh.group(("cp", "tp"))
        self.rank, self.ranks = mesh.position(("tp",))
        self.row, self.rows = mesh.position(ROWS)
        cp = mesh.group(("cp",))
        self.context = Context(cp, *mesh.position(("cp",))) if cp is not None else None
        self.words = None if self.tp is None else vocabulary.SharedWords(vocabulary_size, self.tp)
        places_BT = torch.arange(batch.size * batch.sequence_length, device=mesh.world.device)
        self.places_BT = self.own(self.share(places_BT.view(batch.size, -1)))

    def share(self, x_BT: Tensor) -> Tensor:
        x_BT = x_BT.chunk(self.rows)[self.row]
        return self.context.pick(x_BT, 1) if self.context else x_BT

    def positions(self, x_TD: Tensor) -> Tensor:
        return self.context.pick(x_TD, 0) if self.context else x_TD

    def own(self, x_BT: Tensor) -> Tensor:
        return x_BT.chunk(self.ranks, dim=1)[self.rank]

    def numbers(self) -> Tensor:
        return self.places_BT

    def whole(self, x_BTH: Tensor) -> Tensor:
        return x_BTH if self.tp is None else gather(x_BTH, self.tp, 1)

    def joined(self, x_BTH: Tensor) -> Tensor:
        return x_BTH if self.tp is None else scatter_sum(x_BTH, self.tp, 1)

    def total(self, counts: Tensor) -> Tensor:
        return counts if self.sequence is None else total(counts, self.sequence)

    def whole_pair(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return (left, right) if self.tp is None else _side_by_side(self.whole, left, right)

    def everywhere(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return _side_by_side(self.context.everywhere, left, right) if self.context else (left, right)

    def attend(self, q_BNTD: Tensor, k_BGTD: Tensor, v_BGTC: Tensor, scale: float, starts_BT: Tensor | None) -> Tensor:
        attend = self.context.attend if self.context else super().attend
        return attend(q_BNTD, k_BGTD, v_BGTC, scale, starts_BT)

    def dispatched(
        self, x_PH: Tensor, sizes: list[int]
    ) -> tuple[Callable[[], Tensor], list[int], Callable[[Tensor], Tensor]]:
        return super().dispatched(x_PH, sizes) if self.ep is None else expert.dispatched(x_PH, sizes, self.ep)

    def embedded(self, tokens_BT: Tensor, weight_VH: Tensor) -> Tensor:
        if self.words is None:
            return super().embedded(tokens_BT, weight_VH)
        return self.joined(vocabulary.embedded_part(tokens_BT, weight_VH, self.words.first))

    def loss(self, x_BTH: Tensor, weight_VH: Tensor, labels_BT: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
        return cross_entropy_sum(self.whole(x_BTH), weight_VH, labels_BT, objective, self.words)


def _side_by_side(move: Callable[[Tensor], Tensor], left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    a, b = move(torch.cat((left, right), -1)).split([left.shape[-1], right.shape[-1]], -1)
    return a, b
