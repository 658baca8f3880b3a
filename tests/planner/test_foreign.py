"""Modules of the user's as the planner describes them, against closed forms and the project's own descriptions."""

import json

import pytest
import torch
from torch import nn

from lanewise.cli.main import main
from lanewise.planner.foreign import describe_module, described
from lanewise.planner.trace import trace

GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
CLUSTER = ["batch.lanes=64", "batch.sequence_length=128", "--cluster", "1x8 A100"]


@pytest.fixture
def gpt2(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    return f"hf:{tmp_path / 'config.json'}"


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Asks(nn.Module):
    def forward(self, x):
        return x if float(x.detach().sum()) > 0 else -x


class Net(nn.Module):
    def __init__(self, odd=False):
        super().__init__()
        self.embed = nn.Embedding(1000, 256)
        self.blocks = nn.ModuleList(Asks() if odd and i == 3 else Block(256) for i in range(8))
        self.head = nn.Linear(256, 1000)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def odd():
    return Net(odd=True)


def test_a_config_of_transformers(gpt2):
    """GPT-2's parameters without positions, 12 L H^2 + 13 L H + V H, and FLOPs of its products and causal attention."""
    model = describe_module(gpt2, 1024, {})
    assert (model.layers, model.hidden, model.heads, model.vocab, model.tied) == (12, 768, 12, 50257, True)
    assert model.parameters == pytest.approx(12 * (12 * 768**2 + 13 * 768) + 50257 * 768, rel=1e-4)
    assert model.block_flops(1024) == pytest.approx(2 * 12 * 768**2 + 2 * 768 * 1024, rel=0.01)


def test_a_plain_module_without_attention():
    with torch.device("meta"):
        net, tokens = Net(), torch.zeros(2, 64, dtype=torch.int64)
    model = described(net, trace(net, (tokens,)), 128, 64)
    assert (model.layers, model.hidden, model.vocab, model.tied) == (8, 256, 1000, False)
    assert model.block_dense == sum(p.numel() for p in Block(256).parameters())
    assert model.attention_flops(64) == pytest.approx(0, abs=2 * 256 * 64)


def test_planned_from_the_command_line(gpt2, capsys):
    assert main(["plan", "--module", gpt2, *CLUSTER, "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert {plan["layout"] for plan in plans}.isdisjoint({"cp2", "ep2"})
    assert plans[0]["step_s"] == min(plan["step_s"] for plan in plans)


def test_what_cannot_be_followed_is_named_and_can_be_declared(capsys, tmp_path):
    words = ["plan", "--module", f"{__name__}:odd", *CLUSTER]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "'blocks.3' (Asks)" in told
    assert "--declare blocks.3=FLOPS,BYTES" in told
    assert main([*words, "--declare", "blocks.3=1e6,1e3"]) == 0
    assert main([*words, "--declare", "blocks.3"]) == 2
    assert "PATH=FLOPS,BYTES" in capsys.readouterr().err
    assert main([*words, "--out", str(tmp_path / "planned.toml")]) == 2


def test_a_module_without_blocks(capsys):
    assert main(["plan", "--module", "torch.nn:Identity", *CLUSTER]) == 2
    assert "no repeated blocks" in capsys.readouterr().err
