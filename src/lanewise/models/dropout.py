"""Dropout whose mask is a pure function of (key, layer, element): the same on recompute and on any device."""

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words that flips every output bit with probability near 1/2 (`lowbias32`, from
    github.com/skeeto/hash-prospector). Words sit in int64; a multiplier is taken as its signed residue, so no product
    overflows and the result is the same wherever it is computed."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * (0x846CA68B - 2**32)) & _WORD
    return x ^ (x >> 16)


def fold(key: Tensor | None, layer: int) -> Tensor | None:
    """The key of one layer, from that of the slot. Blocks get theirs as a tensor rather than hold their number: to
    torch.compile all blocks are then the same code, compiled once."""
    if key is None:
        return None
    low = _mix(_mix(key & _WORD) ^ (layer * 0x9E3779B9 & _WORD))
    high = _mix(((key >> 32) & _WORD) ^ _mix(low))
    return (high >> 1) << 32 | low


def dropout(x: Tensor, p: float, key: Tensor | None, layer: int, numbers: Tensor | None = None) -> Tensor:
    """Zero each element of x with probability p and scale the rest by 1/(1-p); without a key, x itself.

    key: int64 scalar tensor. layer: tells apart the dropouts under one key. x holds fewer than 2^32 elements.
    numbers: where x is only a part of a tensor [..., H], the place of each of its rows of H in the whole: int64 [...].
    """
    key = fold(key, layer)
    if key is None or p == 0:
        return x
    if numbers is None:
        index = torch.arange(x.numel(), device=x.device).view(x.shape)
    else:
        index = numbers[..., None] * x.shape[-1] + torch.arange(x.shape[-1], device=x.device)
    word = _mix(_mix(index ^ (key & _WORD)) ^ (key >> 32))
    return torch.where(word >= round(p * 2**32), x / (1 - p), 0.0)
