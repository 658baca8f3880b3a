"""DeepSeek-V3 (arXiv:2412.19437): latent attention, experts, and prediction of several tokens ahead."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanewise.config import DeepSeekModel
from lanewise.models.base import LanguageModel
from lanewise.models.dropout import dropout, fold
from lanewise.models.feedforward import FeedForward
from lanewise.models.linear import Linear
from lanewise.models.mla import LatentAttention
from lanewise.models.moe import MoE, Routing
from lanewise.models.norm import RMSNorm
from lanewise.models.rotary import Angles, Rotary
from lanewise.models.seams import ALONE, Seams
from lanewise.models.spec import IGNORE, Output


class Block(nn.Module):
    """Latent attention, then experts; in the first `dense_layers` blocks a plain feed-forward."""

    seams: Seams = ALONE

    def __init__(self, config: DeepSeekModel, index: int, softmax_factor: float) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.attention_norm = RMSNorm(config.hidden, config.norm_eps)
        self.attention = LatentAttention(config, softmax_factor)
        self.ffn_norm = RMSNorm(config.hidden, config.norm_eps)
        self.ffn = (
            FeedForward(config.hidden, config.ffn_hidden, config.init_std)
            if index < config.dense_layers
            else MoE(config)
        )

    def forward(
        self, x_BTH: Tensor, angles: Angles, valid_BT: Tensor, key: Tensor | None
    ) -> tuple[Tensor, Routing | None]:
        numbers = self.seams.numbers()
        y = self.attention(self.attention_norm(x_BTH), angles)
        x_BTH = x_BTH + dropout(y, self.dropout, key, 0, numbers)
        y, routing = self.ffn_norm(x_BTH), None
        if isinstance(self.ffn, MoE):
            y, routing = self.ffn(y, valid_BT)
        else:
            y = self.seams.joined(self.ffn(self.seams.whole(y)))
        return x_BTH + dropout(y, self.dropout, key, 1, numbers), routing


class Ahead(nn.Module):
    """One depth of multi-token prediction (section 2.2): from the previous depth's state of a token and the embedding
    of the token that follows it, the state that predicts one token further."""

    def __init__(self, config: DeepSeekModel, index: int, softmax_factor: float) -> None:
        super().__init__()
        self.embed_norm = RMSNorm(config.hidden, config.norm_eps)
        self.hidden_norm = RMSNorm(config.hidden, config.norm_eps)
        self.join = Linear(2 * config.hidden, config.hidden, config.init_std)
        self.block = Block(config, index, softmax_factor)
        self.norm = RMSNorm(config.hidden, config.norm_eps)

    def forward(
        self, hidden_BTH: Tensor, next_BTH: Tensor, angles: Angles, valid_BT: Tensor, key: Tensor | None
    ) -> tuple[Tensor, Routing | None]:
        # the published weights expect the embedding first (equation 21 has it second)
        x_BTH = self.join(torch.cat((self.embed_norm(next_BTH), self.hidden_norm(hidden_BTH)), dim=-1))
        x_BTH, routing = self.block(x_BTH, angles, valid_BT, key)
        return self.norm(x_BTH), routing


class DeepSeek(LanguageModel):
    def __init__(self, config: DeepSeekModel) -> None:
        super().__init__(config)
        self.config = config
        self.rotary = Rotary(config.qk_rope_head_dim, config.rope_theta, config.rope_scaling)
        for index in range(config.layers):
            self.layers[str(index)] = Block(config, index, self.rotary.softmax_factor)
        self.mtp = nn.ModuleDict()
        for depth in range(config.mtp_layers):
            self.mtp[str(depth)] = Ahead(config, config.layers + depth, self.rotary.softmax_factor)

    def blocks(self) -> Iterator[nn.Module]:
        yield from super().blocks()
        for depth in self.mtp.values():
            assert isinstance(depth, Ahead)
            yield depth.block

    def trunk(
        self, tokens_BT: Tensor, angles: Angles, valid_BT: Tensor, key: Tensor | None
    ) -> tuple[Tensor, list[Routing | None]]:
        """Last hidden states, normalised, and what each layer reports."""
        x_BTH, routings = self._embedded(tokens_BT), []
        for index, block in self.layers.items():
            x_BTH, routing = block(x_BTH, angles, valid_BT, fold(key, int(index)))
            routings.append(routing)
        return self.norm(x_BTH), routings

    def forward(self, tokens_BT: Tensor, labels_BT: Tensor, key: Tensor | None = None) -> Output:
        key = key if self.training else None
        angles = self.rotary.angles(tokens_BT.shape[1], tokens_BT.device).at(self.seams.positions)
        hidden_BTH, routings = self.trunk(tokens_BT, angles, self._valid(labels_BT), key)
        loss = self._loss(hidden_BTH, labels_BT)
        nll = loss.detach()

        for index, depth in self.mtp.items():
            # Every depth looks one token further. Shapes stay: what is shifted in predicts nothing, and causality
            # hides it from the rest. An ignored label is not looked across: a document may end there.
            tokens_BT = F.pad(tokens_BT[:, 1:], (0, 1))
            labels_BT = F.pad(labels_BT[:, 1:], (0, 1), value=IGNORE).masked_fill(labels_BT == IGNORE, IGNORE)
            hidden_BTH, routing = depth(
                hidden_BTH,
                self._embedded(tokens_BT),
                angles,
                self._valid(labels_BT),
                fold(key, self.config.layers + int(index)),
            )
            loss = loss + self._loss(hidden_BTH, labels_BT) * (self.config.mtp_weight / self.config.mtp_layers)
            routings.append(routing)

        reports = [r for r in routings if r is not None]
        for report in reports:
            loss = loss + report.balance_sum * self.config.balance_loss
        counts_LE = [r.counts_E for r in reports]
        return Output(loss, nll, torch.stack(counts_LE) if reports else labels_BT.new_zeros(0, self.config.experts))

    def _embedded(self, tokens_BT: Tensor) -> Tensor:
        """From a microbatch's tokens to own tokens' embeddings."""
        return self.seams.embedded(self.seams.share(tokens_BT), self.embed.weight)

    def _valid(self, labels_BT: Tensor) -> Tensor:
        return self.seams.own(self.seams.share(labels_BT)) != IGNORE

    def _loss(self, hidden_BTH: Tensor, labels_BT: Tensor) -> Tensor:
        return self.seams.loss(hidden_BTH, self.head.weight, self.seams.share(labels_BT))

    def logits(self, tokens_BT: Tensor) -> Tensor:
        angles = self.rotary.angles(tokens_BT.shape[1], tokens_BT.device)
        hidden_BTH, _ = self.trunk(tokens_BT, angles, torch.ones_like(tokens_BT, dtype=torch.bool), None)
        logits_BTV: Tensor = self.head(hidden_BTH)
        return logits_BTV

    def balance(self, counts_LE: Tensor) -> None:
        moe = [module for module in self.modules() if isinstance(module, MoE)]
        for layer, counts_E in zip(moe, counts_LE, strict=True):
            layer.router.balance(counts_E, self.config.bias_speed)
