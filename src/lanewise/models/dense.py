"""The dense family: Llama 3 (arXiv:2407.21783), Qwen2 (arXiv:2407.10671), Qwen3 (arXiv:2505.09388)."""

from collections.abc import Sequence

from torch import Tensor, nn

from lanewise.config import DenseModel
from lanewise.models.base import LanguageModel
from lanewise.models.dropout import dropout, fold
from lanewise.models.feedforward import FeedForward
from lanewise.models.linear import Linear
from lanewise.models.norm import RMSNorm
from lanewise.models.rotary import Places, Rotary, rotate
from lanewise.models.seams import ALONE, Seams
from lanewise.models.spec import Cut, Output, Passed


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; q and k normalised per head if `qk_norm`."""

    seams: Seams = ALONE

    def __init__(self, config: DenseModel, softmax_factor: float) -> None:
        super().__init__()
        width, std, bias = config.head_size, config.init_std, config.qkv_bias
        self.width = width
        self.scale = width**-0.5 * softmax_factor
        # Key/value heads stay with the queries they serve; if there are too few to go round, all ranks hold them all.
        heads, kv_heads = config.heads, config.kv_heads
        self.q = Linear(config.hidden, heads * width, std, bias, tp=Cut(0, kv_heads, heads))
        self.k = Linear(config.hidden, kv_heads * width, std, bias, tp=Cut(0, kv_heads))
        self.v = Linear(config.hidden, kv_heads * width, std, bias, tp=Cut(0, kv_heads))
        self.o = Linear(heads * width, config.hidden, std, tp=Cut(1, kv_heads, heads))
        self.serving: list[int] | None = None  # the key/value head of each query head, if not of N/G neighbours each
        self.q_norm = RMSNorm(width, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(width, config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x_BTH: Tensor, places: Places) -> Tensor:
        """x and the output are of own tokens."""
        x_BTH = self.seams.whole(x_BTH)
        q, k, v = (project(x_BTH).unflatten(-1, (-1, self.width)) for project in (self.q, self.k, self.v))
        if self.serving is not None:
            k, v = k[:, :, self.serving], v[:, :, self.serving]
        q_BNTD = rotate(self.q_norm(q).transpose(1, 2), places.angles, interleaved=False)
        k_BGTD = rotate(self.k_norm(k).transpose(1, 2), places.angles, interleaved=False)
        k, v = self.seams.everywhere(k_BGTD.transpose(1, 2), v)
        out_BTND = self.seams.attend(q_BNTD, k.transpose(1, 2), v.transpose(1, 2), self.scale, places.starts_BT)
        return self.seams.joined(self.o(out_BTND.flatten(2)))


class Block(nn.Module):
    seams: Seams = ALONE

    def __init__(self, config: DenseModel, softmax_factor: float) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.attention_norm = RMSNorm(config.hidden, config.norm_eps)
        self.attention = Attention(config, softmax_factor)
        self.ffn_norm = RMSNorm(config.hidden, config.norm_eps)
        self.ffn = FeedForward(config.hidden, config.ffn_hidden, config.init_std)

    def forward(self, x_BTH: Tensor, places: Places, key: Tensor | None) -> Tensor:
        numbers = self.seams.numbers()
        y = self.attention(self.attention_norm(x_BTH), places)
        x_BTH = x_BTH + dropout(y, self.dropout, key, 0, numbers)
        y = self.seams.joined(self.ffn(self.seams.whole(self.ffn_norm(x_BTH))))
        return x_BTH + dropout(y, self.dropout, key, 1, numbers)


class Dense(LanguageModel):
    def __init__(self, config: DenseModel) -> None:
        super().__init__(config)
        self.rotary = Rotary(config.head_size, config.rope_theta, config.rope_scaling)
        for index in range(config.layers):
            self.layers[str(index)] = Block(config, self.rotary.softmax_factor)

    def trunk(
        self, states: Sequence[Tensor], tokens_BT: Tensor, key: Tensor | None, starts_BT: Tensor | None = None
    ) -> Tensor:
        """Hidden states after the last layer that is here: [B, T, H]."""
        places = self.places(tokens_BT, starts_BT)
        (x_BTH,) = states or [self.seams.embedded(self.seams.share(tokens_BT), self.embed.weight)]
        for index, block in self.layers.items():
            x_BTH = block(x_BTH, places, fold(key, int(index)))
        return x_BTH

    def part(
        self,
        states: Sequence[Tensor],
        tokens_BT: Tensor,
        labels_BT: Tensor,
        key: Tensor | None,
        starts_BT: Tensor | None = None,
    ) -> Output | Passed:
        x_BTH = self.trunk(states, tokens_BT, key if self.training else None, starts_BT)
        if not self.ends:
            return Passed((x_BTH,), None)
        labels_BT = self.seams.share(labels_BT)
        loss, nll = self.seams.loss(self.norm(x_BTH), self.head.weight, labels_BT, self.objective)
        return Output(loss, nll, None)

    def logits(self, tokens_BT: Tensor) -> Tensor:
        logits_BTV: Tensor = self.head(self.norm(self.trunk((), tokens_BT, None)))
        return logits_BTV
