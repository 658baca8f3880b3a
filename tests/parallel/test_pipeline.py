"""Pipeline parallelism: the same bits as without (A7-A9, A14, A15, N6, N8, P1), tied embeddings too (P2)."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from spread_ranks import DEEPSEEK, DENSE, TOLERANCE, all_traced, alone, errors, make, same_bits, traced
from torch.distributed.pipelining.schedules import get_schedule_class

from lanewise.config import load_model
from lanewise.elastic.world import World
from lanewise.errors import UserError
from lanewise.parallel.build import build_part
from lanewise.parallel.layout import Layout, check
from lanewise.parallel.mesh import Mesh
from lanewise.parallel.pipeline import CLASSES, Event
from lanewise.parallel.stages import cut, dealt, end_cost, layer_cost, stages, turns_back
from lanewise.parallel.trace import MadeUp, trace
from lanewise.replica import Replica
from processes import on_ranks

SEVERAL = ["interleaved", "looped-bfs", "interleaved-zb", "zbv", "dualpipev"]  # schedules of several stages a rank
FEW = {"lanes": 1, "microbatches": 1}


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


@pytest.mark.parametrize(
    "model", [DENSE | {"tie_embeddings": True}, DEEPSEEK | {"mtp_layers": 2}], ids=["dense", "deepseek"]
)
def test_no_schedule_changes_a_bit(model):
    def run(schedule="1f1b"):
        return make(model, lanes=2, layers=4, dropout=0.2, layout={"schedule": schedule})

    right = traced(0, 1, run(), "")
    for schedule, found in zip(CLASSES, on_ranks(2, all_traced, [run(s) for s in CLASSES], "pp2")[0], strict=True):
        assert same_bits(found, right), schedule
    assert max(errors(right, alone(run())).values()) < TOLERANCE


@pytest.mark.parametrize(
    ("model", "axes", "size", "base", "layout", "overrides"),
    [
        (DEEPSEEK, "pp2", 4, "", {"schedule": "zbv", "zero": 2}, {"lanes": 5, "tie_embeddings": True}),
        (DENSE, "pp2.tp2", 4, "tp2", {"schedule": "interleaved-zb"}, {"layers": 5}),
        (DEEPSEEK, "pp2.cp2", 4, "cp2", {"schedule": "1f1b"}, {"lanes": 2, "tie_embeddings": True}),
        (DENSE, "pp4", 4, "", {"schedule": "dualpipev"}, {"lanes": 4, "layers": 9, "train": {"precision": "bf16"}}),
        (DENSE, "pp2", 2, "", {"schedule": "looped-bfs", "chunks": 3, "stages": (1, 2, 1, 1, 1, 1)}, {"layers": 7}),
        (DENSE, "pp2", 2, "", {"stages": (1, 3)}, {}),
        (DENSE, "", 3, "", {}, {"lanes": 5, "tie_embeddings": True}),  # no pipeline, but the two uses kept apart
    ],
)
def test_no_mix_changes_a_bit(model, axes, size, base, layout, overrides):
    overrides = {"layers": 4} | overrides
    right = on_ranks(Layout.parse(base).size, traced, make(model, **overrides), base)[0]
    assert same_bits(on_ranks(size, traced, make(model, layout=layout, **overrides), axes)[0], right)


def test_fewer_microbatches_than_stages():
    """A7."""
    right = traced(0, 1, make(DENSE, layers=4, **FEW), "")
    runs = [make(DENSE, layers=4, layout={"schedule": schedule}, **FEW) for schedule in SEVERAL[:-1]]
    for schedule, found in zip(SEVERAL, on_ranks(2, all_traced, runs, "pp2")[0], strict=False):
        assert same_bits(found, right), schedule


@pytest.mark.parametrize("schedule", SEVERAL)
def test_the_numbers_of_microbatches_that_are_refused_are_those_that_torch_refuses(schedule):
    def torch_takes(pp, count):
        fake = [
            SimpleNamespace(stage_index=s, num_stages=2 * pp, group_size=pp, group_rank=0, submod=None)
            for s in (0, 2 * pp - 1)
        ]
        try:
            get_schedule_class(CLASSES[schedule])(fake, count, loss_fn=lambda loss, _: loss)
        except ValueError:
            return False
        return True

    def we_take(pp, count):
        run = make(DENSE, layers=10, lanes=1, microbatches=count, layout={"schedule": schedule})
        try:
            check(Layout(pp=pp), run, pp)
        except UserError:
            return False
        return True

    for pp, count in itertools.product((2, 3, 4, 5), range(1, 17)):
        assert we_take(pp, count) == torch_takes(pp, count), (pp, count)


def both_ends(rank, size, run):
    world = World(rank, size, torch.device("cpu"), dist.group.WORLD)
    found, replica = trace(run, Mesh(world, Layout.parse("pp3")), MadeUp(run))
    return found, replica.model.embed.weight.detach() if rank != 1 else None


@pytest.mark.parametrize("model", [DENSE, DEEPSEEK], ids=["dense", "deepseek"])
def test_tied_embeddings_at_both_ends(model):
    """A9, P2: counted once in the norm, their gradients added as in one process, their copies equal in every bit."""
    run = make(model, layers=3, tie_embeddings=True)
    (found, first), _, (_, last) = on_ranks(3, both_ends, run)
    assert torch.equal(first, last)
    assert same_bits(found, traced(0, 1, run, ""))
    assert max(errors(found, alone(run)).values()) < TOLERANCE


def recorded(rank, size, run):
    world = World(rank, size, torch.device("cpu"), dist.group.WORLD)
    mesh = Mesh(world, Layout.parse("pp2"), turns_back(run.layout))
    replica = Replica(run, build_part(run, mesh), mesh)
    events = []
    replica.pipeline.recorder = events.append
    replica.compute(1, MadeUp(run).slot, lambda phase: None)
    return events


def test_what_is_recorded():
    run = make(DENSE, layers=4, lanes=2)
    first, last = on_ranks(2, recorded, run)
    assert [f"{e.action}{e.microbatch}" for e in last] == "F0 B0 F1 B1 F2 B2 F3 B3".split()
    assert [f"{e.action}{e.microbatch}" for e in first] == "F0 F1 B0 F2 B1 F3 B2 B3".split()
    assert all(a.start < a.end <= b.start for events in (first, last) for a, b in itertools.pairwise(events))

    run = make(DENSE, layers=4, lanes=2, layout={"schedule": "zbv"})
    found: list[Event] = [event for events in on_ranks(2, recorded, run) for event in events]
    assert {(e.rank, e.stage) for e in found} == {(0, 0), (0, 3), (1, 1), (1, 2)}
    ends = {(e.action, e.stage, e.microbatch): e.end for e in found}
    starts = {(e.action, e.stage, e.microbatch): e.start for e in found}
    for stage, number in itertools.product(range(4), range(4)):
        assert stage == 0 or ends["F", stage - 1, number] < starts["F", stage, number]
        if ("I", stage, number) in ends:
            assert ends["F", stage, number] < starts["I", stage, number] < starts["W", stage, number]
        else:
            assert ends["F", stage, number] < starts["B", stage, number]


def test_the_stages_of_each_rank():
    def settings(**layout):
        return make(DENSE, layout=layout).layout

    assert dealt(settings(), 3) == [[0], [1], [2]]
    assert dealt(settings(schedule="interleaved"), 3) == [[0, 3], [1, 4], [2, 5]]
    assert dealt(settings(schedule="looped-bfs", chunks=3), 2) == [[0, 2, 4], [1, 3, 5]]
    assert dealt(settings(schedule="zbv"), 3) == [[0, 5], [1, 4], [2, 3]]
    run = make(DENSE, layers=8, layout={"stages": (3, 3, 2)})
    assert cut(run, 3) == [range(3), range(3, 6), range(6, 8)]


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
