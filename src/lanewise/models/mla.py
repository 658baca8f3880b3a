"""Multi-head latent attention (arXiv:2405.04434, section 2.1; arXiv:2412.19437, section 2.1.1)."""

import torch
from torch import Tensor, nn

from lanewise.config import DeepSeekModel
from lanewise.models.linear import Linear
from lanewise.models.norm import RMSNorm
from lanewise.models.rotary import Places, rotate
from lanewise.models.seams import ALONE, Seams
from lanewise.models.spec import Cut


class LatentAttention(nn.Module):
    """Keys and values come from one narrow latent per token; position sits in a rotary key shared by all heads.

    This is the training form: keys and values are expanded per head, and attention is the ordinary one. Rotary
    channels are paired (2i, 2i+1), as in the published weights.
    """

    seams: Seams = ALONE

    def __init__(self, config: DeepSeekModel, softmax_factor: float) -> None:
        super().__init__()
        self.plain, self.turned, self.value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.rank = config.kv_lora_rank
        width = self.plain + self.turned
        self.scale = width**-0.5 * softmax_factor
        hidden, heads, std = config.hidden, config.heads, config.init_std
        narrow = config.q_lora_rank
        self.q_down = Linear(hidden, narrow, std) if narrow else nn.Identity()
        self.q_norm = RMSNorm(narrow, config.norm_eps) if narrow else nn.Identity()
        self.q_up = Linear(narrow or hidden, heads * width, std, tp=Cut(0, heads))
        self.kv_down = Linear(hidden, self.rank + self.turned, std)
        self.kv_norm = RMSNorm(self.rank, config.norm_eps)
        self.kv_up = Linear(self.rank, heads * (self.plain + self.value), std, tp=Cut(0, heads))
        self.o = Linear(heads * self.value, hidden, std, tp=Cut(1, heads))

    def forward(self, x_BTH: Tensor, places: Places) -> Tensor:
        """x and the output are of own tokens; the narrow latents of all tokens are what meets."""
        whole = self.seams.whole
        q_BTND = self.q_up(whole(self.q_norm(self.q_down(x_BTH)))).unflatten(-1, (-1, self.plain + self.turned))
        q_plain, q_turned = q_BTND.transpose(1, 2).split([self.plain, self.turned], dim=-1)
        q_BNTD = torch.cat((q_plain, rotate(q_turned, places.angles, interleaved=True)), dim=-1)

        latent, k_turned = self.kv_down(x_BTH).split([self.rank, self.turned], dim=-1)
        latent, k_turned = self.seams.whole_pair(self.kv_norm(latent), k_turned)
        k_turned = rotate(k_turned[:, None], places.angles, interleaved=True).squeeze(1)
        latent, k_turned = self.seams.everywhere(latent, k_turned)
        kv_BTND = self.kv_up(latent).unflatten(-1, (-1, self.plain + self.value))
        k_plain, v_BNTC = kv_BTND.transpose(1, 2).split([self.plain, self.value], dim=-1)
        k_turned = k_turned[:, None]
        k_BNTD = torch.cat((k_plain, k_turned.expand(-1, k_plain.shape[1], -1, -1)), dim=-1)

        out_BTNC = self.seams.attend(q_BNTD, k_BNTD, v_BNTC, self.scale, places.starts_BT)
        return self.seams.joined(self.o(out_BTNC.flatten(2)))
