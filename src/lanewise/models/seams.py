"""Where a model that is spread over ranks meets the other ranks. The models themselves know nothing of processes: they
call these seams, which here, in one process, change nothing. `parallel/` puts its own in their place.

Three sets of tokens are told apart. The microbatch is what the data yields. Of it a rank works on its *share* (some
rows, some positions; all by default), and between the layers it keeps the hidden states of its *own* tokens only, which
the ranks of a tensor-parallel group divide among them.
"""

import torch.nn.functional as F
from torch import Tensor

from lanewise.models.loss import cross_entropy_sum


class Seams:
    def share(self, x_BT: Tensor) -> Tensor:
        """Of a microbatch, the rows and positions this rank works on."""
        return x_BT

    def own(self, x_BT: Tensor) -> Tensor:
        """Of the share, the tokens whose hidden states this rank keeps between the layers."""
        return x_BT

    def numbers(self) -> Tensor | None:
        """The place of each own token in the microbatch, row by row: int64 [B, T]. None: 0, 1, 2, ..."""
        return None

    def whole(self, x_BTH: Tensor) -> Tensor:
        """From own tokens to the share."""
        return x_BTH

    def joined(self, x_BTH: Tensor) -> Tensor:
        """From partial sums over the share to the whole sums of own tokens."""
        return x_BTH

    def total(self, counts: Tensor) -> Tensor:
        """Integers summed over the ranks that have other tokens of the same sequences."""
        return counts

    def embedded(self, tokens_BT: Tensor, weight_VH: Tensor) -> Tensor:
        """The embeddings of own tokens: [B, T, H], from the share's tokens."""
        return F.embedding(tokens_BT, weight_VH)

    def loss(self, x_BTH: Tensor, weight_VH: Tensor, labels_BT: Tensor) -> Tensor:
        """Summed cross-entropy of the share, from own last hidden states."""
        return cross_entropy_sum(x_BTH, weight_VH, labels_BT)


ALONE = Seams()
