"""Timelines with known lengths, pictures and traces, days of failures."""

import itertools
import json
import xml.etree.ElementTree as ET

import pytest

from lanewise import config
from lanewise.cli.main import main
from lanewise.planner.cluster import read_cluster
from lanewise.planner.machine import Where
from lanewise.simulator.events import Durations, Event, bubble, out_of_order, simulate, span
from lanewise.simulator.goodput import DAY, Faults, checkpoint_interval, days
from lanewise.simulator.run import simulate_run
from lanewise.simulator.schedules import SCHEDULES, order

CHUNKS = {"gpipe": 1, "1f1b": 1}


def timeline(schedule, ranks=4, microbatches=8, hop=0.0):
    chunks = CHUNKS.get(schedule, 2)
    parts = [1 / chunks] * (ranks * chunks)
    return simulate(order(schedule, ranks, microbatches, chunks), Durations(parts, parts, parts, hop))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_bubble_of_the_formula(schedule):
    """(p - 1) / (m + p - 1) of the time, whatever the order."""
    assert bubble(timeline(schedule)) == pytest.approx(3 / 11)
    assert span(timeline(schedule)) == 33


def test_interleaving_divides_the_bubble():
    assert bubble(timeline("interleaved")) == pytest.approx(1.5 / 9.5)


def test_zero_bubble_and_v_shapes_have_less():
    for schedule in ("interleaved-zb", "zbv", "dualpipev"):
        assert bubble(timeline(schedule)) < bubble(timeline("interleaved"))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_starts_before_what_it_needs(schedule):
    events = timeline(schedule, hop=0.1)
    ends = {(e.action, e.stage, e.microbatch): e for e in events}
    last = max(e.stage for e in events)
    for e in events:
        if e.action == "F" and e.stage:
            before = ends["F", e.stage - 1, e.microbatch]
            assert e.start >= before.end + 0.1 * (before.rank != e.rank) - 1e-12
        if e.action in "BI" and e.stage < last:
            after = ends.get(("B", e.stage + 1, e.microbatch)) or ends["I", e.stage + 1, e.microbatch]
            assert e.start >= after.end + 0.1 * (after.rank != e.rank) - 1e-12
    for rank in range(4):
        mine = [e for e in events if e.rank == rank]
        assert all(a.end <= b.start + 1e-12 for a, b in itertools.pairwise(mine))


def test_order_is_compared_rank_by_rank():
    events = timeline("1f1b")
    assert out_of_order(events, [Event(*e[:4], e.start + 5, e.end + 5) for e in events]) == []
    swapped = [e._replace(start=40) if e[:4] == (2, "F", 2, 1) else e for e in events]
    assert out_of_order(events, swapped)[0].startswith("rank 2, action 1")


def test_simulate_verb_draws_and_traces(tmp_path, capsys):
    picture, trace = tmp_path / "a.svg", tmp_path / "a.json"
    words = ["model.preset=llama3-8b", "train.precision=bf16", "batch.lanes=16", "batch.sequence_length=4096"]
    where = ["--cluster", "1x8 H100", "--layout", "pp4.tp2", "--schedule", "zbv"]
    assert main(["simulate", *words, *where, "--picture", str(picture), "--trace", str(trace), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schedule"] == "zbv"
    boxes = [e for e in ET.parse(picture).iter() if e.tag.endswith("rect") and list(e)]
    drawn = json.loads(trace.read_text())["traceEvents"]
    assert len(boxes) == sum(e["ph"] == "X" for e in drawn) == 4 * 2 * 16 * 3
    assert {e["pid"] for e in drawn} == {0, 1, 2, 3}
    assert main(["simulate", *words, *where]) == 0
    assert "goodput" in capsys.readouterr().out


def test_a_backward_that_does_not_split_has_no_second_half():
    """Recomputed blocks do all of it in the first; the first stage has no gradient of an input to make."""
    words = ["model.preset=llama3-8b", "train.precision=bf16", "batch.lanes=16", "batch.sequence_length=4096"]
    words += ['layout.axes="pp4.tp2"', "layout.schedule=zbv"]
    whole, split = (
        simulate_run(config.load(None, [*words, f"layout.recompute={how}"]), Where(read_cluster("1x8 H100"))).events
        for how in ("full", "none")
    )
    assert {e.action for e in whole} == {"F", "I"}
    assert {e.action for e in split} == {"F", "I", "W"}
    assert {e.stage for e in split if e.action == "I" and e.end == e.start} == {0}


def test_days_add_up_and_are_drawn_from_the_seed():
    faults = Faults(mtbf=5.7 * 365.25 * DAY)
    spent = days(10.0, 16384, faults, seed=3)
    assert spent == days(10.0, 16384, faults, seed=3) != days(10.0, 16384, faults, seed=4)
    parts = ("steps", "jitter", "checkpoints", "lost work", "restarts")
    assert sum(spent[p] for p in parts) == pytest.approx(spent["seconds"], rel=0.01)
    # 419 interruptions in 54 days of such a cluster (arXiv:2407.21783, section 3.3.4)
    assert spent["failures"] / 7 == pytest.approx(419 / 54, rel=0.35)


def test_surviving_failures_loses_less():
    faults = {"mtbf": 5.7 * 365.25 * DAY, "replicas": 128}
    assert (
        days(10.0, 16384, Faults(**faults))["goodput"] > days(10.0, 16384, Faults(**faults, survives=False))["goodput"]
    )


def test_checkpoint_interval_is_near_the_best():
    faults = {"mtbf": 5.7 * 365.25 * DAY, "survives": False, "write": 30.0}
    every = checkpoint_interval(10.0, 16384, Faults(**faults))
    good = {
        n: sum(days(10.0, 16384, Faults(**faults, every=n), seed=s)["goodput"] for s in range(5))
        for n in (every // 8, every, every * 8)
    }
    assert max(good, key=good.get) == every
