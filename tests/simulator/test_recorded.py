"""The timeline of each schedule against the order of events that a real run of it records, on two ranks."""

import torch
import torch.distributed as dist

from lanewise.config import Run
from lanewise.elastic.world import World
from lanewise.parallel.build import build_part
from lanewise.parallel.layout import Layout
from lanewise.parallel.mesh import Mesh
from lanewise.parallel.pipeline import Event as Recorded
from lanewise.parallel.stages import turns_back
from lanewise.parallel.trace import MadeUp
from lanewise.replica import Replica
from lanewise.simulator.events import Durations, Event, out_of_order, simulate
from lanewise.simulator.schedules import SCHEDULES, order
from processes import on_ranks

MICROBATCHES = 8
CHUNKS = {"gpipe": 1, "1f1b": 1}  # else two


def recorded(rank: int, size: int, recompute: str) -> dict[str, list[Recorded]]:
    found = {}
    for schedule in SCHEDULES:
        model = {"preset": "tiny-dense", "layers": 4, "hidden": 16, "heads": 2, "kv_heads": 1, "vocab_size": 32}
        batch = {"lanes": 4, "microbatches": MICROBATCHES // 4, "size": 1, "sequence_length": 8}
        layout = {"schedule": schedule, "recompute": recompute}
        run = Run.model_validate({"model": model | {"ffn_hidden": 16}, "batch": batch, "layout": layout})
        world = World(rank, size, torch.device("cpu"), dist.group.WORLD)
        mesh = Mesh(world, Layout.parse("pp2"), turns_back(run.layout))
        replica = Replica(run, build_part(run, mesh), mesh)
        events = found[schedule] = []
        replica.pipeline.recorder = events.append
        replica.compute(1, MadeUp(run).slot, lambda phase: None)
    return found


def simulated(schedule: str) -> list[Event]:
    chunks = CHUNKS.get(schedule, 2)
    parts = [1.0 / chunks] * (2 * chunks)
    return simulate(order(schedule, 2, MICROBATCHES, chunks), Durations(parts, parts, parts, 0.01))


def test_recorded_events_have_the_same_fields():
    assert Recorded._fields == Event._fields


def test_each_rank_works_in_the_simulated_order():
    first, last = on_ranks(2, recorded, "none")
    for schedule in SCHEDULES:
        both = [Event(*event) for event in first[schedule] + last[schedule]]
        assert out_of_order(simulated(schedule), both) == [], schedule


def test_where_no_stage_splits_a_backward_there_are_no_halves():
    """Recomputed blocks do their whole backward in I, and no W is left to record."""
    first, last = on_ranks(2, recorded, "full")
    for schedule in SCHEDULES:
        both = [Event(*event) for event in first[schedule] + last[schedule]]
        whole = [event for event in simulated(schedule) if event.action != "W"]
        assert out_of_order(whole, both) == [], schedule
