"""The seams of a model that is spread over the ranks of a replica (`models/seams.py` says what each is for)."""

import torch
from torch import Tensor

from lanewise.config import Batch
from lanewise.models.seams import Seams
from lanewise.parallel import vocabulary
from lanewise.parallel.collectives import gather, scatter_sum, total
from lanewise.parallel.mesh import Mesh


class Spread(Seams):
    """Between the layers each rank of a tensor-parallel group keeps the states of its own stretch of tokens: what is
    pointwise (norms, residuals, dropout, the router, narrow projections) is then done once for each token."""

    def __init__(self, mesh: Mesh, batch: Batch, vocabulary_size: int) -> None:
        self.tp = mesh.group(("tp",))
        self.rank, self.ranks = mesh.position(("tp",))
        self.first_row = self.rank * vocabulary_size // self.ranks
        places_BT = torch.arange(batch.size * batch.sequence_length, device=mesh.world.device)
        self.places_BT = self.own(self.share(places_BT.view(batch.size, -1)))

    def own(self, x_BT: Tensor) -> Tensor:
        return x_BT.chunk(self.ranks, dim=1)[self.rank]

    def numbers(self) -> Tensor:
        return self.places_BT

    def whole(self, x_BTH: Tensor) -> Tensor:
        return x_BTH if self.tp is None else gather(x_BTH, self.tp, 1)

    def joined(self, x_BTH: Tensor) -> Tensor:
        return x_BTH if self.tp is None else scatter_sum(x_BTH, self.tp, 1)

    def total(self, counts: Tensor) -> Tensor:
        return counts if self.tp is None else total(counts, self.tp)

    def embedded(self, tokens_BT: Tensor, weight_VH: Tensor) -> Tensor:
        if self.tp is None:
            return super().embedded(tokens_BT, weight_VH)
        return self.joined(vocabulary.embedded_part(tokens_BT, weight_VH, self.first_row))

    def loss(self, x_BTH: Tensor, weight_VH: Tensor, labels_BT: Tensor) -> Tensor:
        if self.tp is None:
            return super().loss(x_BTH, weight_VH, labels_BT)
        return vocabulary.cross_entropy_sum(self.whole(x_BTH), weight_VH, labels_BT, self.first_row, self.tp)
