"""The hand-written operations against the formula, torch's own, and finite differences."""

import pytest
import torch
import torch.nn.functional as F

from lanewise.models import attention
from lanewise.models.attention import causal_attention
from lanewise.models.norm import RMSNorm
from lanewise.models.rotary import Angles, Rotary, rotate


def random(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_()


def test_rms_norm_agrees_with_torch():
    norm = RMSNorm(12, 1e-5).double()
    x, w = random(3, 4, 12), random(12, seed=1)
    norm.weight.data = w.data
    got, expected = norm(x), F.rms_norm(x, (12,), w, 1e-5)
    torch.testing.assert_close(got, expected)
    g = random(3, 4, 12, seed=2).detach()
    torch.testing.assert_close(torch.autograd.grad(got, (x, norm.weight), g), torch.autograd.grad(expected, (x, w), g))


def test_rms_norm_statistics_are_fp32_in_bf16():
    norm = RMSNorm(4096, 1e-6)
    norm.weight.data = torch.ones(4096, dtype=torch.bfloat16)
    x = (random(2, 4096, dtype=torch.float32) * 1e3).bfloat16().detach().requires_grad_()
    y = norm(x)
    exact = F.rms_norm(x.double(), (4096,), None, 1e-6)
    torch.testing.assert_close(y, exact.bfloat16(), rtol=0.004, atol=0)  # one rounding, to 8 bits
    y.sum().backward()
    assert x.grad.dtype == norm.weight.grad.dtype == torch.bfloat16


def test_rms_norm_of_zeros_is_finite():
    norm = RMSNorm(8, 1e-6)
    norm.weight.data.fill_(1)
    x = torch.zeros(2, 8, requires_grad=True)
    norm(x).sum().backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation(interleaved):
    """Against complex multiplication; its gradient against finite differences."""
    angles = Angles(*(t.double() for t in Rotary(6, 100.0, None).angles(5, torch.device("cpu"))))
    x = random(2, 3, 5, 6)
    y = rotate(x, angles, interleaved)
    pairs = x.unflatten(-1, (3, 2)) if interleaved else x.unflatten(-1, (2, 3)).transpose(-1, -2)
    angle = torch.arange(5)[:, None] * 100.0 ** (-torch.arange(3) / 3)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(5, 3), angle))
    expected = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
    torch.testing.assert_close(y, expected.double(), rtol=1e-6, atol=1e-6)
    assert torch.autograd.gradcheck(lambda x: rotate(x, angles, interleaved), (x,))


@pytest.mark.parametrize("length", [1, 100, 128, 300])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("path", ["in chunks", "fused"])
def test_attention(length, heads, groups, path, monkeypatch):
    if path == "fused":
        monkeypatch.setattr(attention, "LONGEST", 0)
    q, k, v = random(2, heads, length, 6), random(2, groups, length, 6, seed=1), random(2, groups, length, 5, seed=2)
    got = causal_attention(q, k, v, 0.7)
    k_all, v_all = (t.repeat_interleave(heads // groups, dim=1) for t in (k, v))
    scores = (0.7 * q @ k_all.transpose(-1, -2)).masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    expected = (scores.softmax(-1) @ v_all).transpose(1, 2)
    torch.testing.assert_close(got, expected)
    g = random(*got.shape, seed=3).detach()
    torch.testing.assert_close(torch.autograd.grad(got, (q, k, v), g), torch.autograd.grad(expected, (q, k, v), g))
