"""The mask: right rate, and no relation between elements, layers and keys (A14)."""

import pytest
import torch

from lanewise.models.dropout import dropout, fold

SIZE = (8, 128, 256)
N = 8 * 128 * 256


def kept(key, layer=0, p=0.5):
    return dropout(torch.ones(SIZE), p, torch.tensor(key), layer).flatten() != 0


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("key", [0, 1, -1, 2**62 + 12345])
def test_rate(p, key):
    dropped = (~kept(key, p=p)).float().mean().item()
    assert abs(dropped - p) < 5 * (p * (1 - p) / N) ** 0.5


def test_layers_of_layers_are_unrelated():
    """A block's key folded from the slot's, then told apart within the block."""
    key = torch.tensor(3)
    masks = [dropout(torch.ones(SIZE), 0.5, fold(key, i), j).flatten() != 0 for i in range(4) for j in (0, 1)]
    masks += [kept(3, layer) for layer in range(4)]
    for i, a in enumerate(masks):
        for b in masks[:i]:
            assert abs(agreement(a, b)) < 5


def agreement(a, b):
    """Share of agreement in standard deviations from the 1/2 of unrelated masks."""
    return ((a == b).double().mean().item() - 0.5) * 2 * len(a) ** 0.5


def test_keys_and_layers_give_unrelated_masks():
    masks = [kept(key, layer) for key in (0, 1, 2, 2**32, 2**33, -1) for layer in (0, 1, 2)]
    for i, a in enumerate(masks):
        for b in masks[:i]:
            assert abs(agreement(a, b)) < 5


@pytest.mark.parametrize("step", [1, 2, 16, 256, 128 * 256])
def test_elements_are_unrelated(step):
    mask = kept(12345)
    assert abs(agreement(mask[step:], mask[:-step])) < 5


def test_no_mask_is_another_rearranged():
    """Keys that differ in one bit must not only exchange elements: undo the exchange that a plain xor would make."""
    index = torch.arange(N)
    for key in (1, 4, 1 << 17):
        for other in (0, 1 << 40):
            assert abs(agreement(kept(other)[index ^ key % N], kept(other ^ key))) < 5


def test_values_and_gradient():
    x = torch.randn(SIZE, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = dropout(x, 0.25, torch.tensor(9), 3)
    mask = y != 0
    torch.testing.assert_close(y, torch.where(mask, x / 0.75, 0))
    y.sum().backward()
    torch.testing.assert_close(x.grad, mask / 0.75)
    assert torch.equal(y, dropout(x, 0.25, torch.tensor(9), 3))


def test_off():
    x = torch.ones(3)
    assert dropout(x, 0.5, None, 0) is x
    assert dropout(x, 0.0, torch.tensor(1), 0) is x


def test_mask_is_pinned():
    """Runs resume across versions: the mask of a key may never change. Value worked out with Python integers."""

    def mix(x):
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x = (x ^ x >> 15) * 0x846CA68B % 2**32
        return x ^ x >> 16

    key, layer = 0x123456789ABCDEF0, 5
    low = mix(mix(key % 2**32) ^ layer * 0x9E3779B9 % 2**32)
    high = mix(key >> 32 ^ mix(low)) // 2
    expected = [mix(mix(i ^ low) ^ high) >= 2**31 for i in range(1000)]
    assert (dropout(torch.ones(1000), 0.5, torch.tensor(key), layer) != 0).tolist() == expected
