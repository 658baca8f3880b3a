"""Which experts a token goes to, and what keeps their loads even (arXiv:2412.19437, section 2.1.2)."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lanewise.config import DeepSeekModel
from lanewise.models.seams import ALONE
from lanewise.models.spec import Declared, ParamSpec


class Choice(NamedTuple):
    scores_BTE: Tensor  # affinities in (0, 1), fp32
    experts_BTK: Tensor  # chosen experts
    weights_BTK: Tensor  # their weights in the token's output, fp32


class Router(Declared):
    """Sigmoid affinities in fp32; the `groups_per_token` best groups, then the `experts_per_token` best experts in
    them. The bias steers the choice only: weights are made of the affinities themselves."""

    def __init__(self, config: DeepSeekModel) -> None:
        super().__init__()
        self.chosen, self.groups, self.open_groups = (
            config.experts_per_token,
            config.expert_groups,
            config.groups_per_token,
        )
        self.norm_topk, self.scale = config.norm_topk, config.routed_scale
        shape = (config.experts, config.hidden)
        self.weight = self.declare(ParamSpec("weight", shape, "router", "normal", config.init_std))
        self.expert_bias: Tensor
        self.register_buffer("expert_bias", torch.zeros(config.experts, dtype=torch.float32))

    def forward(self, x_BTH: Tensor) -> Choice:
        dtype = torch.promote_types(x_BTH.dtype, torch.float32)
        scores = F.linear(x_BTH.to(dtype), self.weight.to(dtype)).sigmoid()
        with torch.no_grad():
            experts = self._open(scores + self.expert_bias).topk(self.chosen, dim=-1).indices
        weights = scores.gather(-1, experts)
        if self.norm_topk:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Choice(scores, experts, weights * self.scale)

    def _open(self, biased: Tensor) -> Tensor:
        """The scores of the groups a token may choose from, -inf in the others."""
        if self.open_groups == self.groups:
            return biased
        grouped = biased.unflatten(-1, (self.groups, -1))
        best = _of_groups(grouped).topk(self.open_groups, dim=-1).indices
        closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, False)
        return grouped.masked_fill(closed[..., None], float("-inf")).flatten(-2)

    @torch.no_grad()
    def margin(self, scores: Tensor) -> float:
        """The smallest gap, over all tokens, between what is chosen and what is not. Where it is no larger than the
        scores' rounding, sums in another order may choose otherwise, and what follows is another function."""
        biased = scores + self.expert_bias
        gap = _gap(self._open(biased), self.chosen)
        if self.open_groups < self.groups:
            gap = min(gap, _gap(_of_groups(biased.unflatten(-1, (self.groups, -1))), self.open_groups))
        return gap

    @torch.no_grad()
    def balance(self, counts_E: Tensor, speed: float) -> None:
        """Raise the bias of experts below the mean load, lower it above. Integers, so the sign is exact. A router whose
        weight is frozen keeps its bias, too."""
        if not self.weight.requires_grad:
            return
        below = counts_E.sum() - counts_E * len(counts_E)
        self.expert_bias.add_(below.sign().to(self.expert_bias), alpha=speed)


def _of_groups(scores_XGE: Tensor) -> Tensor:
    """A group's score: the sum of its two best."""
    return scores_XGE.topk(2, dim=-1).values.sum(-1)


def _gap(scores: Tensor, chosen: int) -> float:
    if chosen >= scores.shape[-1]:
        return float("inf")
    best = scores.topk(chosen + 1, dim=-1).values
    return (best[..., chosen - 1] - best[..., chosen]).min().item()


def count(experts_BTK: Tensor, valid_BT: Tensor, experts: int) -> Tensor:
    """Tokens per expert among the valid ones: int64 [B, E]."""
    ones = valid_BT[..., None].expand(experts_BTK.shape).flatten(1).to(torch.int64)
    return ones.new_zeros(len(ones), experts).scatter_add_(1, experts_BTK.flatten(1), ones)


def balance_loss(
    scores_BTE: Tensor, valid_BT: Tensor, chosen: int, total: Callable[[Tensor], Tensor] = ALONE.total
) -> Tensor:
    """Sequence-wise balance loss, equations 17-20, of each sequence times its number of valid tokens n, summed.

    Per sequence: n sum_e f_e P_e, where f_e = E/(K n) * (tokens whose K highest affinities include e) and P_e is e's
    share of the affinities, averaged over the tokens. The paper's T is n here, so padding changes nothing; as in
    equation 18 the K highest are of the affinities alone, without bias or groups.
    """
    experts = scores_BTE.shape[-1]
    best_BTK = scores_BTE.detach().topk(chosen, dim=-1).indices
    # n and f_e are of whole sequences; the rest is a sum over tokens, of which each rank gives its own
    counts = torch.cat((count(best_BTK, valid_BT, experts), valid_BT.sum(1, keepdim=True)), dim=1)
    load_BE, tokens_B1 = total(counts).split([experts, 1], dim=1)
    share_BTE = scores_BTE / scores_BTE.sum(-1, keepdim=True)
    share_BE = (share_BTE * valid_BT[..., None]).sum(1)
    tokens_B = tokens_B1.squeeze(1).clamp(min=1)  # a sequence without valid tokens has load 0, not 0/0
    return ((load_BE * share_BE).sum(1) * (experts / chosen) / tokens_B).sum()
