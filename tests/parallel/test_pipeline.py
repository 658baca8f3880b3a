"""Pipeline parallelism: the same bits as without (A7-A9, A14, A15, N6, N8, P1), and tied embeddings (P2)."""

import pytest
import torch
import torch.distributed as dist
from spread_ranks import DEEPSEEK, DENSE, TOLERANCE, alone, errors, make, same_bits, traced

from lanewise.config import load_model
from lanewise.elastic.world import World
from lanewise.parallel.layout import Layout
from lanewise.parallel.mesh import Mesh
from lanewise.parallel.stages import end_cost, layer_cost, stages
from lanewise.parallel.trace import MadeUp, trace
from processes import on_ranks


@pytest.mark.parametrize(
    ("model", "axes", "size", "base", "overrides"),
    [
        (DENSE, "pp2", 2, "", {"dropout": 0.2, "layers": 3}),
        (DENSE, "pp2", 4, "", {"train": {"precision": "bf16"}}),
        (DENSE, "pp2.tp2", 4, "tp2", {}),
        (DEEPSEEK, "pp2", 2, "", {"dropout": 0.2, "layers": 2}),  # the first stage has no experts (A8)
        (DEEPSEEK, "pp3", 3, "", {"layers": 4, "mtp_layers": 2}),  # stages of different depth
        (DEEPSEEK, "pp2", 2, "", {"lanes": 1, "microbatches": 1}),  # fewer microbatches than stages (A7)
        (DEEPSEEK, "pp2", 6, "", {"lanes": 5, "layout": {"zero": 2}}),  # replicas with 1 and 2 lanes
        (DEEPSEEK, "pp2.ep2", 4, "ep2", {}),
        (DEEPSEEK, "pp2.cp2", 4, "cp2", {}),
    ],
)
def test_no_bit_changes(model, axes, size, base, overrides):
    run = make(model, **overrides)
    found = on_ranks(size, traced, run, axes)[0]
    assert same_bits(found, on_ranks(Layout.parse(base).size, traced, run, base)[0])
    if run.train.precision == "fp32":
        assert max(errors(found, alone(run)).values()) < TOLERANCE


def both_ends(rank, size, run):
    world = World(rank, size, torch.device("cpu"), dist.group.WORLD)
    found, replica = trace(run, Mesh(world, Layout.parse("pp3")), MadeUp(run))
    return found, replica.model.embed.weight.detach() if rank != 1 else None


@pytest.mark.parametrize("model", [DENSE, DEEPSEEK], ids=["dense", "deepseek"])
def test_tied_embeddings_at_both_ends(model):
    """A9, P2: counted once in the norm, their gradients added, their copies equal in every bit."""
    run = make(model, layers=3, tie_embeddings=True)
    (found, first), _, (_, last) = on_ranks(3, both_ends, run)
    assert torch.equal(first, last)
    assert max(errors(found, alone(run)).values()) < TOLERANCE


def test_stages_by_cost():
    dense = load_model({"preset": "tiny-dense", "layers": 8, "vocab_size": 10})
    assert [len(r) for r in stages(dense, 4)] == [2, 2, 2, 2]
    deepseek = load_model({"preset": "deepseek-v3"})
    for count in (1, 2, 7, 16, 61):
        cut = stages(deepseek, count)
        assert [index for layers in cut for index in layers] == list(range(61))
        assert len(cut) == count
        assert all(len(layers) > 0 for layers in cut)
    costs = [sum(layer_cost(deepseek, i) for i in layers) for layers in stages(deepseek, 16)]
    costs[-1] += end_cost(deepseek)
    even = sum(costs) / 16
    assert max(costs) < 1.5 * even, "no stage is far above the mean"
    assert min(costs) > 0.5 * even
    assert len(stages(deepseek, 16)[-1]) < len(stages(deepseek, 16)[0]), "the head and what lies ahead weigh, too"
