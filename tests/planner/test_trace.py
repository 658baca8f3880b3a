"""Modules of ours and of others, followed on the meta device."""

import pytest
import torch
from torch import Tensor, nn

from lanewise import config
from lanewise.errors import UserError
from lanewise.models.build import build
from lanewise.planner.choice import Choice
from lanewise.planner.memory import OURS, saved
from lanewise.planner.model import describe
from lanewise.planner.trace import trace


class Strange(nn.Module):
    """Its output's shape depends on numbers, which meta tensors lack."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x.sum(-1) > 0]


def test_a_plain_network_by_hand():
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU()) for _ in range(3)))
        found = trace(net, (torch.empty(4, 8, requires_grad=True),))
    block, rest = found
    assert (block.count, block.parameters, block.flops) == (3, 64, 2 * 4 * 8 * 8)
    assert block.saved == 2 * 4 * 8 * 4  # the product's input and the activation's output, in fp32
    assert (rest.parameters, rest.flops) == (0, 0)


def test_another_librarys_model():
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        block, rest = trace(model, (torch.empty(2, 16, 64),))
    assert (block.path, block.count) == ("layers.0", 3)
    weights = 4 * 64 * 64 + 2 * 64 * 128
    assert block.parameters == weights + 4 * 64 + 128 + 64 + 2 * 2 * 64  # biases and norms
    # two products of 16 x 16 scores a head, on top of the weights', for 32 tokens
    assert block.flops == 2 * 32 * weights + 2 * 2 * 2 * 16 * 16 * 64
    assert (rest.parameters, rest.flops) == (0, 0)


def test_saved_activations_of_our_block_are_the_memory_models():
    """bf16, heads of 64: the closed form, times what our engine keeps beyond a fused block."""
    model = config.load_model(
        {"preset": "tiny-dense", "vocab_size": 512, "layers": 3, "hidden": 512, "heads": 8, "kv_heads": 8}
    )
    with torch.device("meta"):
        built = build(model).to(torch.bfloat16)
        tokens = torch.zeros(2, 16, dtype=torch.int64)  # short: on meta, attention keeps its scores
        block = trace(built, (tokens, tokens, None))[0]
    stated = float(saved(describe(model), Choice(micro=2), 16, 0)) * OURS.activations
    assert block.count == 3
    assert block.saved == pytest.approx(stated, rel=0.1)


def test_what_cannot_be_followed_is_named_and_can_be_declared():
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(8, 8), Strange(), nn.Linear(8, 8))
        x = torch.empty(4, 8, requires_grad=True)
        with pytest.raises(UserError, match=r"module '1' \(Strange\).*declared=\{'1'"):
            trace(net, (x,))
        found = trace(net, (x,), declared={"1": (1000, 128)})
    assert sum(t.flops * t.count for t in found) == 2 * 2 * 4 * 8 * 8 + 1000
