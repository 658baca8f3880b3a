"""Recomputation changes no bit (A14), and keeps less."""

from types import SimpleNamespace

import pytest
import torch
from spread_ranks import DEEPSEEK, DENSE, all_traced, make, same_bits, traced

from lanewise.elastic.world import World
from lanewise.models.init import fill
from lanewise.parallel.build import build_part
from lanewise.parallel.mesh import Mesh
from processes import on_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("model", "axes", "size"), [(DENSE, "tp2", 2), (DEEPSEEK, "", 1), (DEEPSEEK, "pp2", 2), (DEEPSEEK, "ep2", 2)]
)
def test_no_bit_changes(model, axes, size):
    kept = on_ranks(size, traced, make(model, dropout=0.2), axes)[0]
    for how in ("full", "selective"):
        run = make(model, dropout=0.2, layout={"recompute": how})
        assert same_bits(on_ranks(size, traced, run, axes)[0], kept), how


def test_in_some_stages_of_a_split_backward():
    """Zero-bubble schedules take the two halves of a backward apart: not so where a stage recomputes."""

    def run(**layout):
        return make(DEEPSEEK, layers=4, dropout=0.2, layout=layout)

    settings = [{"recompute": "full", "recompute_stages": (1, 3)}, {"recompute": "selective", "recompute_stages": (0,)}]
    right = traced(0, 1, run(), "")
    found = on_ranks(2, all_traced, [run(schedule="zbv", **layout) for layout in settings], "pp2")[0]
    assert all(same_bits(trace, right) for trace in found)


def test_only_the_stages_that_are_named_recompute():
    run = make(DENSE, layers=4, layout={"recompute": "full", "recompute_stages": (1,), "schedule": "interleaved"})
    mesh = SimpleNamespace(size={"pp": 2}, at={"pp": 1}, layout=SimpleNamespace(size=1), world=World(0, 1, CPU))
    mesh.size |= dict.fromkeys(("replica", "fsdp", "cp", "ep", "tp"), 1)
    blocks = build_part(run, mesh).layers
    assert {index: "forward" in vars(block) for index, block in blocks.items()} == {"1": True, "3": False}


def held(model, how):
    """Bytes that a forward keeps for its backward, each storage once, weights aside."""
    run = make(model, dropout=0.2, layout={"recompute": how})
    part = build_part(run, Mesh.alone(torch.device("cpu")))
    fill(part, 0)
    weights = {p.untyped_storage().data_ptr() for p in part.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), storage)
        return tensor

    tokens = torch.arange(32).view(2, 16)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = part(tokens, tokens, torch.tensor(7))
    output.loss_sum.backward()
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("model", [DENSE, DEEPSEEK], ids=["dense", "deepseek"])
def test_full_keeps_less(model):
    assert held(model, "full") < 0.5 * held(model, "none")
