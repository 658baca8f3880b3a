"""DeepSeek-V3 (arXiv:2412.19437): latent attention, experts, and prediction of several tokens ahead."""

from collections.abc import Iterator, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanewise.config import DeepSeekModel
from lanewise.models.base import LanguageModel
from lanewise.models.dropout import dropout, fold
from lanewise.models.feedforward import FeedForward
from lanewise.models.linear import Linear
from lanewise.models.loss import carry
from lanewise.models.mla import LatentAttention
from lanewise.models.moe import MoE, Routing
from lanewise.models.norm import RMSNorm
from lanewise.models.rotary import Places, Rotary
from lanewise.models.seams import ALONE, Seams
from lanewise.models.spec import IGNORE, Output, Passed


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
        self, x_BTH: Tensor, places: Places, valid_BT: Tensor, key: Tensor | None
    ) -> tuple[Tensor, Routing | None]:
        numbers = self.seams.numbers()
        y = self.attention(self.attention_norm(x_BTH), places)
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
        self, hidden_BTH: Tensor, next_BTH: Tensor, places: Places, valid_BT: Tensor, key: Tensor | None
    ) -> tuple[Tensor, Routing | None]:
        # the published weights expect the embedding first (equation 21 has it second)
        x_BTH = self.join(torch.cat((self.embed_norm(next_BTH), self.hidden_norm(hidden_BTH)), dim=-1))
        x_BTH, routing = self.block(x_BTH, places, valid_BT, key)
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
        routed = [index for index, block in self._numbered() if isinstance(block.ffn, MoE)]
        self.rows = {index: row for row, index in enumerate(routed)}  # of the counts, by layer

    def blocks(self) -> Iterator[nn.Module]:
        return (block for _, block in self._numbered())

    @property
    def handed_on(self) -> int:
        return 1 + self.config.mtp_layers

    def trunk(
        self, x_BTH: Tensor, places: Places, valid_BT: Tensor, key: Tensor | None
    ) -> tuple[Tensor, dict[int, Routing]]:
        """Hidden states after the last layer that is here, and what those with experts report, by layer."""
        reports = {}
        for index, block in self.layers.items():
            x_BTH, routing = block(x_BTH, places, valid_BT, fold(key, int(index)))
            if routing is not None:
                reports[int(index)] = routing
        return x_BTH, reports

    def part(
        self,
        states: Sequence[Tensor],
        tokens_BT: Tensor,
        labels_BT: Tensor,
        key: Tensor | None,
        starts_BT: Tensor | None = None,
    ) -> Output | Passed:
        key = key if self.training else None
        places = self.places(tokens_BT, starts_BT)
        x_BTH, *following = states or self._embeddings(tokens_BT)
        x_BTH, reports = self.trunk(x_BTH, places, self._valid(labels_BT), key)
        if not self.ends:
            for report in reports.values():
                x_BTH = carry(x_BTH, report.balance_sum * self.config.balance_loss)
            return Passed((x_BTH, *following), self._counts(reports, x_BTH.device))

        hidden_BTH = self.norm(x_BTH)
        loss, nll = self._loss(hidden_BTH, labels_BT)
        for (depth, ahead), next_BTH in zip(self.mtp.items(), following, strict=True):
            # Every depth looks one token further. An ignored label is not looked across: a document may end there.
            closed_BT = labels_BT == IGNORE
            if starts_BT is not None:
                closed_BT |= (F.pad(starts_BT[:, 1:], (0, 1)) != starts_BT).to(closed_BT.device)
            labels_BT = F.pad(labels_BT[:, 1:], (0, 1), value=IGNORE).masked_fill(closed_BT, IGNORE)
            index = self.config.layers + int(depth)
            hidden_BTH, routing = ahead(hidden_BTH, next_BTH, places, self._valid(labels_BT), fold(key, index))
            ahead_loss, _ = self._loss(hidden_BTH, labels_BT)
            loss = loss + ahead_loss * (self.config.mtp_weight / self.config.mtp_layers)
            if routing is not None:
                reports[index] = routing
        for report in reports.values():
            loss = loss + report.balance_sum * self.config.balance_loss
        return Output(loss, nll, self._counts(reports, x_BTH.device))

    def _embeddings(self, tokens_BT: Tensor) -> list[Tensor]:
        """Own tokens' embeddings, and for each depth of prediction ahead those of the tokens so much later.

        Shapes stay: what is shifted in, past the end or from the next document, predicts nothing, and causality hides
        it from the rest. They are looked up here,
        at the start, and handed on, so that the embedding is in one place also where the model is in several.
        """
        shifted = [F.pad(tokens_BT, (0, depth))[:, depth:] for depth in range(self.handed_on)]
        return [self.seams.embedded(self.seams.share(tokens), self.embed.weight) for tokens in shifted]

    def _valid(self, labels_BT: Tensor) -> Tensor:
        return self.seams.own(self.seams.share(labels_BT)) != IGNORE

    def _loss(self, hidden_BTH: Tensor, labels_BT: Tensor) -> tuple[Tensor, Tensor]:
        return self.seams.loss(hidden_BTH, self.head.weight, self.seams.share(labels_BT), self.objective)

    def _counts(self, reports: dict[int, Routing], device: torch.device) -> Tensor:
        """[L, E]: a row for each layer with experts of the whole model."""
        counts_LE = torch.zeros(len(self.rows), self.config.experts, dtype=torch.int64, device=device)
        for index, report in reports.items():
            counts_LE[self.rows[index]] = report.counts_E
        return counts_LE

    def logits(self, tokens_BT: Tensor) -> Tensor:
        x_BTH = self._embeddings(tokens_BT)[0]
        x_BTH, _ = self.trunk(x_BTH, self.places(tokens_BT), torch.ones_like(tokens_BT, dtype=torch.bool), None)
        logits_BTV: Tensor = self.head(self.norm(x_BTH))
        return logits_BTV

    def balance(self, counts_LE: Tensor) -> None:
        for index, block in self._numbered():
            if isinstance(block.ffn, MoE):
                block.ffn.router.balance(counts_LE[self.rows[index]], self.config.bias_speed)

    def _numbered(self) -> Iterator[tuple[int, Block]]:
        """The blocks that are here, with their number in the whole model."""
        for index, block in self.layers.items():
            yield int(index), cast(Block, block)
        for depth, ahead in self.mtp.items():
            yield self.config.layers + int(depth), cast(Ahead, ahead).block
