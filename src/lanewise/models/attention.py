"""Causal attention, the one place where it is computed."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

CHUNK = 128  # queries at a time: half the products of a causal square are never computed
LONGEST = 1024  # tokens up to which the score matrix is kept for the backward


def causal_attention(q_BNTD: Tensor, k_BGTD: Tensor, v_BGTC: Tensor, scale: float) -> Tensor:
    """softmax(scale q k^T + causal mask) v -> [B, T, N, C]. Each key/value head serves N/G neighbouring query heads;
    values may be of another width C than keys. If there are fewer queries than keys, they are the last ones."""
    short = q_BNTD.device.type == "cpu" and k_BGTD.shape[2] <= LONGEST
    return (_in_chunks if short else _fused)(q_BNTD, k_BGTD, v_BGTC, scale).transpose(1, 2)


def _in_chunks(q_BNTD: Tensor, k_BGTD: Tensor, v_BGTC: Tensor, scale: float) -> Tensor:
    """On CPU at short lengths twice the speed of torch's fused kernel in bf16, whose backward is slow
    (48 heads, 256 tokens, width 64, one thread: 21 ms against 42 ms), and equal in fp32."""
    (B, N, T, D), (_, G, keys, C) = q_BNTD.shape, v_BGTC.shape
    before = keys - T
    q = q_BNTD.reshape(B * G, N // G, T, D)  # the heads that share a key/value head become more of its queries
    k = k_BGTD.reshape(B * G, keys, D).transpose(1, 2)
    v = v_BGTC.reshape(B * G, keys, C)
    parts = []
    for start in range(0, T, CHUNK):
        end = min(start + CHUNK, T)
        seen = before + end
        queries = q[:, :, start:end].flatten(1, 2)
        future = q.new_full((end - start, seen), float("-inf")).triu(before + start + 1).repeat(N // G, 1)
        scores = torch.baddbmm(future, queries, k[:, :, :seen], alpha=scale)
        parts.append(torch.bmm(scores.softmax(-1), v[:, :seen]).unflatten(1, (N // G, end - start)))
    return torch.cat(parts, 2).view(B, N, T, C)


def _fused(q_BNTD: Tensor, k_BGTD: Tensor, v_BGTC: Tensor, scale: float) -> Tensor:
    """torch's kernel. Narrow values are padded to the keys' width, without which it falls back to the full square."""
    C = v_BGTC.shape[-1]
    v = F.pad(v_BGTC, (0, max(q_BNTD.shape[-1] - C, 0)))
    gqa = q_BNTD.shape[1] != k_BGTD.shape[1]
    queries, keys = q_BNTD.shape[2], k_BGTD.shape[2]
    mask = None if queries == keys else causal_lower_right(queries, keys)
    out_BNTX = F.scaled_dot_product_attention(
        q_BNTD, k_BGTD, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=gqa
    )
    return out_BNTX[..., :C]
