"""DeepSeekMoE: shared experts for every token, routed ones for some (arXiv:2401.06066, arXiv:2412.19437)."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lanewise.config import DeepSeekModel
from lanewise.models.experts import Experts
from lanewise.models.feedforward import FeedForward
from lanewise.models.router import Router, balance_loss, count
from lanewise.models.seams import ALONE, Seams


class Routing(NamedTuple):
    """What a layer with experts reports besides its output.

    counts_E: int64, tokens sent to each expert, of those whose label is valid. Tokens that are only padding (a step
    whose last samples run out keeps its shape) would all go to the same experts and pull the balancing bias.
    """

    balance_sum: Tensor
    counts_E: Tensor


class MoE(nn.Module):
    seams: Seams = ALONE

    def __init__(self, config: DeepSeekModel) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)
        shared = config.shared_experts * config.expert_hidden
        self.shared = FeedForward(config.hidden, shared, config.init_std) if shared else None

    # Not compiled: how many tokens an expert gets is data, and torch 2.13's CPU compiler makes the gradient of the
    # router's bf16 weight wrong (off by its own size; the plain code is off by 3%).
    @torch.compiler.disable
    def forward(self, x_BTH: Tensor, valid_BT: Tensor) -> tuple[Tensor, Routing]:
        """x and valid are of own tokens, and so is the output."""
        scores, chosen, weights = self.router(x_BTH)
        counts_E = count(chosen, valid_BT, scores.shape[-1]).sum(0)
        balance = balance_loss(scores, valid_BT, chosen.shape[-1], self.seams.total)
        x_BTH, chosen, weights = (self.seams.whole(t) for t in (x_BTH, chosen, weights))
        flat = (t.flatten(0, 1) for t in (x_BTH, chosen, weights))
        y_BTH = self.experts(*flat, beside=self.shared).view_as(x_BTH)
        return self.seams.joined(y_BTH), Routing(balance, counts_E)
