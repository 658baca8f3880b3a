"""FSDP inside a replica: parity with one process, for shapes that divide and that do not, and what it leaves alone."""

import pytest
import torch
import torch.distributed as dist
from spread_ranks import DEEPSEEK, DENSE, TOLERANCE, alone, error, errors, make, same_bits, traced

from lanewise.elastic.world import World
from lanewise.errors import UserError
from lanewise.parallel.build import build_part
from lanewise.parallel.layout import Layout, check
from lanewise.parallel.mesh import Mesh
from lanewise.replica import Replica
from processes import on_ranks

# 3 ranks: hidden, heads' and inner widths of which some divide by 3 in their second dim only, some in none.
ODD = {"hidden": 35, "ffn_hidden": 50}


@pytest.mark.parametrize(
    ("model", "axes", "size", "batch"),
    [
        (DENSE, "fsdp2", 2, 4),
        (DEEPSEEK, "fsdp2", 2, 4),
        (DENSE | ODD, "fsdp3", 3, 3),
        (DEEPSEEK | ODD, "fsdp3", 3, 3),
        (DEEPSEEK, "fsdp2.tp2", 4, 2),
        (DENSE, "fsdp2.pp2", 4, 2),
        (DEEPSEEK, "fsdp2.ep2", 4, 4),
        (DEEPSEEK, "fsdp2.cp2", 4, 2),
        (DENSE | {"tie_embeddings": True}, "fsdp2.pp2", 4, 2),
    ],
)
def test_parity_with_one_process(model, axes, size, batch):
    run = make(model, size=batch)
    found = errors(on_ranks(size, traced, run, axes)[0], alone(run))
    worst = max(found, key=found.get)
    assert found[worst] < TOLERANCE, worst


@pytest.mark.parametrize("zero", [0, 2])
def test_replicas_of_it_change_no_bit(zero):
    run = make(DEEPSEEK, lanes=3)
    right = on_ranks(2, traced, run, "fsdp2")[0]
    assert same_bits(on_ranks(4, traced, make(DEEPSEEK, lanes=3, layout={"zero": zero}), "fsdp2")[0], right)


def test_these_settings_change_no_bit():
    right = on_ranks(2, traced, make(DEEPSEEK), "fsdp2")[0]
    for settings in ({"offload": True, "recompute": "full"}, {"recompute": "selective"}):
        assert same_bits(on_ranks(2, traced, make(DEEPSEEK, layout=settings), "fsdp2")[0], right), settings


def test_mixed_precision():
    """bf16 computes, fp32 keeps: about as far from fp32 as bf16 in one process, and updates too small for bf16 stay."""
    fp32 = alone(make(DENSE))
    run = make(DENSE, train={"precision": "bf16"})
    found, plain = on_ranks(2, traced, run, "fsdp2")[0], on_ranks(1, traced, run, "")[0]
    for name, right in fp32.gradients.items():
        assert error(found.gradients[name], right) < 2 * error(plain.gradients[name], right) + 0.02, name
    ours = torch.cat([w.flatten() for name, w in found.weights.items() if name.startswith("model/")])
    assert ours.dtype == torch.float32
    assert (ours != ours.bfloat16().float()).float().mean() > 0.9


def _sizes(rank, size, run):
    replica = Replica(run, *_part(rank, size, run))
    masters = {part.master.data_ptr() for part in replica.optimizer.parts}
    weights = {bucket.weights.data_ptr() for bucket in replica.buckets}
    assert masters == weights, "two copies of the master weights"
    return sum(bucket.weights.numel() for bucket in replica.buckets)


def _part(rank, size, run):
    mesh = Mesh(World(rank, size, torch.device("cpu"), dist.group.WORLD if size > 1 else None), Layout(fsdp=size))
    if size == 1:
        mesh = Mesh.alone(torch.device("cpu"))
    return build_part(run, mesh), mesh


def test_each_rank_keeps_its_share():
    run = make(DENSE, size=4, hidden=256, ffn_hidden=512)
    (whole,) = on_ranks(1, _sizes, run)
    for kept in on_ranks(4, _sizes, run):
        assert kept < 0.27 * whole  # a quarter, and each parameter's padding to a block


def test_offload_needs_fsdp():
    with pytest.raises(UserError, match=r"layout\.offload: .* add fsdpN"):
        check(Layout(tp=2), make(DENSE, layout={"offload": True}), 2)
