"""Causal attention, the one place where it is computed."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

CHUNK = 128  # queries at a time: half the products of a causal square are never computed
LONGEST = 1024  # tokens up to which the score matrix is kept for the backward


def causal_attention(
    q_BNTD: Tensor, k_BGTD: Tensor, v_BGTC: Tensor, scale: float, starts_BT: Tensor | None = None
) -> Tensor:
    """softmax(scale q k^T + causal mask) v -> [B, T, N, C]. Each key/value head serves N/G neighbouring query heads;
    values may be of another width C than keys. If there are fewer queries than keys, they are the last ones.

    starts_BT: where several documents share a row, the number of the first key of each query's document; a query sees
    no key before it. int64, on the CPU.
    """
    if q_BNTD.device.type == "cpu" and k_BGTD.shape[2] <= LONGEST:
        out_BNTC = _in_chunks(q_BNTD, k_BGTD, v_BGTC, scale, starts_BT)
    elif starts_BT is None:
        out_BNTC = _fused(q_BNTD, k_BGTD, v_BGTC, scale)
    else:
        out_BNTC = _by_document(q_BNTD, k_BGTD, v_BGTC, scale, starts_BT)
    return out_BNTC.transpose(1, 2)


def _in_chunks(q_BNTD: Tensor, k_BGTD: Tensor, v_BGTC: Tensor, scale: float, starts_BT: Tensor | None) -> Tensor:
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
        hidden = q.new_full((end - start, seen), float("-inf")).triu(before + start + 1)
        if starts_BT is None:
            hidden = hidden.repeat(N // G, 1)
        else:
            others_BTK = torch.arange(seen) < starts_BT[:, start:end, None]
            hidden = hidden.masked_fill(others_BTK, float("-inf"))[:, None].expand(-1, N, -1, -1)
            hidden = hidden.reshape(B * G, -1, seen)
        scores = torch.baddbmm(hidden, queries, k[:, :, :seen], alpha=scale)
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


@torch.compiler.disable  # where documents end is data
def _by_document(q_BNTD: Tensor, k_BGTD: Tensor, v_BGTC: Tensor, scale: float, starts_BT: Tensor) -> Tensor:
    """Each document on its own: what a mask would hide is not computed, and no mask of T x T is made."""
    before = k_BGTD.shape[2] - q_BNTD.shape[2]
    rows = []
    for row, starts_T in enumerate(starts_BT):
        q, k, v = (x[row : row + 1] for x in (q_BNTD, k_BGTD, v_BGTC))
        parts, end = [], 0
        for first, queries in zip(*(t.tolist() for t in starts_T.unique_consecutive(return_counts=True)), strict=True):
            start, end = end, end + queries
            keys = slice(first, before + end)
            parts.append(_fused(q[:, :, start:end], k[:, :, keys], v[:, :, keys], scale))
        rows.append(torch.cat(parts, 2))
    return torch.cat(rows)
