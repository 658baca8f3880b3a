"""Rotary position embedding (arXiv:2104.09864) and its stretchings for long contexts.

Nothing is kept in buffers: cosines and sines are computed per forward, so that a model built on the meta device, moved
or cast never carries stale ones.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lanewise.config import RopeScaling


class Angles(NamedTuple):
    """How far each channel pair turns at each position: fp32, [T, width/2] each, amplitude included.

    Where positions differ by row, they are [B, 1, T, width/2], the same for all heads.
    """

    cos: Tensor
    sin: Tensor

    def at(self, positions: Callable[[Tensor], Tensor]) -> "Angles":
        """Those of some positions."""
        return Angles(positions(self.cos), positions(self.sin))


class Places(NamedTuple):
    """Where tokens stand.

    angles: of their positions in their documents. starts_BT: int64, on the CPU, the index in its row at which each
    token's document starts; None: a row is one document.
    """

    angles: Angles
    starts_BT: Tensor | None = None


class Rotary:
    """Frequencies of the rotation of `width` channels, and what stretching does to the attention's temperature.

    softmax_factor: multiplies the softmax scale (YaRN's mscale_all_dim, as DeepSeek uses it; else 1).
    """

    def __init__(self, width: int, theta: float, scaling: RopeScaling | None) -> None:
        powers = torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width
        self.frequencies = theta**-powers
        self.amplitude = self.softmax_factor = 1.0
        if scaling is None:
            return
        match scaling.kind:
            case "linear":
                self.frequencies /= scaling.factor
            case "llama3":
                self.frequencies = _llama3(self.frequencies, scaling)
            case "yarn":
                self.frequencies = _yarn(self.frequencies, theta, scaling)
                whole = _mscale(scaling.factor, scaling.mscale_all_dim)
                self.amplitude = _mscale(scaling.factor, scaling.mscale) / whole
                self.softmax_factor = whole**2

    def angles(self, length: int, device: torch.device) -> Angles:
        """Those of positions 0..length-1."""
        positions = torch.arange(length, dtype=torch.float64, device=device)
        angles = torch.outer(positions, self.frequencies.to(device))
        return Angles((angles.cos() * self.amplitude).float(), (angles.sin() * self.amplitude).float())


def _llama3(frequencies: Tensor, s: RopeScaling) -> Tensor:
    """Llama 3.1: long waves are stretched, short ones kept, between them a blend (arXiv:2407.21783)."""
    turns = s.original_length * frequencies / (2 * math.pi)
    keep = ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / s.factor)


def _yarn(frequencies: Tensor, theta: float, s: RopeScaling) -> Tensor:
    """YaRN's blend by parts (arXiv:2309.00071), its bounds rounded to whole channels as in the published models."""
    width = 2 * len(frequencies)

    def channel(turns: float) -> float:  # the channel pair that makes so many turns within the original length
        return width * math.log(s.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(channel(s.beta_fast)), 0)
    high = min(math.ceil(channel(s.beta_slow)), width - 1)
    pairs = torch.arange(len(frequencies), dtype=torch.float64, device="cpu")
    stretch = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequencies * (1 - stretch + stretch / s.factor)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    left = torch.addcmul(a * cos, b, sin, value=-1).to(x.dtype)
    right = torch.addcmul(b * cos, a, sin).to(x.dtype)
    return torch.stack((left, right), -1).flatten(-2) if interleaved else torch.cat((left, right), -1)


class _Rotate(torch.autograd.Function):
    """The gradient of a rotation is the rotation back: nothing but the angles is kept for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _turn(x, cos, sin, interleaved)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(g, cos, -sin, ctx.interleaved), None, None, None


def rotate(x_BNTD: Tensor, angles: Angles, interleaved: bool) -> Tensor:
    """Rotate channel pairs by their position's angle: pairs (2i, 2i+1) if interleaved, else (i, i + D/2)."""
    y: Tensor = _Rotate.apply(x_BNTD, *angles, interleaved)
    return y
