"""Frozen parameters (A12): no gradient, no update, no decay, no memory for either; kept whole in every layout."""

import pytest
import torch
from spread_ranks import DEEPSEEK, DENSE, TOLERANCE, alone, errors, make, same_bits, traced

from lanewise.errors import UserError
from lanewise.models.build import build
from lanewise.models.freeze import frozen
from lanewise.models.init import initial
from lanewise.parallel.build import build_part
from lanewise.parallel.mesh import Mesh
from lanewise.parallel.trace import MadeUp
from lanewise.replica import Replica
from processes import on_ranks

FIRST = ["embed.weight", "layers.0.*"]
SOME = ["layers.1.ffn.*", "*norm.weight", "mtp.0.block.attention.kv_down.weight"]  # a router and its experts among them


@pytest.mark.parametrize(
    ("model", "axes", "size", "patterns", "overrides"),
    [
        (DENSE, "", 2, FIRST, {"layout": {"zero": 0}}),
        (DENSE, "tp2", 4, FIRST, {"layout": {"zero": 2}}),
        (DENSE, "pp2", 2, FIRST, {}),  # a stage with nothing to train
        (DEEPSEEK, "", 3, SOME, {"lanes": 3, "layout": {"zero": 1}}),
        (DEEPSEEK, "ep2", 2, SOME, {}),
        (DEEPSEEK, "fsdp2", 2, SOME, {"size": 4}),
        (DEEPSEEK, "pp2", 2, ["head.weight", "layers.2.*"], {"tie_embeddings": True}),
    ],
)
def test_every_number_is_that_of_one_process(model, axes, size, patterns, overrides):
    run = make(model, **overrides, train={"freeze": patterns})
    trace = on_ranks(size, traced, run, axes)[0]
    found = errors(trace, alone(run))
    worst = max(found, key=found.__getitem__)
    assert found[worst] < TOLERANCE, f"{worst}: {found[worst]}"
    table = {spec.name: spec for spec in build(run.model).table()}
    fixed = frozen(tuple(table.values()), patterns)
    assert {"gradient " + name for name in fixed}.isdisjoint(found)
    for name, spec in table.items():
        assert torch.equal(trace.weights[f"model/{name}"], initial(spec, run.train.seed)) == (name in fixed), name
        assert (f"exp_avg/{name}" in trace.weights) == (name not in fixed)


def test_replicas_and_sharding_change_no_bit():
    one = on_ranks(1, traced, make(DEEPSEEK, lanes=3, train={"freeze": SOME, "precision": "bf16"}), "")[0]
    for size, zero in ((2, 0), (3, 2)):
        run = make(DEEPSEEK, lanes=3, train={"freeze": SOME, "precision": "bf16"}, layout={"zero": zero})
        assert same_bits(on_ranks(size, traced, run, "")[0], one)


def test_no_memory_for_gradients_and_moments():
    run = make(DENSE, train={"freeze": FIRST})
    mesh = Mesh.alone(torch.device("cpu"))
    replica = Replica(run, build_part(run, mesh), mesh)
    replica.compute(1, MadeUp(run).slot, lambda phase: None)
    frozen_names = {n for n, p in replica.model.named_parameters() if not p.requires_grad}
    assert frozen_names == frozen(replica.model.table(), FIRST)
    assert all(p.grad is None for p in replica.model.parameters())
    buffered = {place.spec.name for s in replica.reducer.sums for place in s.bucket.places}
    assert buffered == {n for n, _ in replica.model.named_parameters()} - frozen_names
    for part in replica.optimizer.parts:
        names = {place.spec.name for place in part.bucket.places}
        assert names.isdisjoint(frozen_names) or (names <= frozen_names and part.exp_avg.numel() == 0)


def test_patterns():
    table = build(make(DENSE, tie_embeddings=True).model).table()
    assert frozen(table, ["head.weight"]) == {"embed.weight"}, "tied: one parameter under two names"
    assert frozen(table, ["layers.?.attention.k.bias"]) == {f"layers.{i}.attention.k.bias" for i in (0, 1)}
    with pytest.raises(UserError, match=r"'layer.0.ffn.up.weight'; the nearest are layers.0.ffn.up.weight"):
        frozen(table, ["layers.1.*", "layer.0.ffn.up.weight"])
    with pytest.raises(UserError, match="leave some"):
        frozen(table, ["*"])
