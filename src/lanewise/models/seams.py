"""Where a model that is spread over ranks meets the other ranks. The models themselves know nothing of processes: they
call these seams, which here, in one process, change nothing. `parallel/` puts its own in their place.

Three sets of tokens are told apart. The microbatch is what the data yields. Of it a rank works on its *share* (some
rows, some positions; all by default), and between the layers it keeps the hidden states of its *own* tokens only, which
the ranks of a tensor-parallel group divide among them.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from lanewise.models.attention import causal_attention
from lanewise.models.loss import Objective, cross_entropy_sum


class Seams:
    def share(self, x_BT: Tensor) -> Tensor:
        """Of a microbatch, the rows and positions this rank works on."""
        return x_BT

    def positions(self, x_TD: Tensor) -> Tensor:
        """Of something given for each position, what the share's positions have."""
        return x_TD

    def own(self, x_BT: Tensor) -> Tensor:
        """Of the share, the tokens whose hidden states this rank keeps between the layers."""
        return x_BT

    def numbers(self) -> Tensor | None:
        """The place of each own token in the microbatch, row by row: int64 [B, T]. None: 0, 1, 2, ..."""
        return None

    def whole(self, x_BTH: Tensor) -> Tensor:
        """From own tokens to the share."""
        return x_BTH

    def whole_pair(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """The same for two that travel together, side by side in their last dim."""
        return left, right

    def joined(self, x_BTH: Tensor) -> Tensor:
        """From partial sums over the share to the whole sums of own tokens."""
        return x_BTH

    def everywhere(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """From the share's positions to all positions, for the two that every query may look at, side by side in their
        last dim: keys and values, or what they come from."""
        return left, right

    def attend(self, q_BNTD: Tensor, k_BGTD: Tensor, v_BGTC: Tensor, scale: float, starts_BT: Tensor | None) -> Tensor:
        """Causal attention of the share's queries over keys and values of all positions: [B, T, N, C]. starts_BT: the
        position, among all, at which each query's document starts, in a share of rows of several."""
        return causal_attention(q_BNTD, k_BGTD, v_BGTC, scale, starts_BT)

    def dispatched(
        self, x_PH: Tensor, sizes: list[int]
    ) -> tuple[Callable[[], Tensor], list[int], Callable[[Tensor], Tensor]]:
        """Sends rows sorted by expert, `sizes[e]` for each of all experts, to where their experts are. Yields what
        waits for the rows that this rank's experts get, how many each, and the way back for what they make of them."""
        return lambda: x_PH, sizes, lambda y_PH: y_PH

    def total(self, counts: Tensor) -> Tensor:
        """Integers summed over the ranks that have other tokens of the same sequences."""
        return counts

    def embedded(self, tokens_BT: Tensor, weight_VH: Tensor) -> Tensor:
        """The embeddings of own tokens: [B, T, H], from the share's tokens."""
        return F.embedding(tokens_BT, weight_VH)

    def loss(self, x_BTH: Tensor, weight_VH: Tensor, labels_BT: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
        """Of the share, from own last hidden states: the sum to minimise, and that of cross-entropy alone."""
        return cross_entropy_sum(x_BTH, weight_VH, labels_BT, objective)


ALONE = Seams()
