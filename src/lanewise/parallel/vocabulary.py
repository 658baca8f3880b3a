"""The two ends of a model whose vocabulary is cut over ranks. No rank ever holds all logits of a token."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lanewise.models.loss import Read, Words, log_sum_exp
from lanewise.parallel.collectives import gathered


def embedded_part(tokens_BT: Tensor, weight_VH: Tensor, first: int) -> Tensor:
    """The embeddings of those tokens that are in this rank's rows [first, first + V), zero for the others."""
    local_BT = tokens_BT - first
    elsewhere_BT = (local_BT < 0) | (local_BT >= len(weight_VH))
    x_BTH = F.embedding(local_BT.masked_fill(elsewhere_BT, 0), weight_VH)
    return x_BTH.masked_fill(elsewhere_BT[..., None], 0)


class SharedWords(Words):
    """Of `count` words this rank of `group` has its share, in the order of the ranks.

    For each token the ranks tell each other the log of their sum of exponentials, the label's logit if they have it,
    and, if asked for more than cross-entropy, the sum of their logits.
    """

    def __init__(self, count: int, group: dist.ProcessGroup) -> None:
        super().__init__(count)
        ranks = dist.get_world_size(group)
        self.first = dist.get_rank(group) * count // ranks
        self.widest = -(-count // ranks)
        self.group = group

    def read(self, logits_RW: Tensor, rows_R1: Tensor, elsewhere_R1: Tensor, dtype: torch.dtype, plain: bool) -> Read:
        logp_RW = F.log_softmax(logits_RW, dim=-1, dtype=dtype)  # among the words here
        log_sum = log_sum_exp(logits_RW, logp_RW)
        told = [log_sum, logits_RW.gather(1, rows_R1).to(dtype).masked_fill(elsewhere_R1, 0)]
        if not plain:
            told.append(logits_RW.sum(1, keepdim=True, dtype=dtype))
        log_sums, labels, *sums = gathered(torch.cat(told, 1)[None], self.group, 0).split(1, dim=-1)
        whole = log_sums.logsumexp(0)
        even = whole - sums[0].sum(0) / self.count if sums else whole
        return Read(whole - labels.sum(0), even, whole, logp_RW.add_(log_sum - whole).exp_())
