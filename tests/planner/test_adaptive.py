"""The adviser, told of made-up step times: what it proposes, when it looks, and what it does after a switch."""

import json

import numpy as np
import pytest
from test_probe import STORED

from lanewise import config
from lanewise.planner import adaptive
from lanewise.planner.adaptive import Adviser, Surprise, in_layout
from lanewise.planner.auto import keeping_batch
from lanewise.planner.learning import SETTLED, lesson, runs_path
from lanewise.planner.machine import place, probe_path
from lanewise.planner.search import explore, rank

STEPS = 1000


class Told(list):
    """Of events and lines."""

    def write(self, event, **details):
        self.append((event, details))

    def say(self, line):
        self.append(("said", line))

    def events(self, name):
        return [details for event, details in self if event == name]


@pytest.fixture
def cache(tmp_path):
    path = probe_path(str(tmp_path))
    path.parent.mkdir()
    path.write_text(json.dumps(probed(tensor=2e-3)))  # tp2 takes twice as long as replicas
    return str(tmp_path)


def probed(tensor):
    """A probed machine, on which a call of tensor parallelism costs so many seconds."""
    rates = STORED["rates"]
    return STORED | {"rates": rates | {"costs": rates["costs"] | {"tensor": (1e-9, tensor)}}}


def make(cache, axes="tp2", **layout):
    words = ["model.preset=tiny-dense", "model.vocab_size=300", f"data.cache={cache}", "batch.lanes=4"]
    given = [f"layout.{key}={json.dumps(value)}" for key, value in {"axes": axes, **layout}.items()]
    return config.load(None, [*words, *given])


def predicted(run):
    """Step time by axes, nothing measured."""
    where = place(None, 2, run)
    return {str(plan.layout): plan.step for plan in rank(keeping_batch(explore(run, where, 300)))}


def advised(run, told, workers=2):
    return Adviser(run, workers, told.write, told.say)


def steps(adviser, seconds, count=SETTLED + 1, left=STEPS):
    for _ in range(count):
        adviser.step(seconds, left)


def test_a_better_layout_is_proposed_once_and_only_chosen_if_asked_for(cache):
    run, told = make(cache), Told()
    expected = predicted(run)
    adviser = advised(run, told)
    steps(adviser, expected["tp2"], SETTLED)
    assert not told, "the first step warms up, and the others are too few"
    steps(adviser, expected["tp2"], 200)
    (proposed,) = told.events("proposed")
    best = min(expected, key=expected.get)
    assert (proposed["from"], proposed["to"]) == ("tp2", best)
    assert proposed["step_s"] == pytest.approx(expected["tp2"])
    assert proposed["gain_s"] == pytest.approx(expected["tp2"] - expected[best], rel=1e-6)
    assert proposed["pays_after"] == int(np.ceil(proposed["cost_s"] / proposed["gain_s"]))
    assert proposed["probed"]
    assert [line for line in told.events("said") if "layout.adaptive=true switches" in line] == told.events("said")
    assert adviser.choice is None

    eager, told = make(cache, adaptive=True), Told()
    adviser = advised(eager, told)
    steps(adviser, expected["tp2"], left=proposed["pays_after"])
    assert adviser.choice is None
    assert "but" in told.events("said")[0]
    adviser = advised(eager, Told())
    steps(adviser, expected["tp2"], left=proposed["pays_after"] + 1)
    assert adviser.choice.run.layout.axes == best
    assert adviser.choice.run.batch == eager.batch
    assert not adviser.choice.back


def test_the_best_layout_is_left_alone(cache):
    run = make(cache, adaptive=True)
    expected = predicted(run)
    best = min(expected, key=expected.get)
    told = Told()
    adviser = advised(make(cache, best, adaptive=True), told)
    steps(adviser, expected[best], 100)
    assert not told


def test_what_was_measured_is_in_the_ranking(cache):
    """Where predictions are 15% apart, a layout that does better than its own is left alone."""
    probe_path(cache).write_text(json.dumps(probed(tensor=3e-4)))
    run = make(cache)
    expected = predicted(run)
    assert 0.1 < 1 - min(expected.values()) / expected["tp2"] < 0.2
    for share, proposals in ((1.0, 1), (0.5, 0)):
        told = Told()
        steps(advised(run, told), share * expected["tp2"])
        assert len(told.events("proposed")) == proposals


def test_others_share_what_is_the_machines(cache):
    run = make(cache)
    where = place(None, 2, run)
    before = predicted(run)
    row = lesson(run, where, 3 * before["tp2"])

    def factors(machine):
        surprise = Surprise(where, machine, np.array([row["features"]]), np.log([3.0]))
        plans = rank(keeping_batch(explore(run, where._replace(correction=surprise), 300)))
        return {str(plan.layout): plan.step / before[str(plan.layout)] for plan in plans}

    probed, unprobed = factors(adaptive.PROBED), factors(adaptive.UNPROBED)
    assert probed["tp2"] == pytest.approx(3, rel=0.05)
    assert unprobed["tp2"] == pytest.approx(3, rel=0.05)
    assert probed[""] == pytest.approx(3 ** (0.15 / (0.15 + 0.04)), rel=0.05)
    assert unprobed[""] == pytest.approx(3, rel=0.05), "the ranking stays that of the predictions"


def switched(cache, told, seconds=2.0):
    """An adviser whose proposal was just carried out in so many seconds, and the step time before."""
    run = make(cache, adaptive=True)
    before = predicted(run)["tp2"]
    adviser = advised(run, told)
    steps(adviser, before)
    assert adviser.choice is not None
    adviser.switched(seconds, "memory")
    assert adviser.choice is None
    return adviser, before


def test_what_turns_out_slower_is_left_again_once(cache):
    told = Told()
    adviser, before = switched(cache, told)
    assert json.loads(runs_path(cache).read_text())["measured_s"] == pytest.approx(before)
    steps(adviser, 1.5 * before)
    assert told.events("measured")[0] | {"layout": ""} == {
        "layout": "",
        "step_s": pytest.approx(1.5 * before),
        "before_s": pytest.approx(before),
        "keeps": False,
    }
    assert adviser.choice.back
    assert adviser.choice.run.layout.axes == "tp2"
    adviser.switched(1.0, "memory")
    assert [e["back"] for e in told.events("switched")] == [False, True]
    said = len(told)
    steps(adviser, 10 * before, 100)
    steps(adviser, before, 100)
    assert len(told) == said
    assert adviser.choice is None


def test_what_is_slower_but_not_worth_another_switch_stays(cache, monkeypatch):
    told = Told()
    adviser, before = switched(cache, told, seconds=2.0)
    monkeypatch.setattr(adviser, "_best", lambda where, now: None)
    steps(adviser, before + 0.019, left=100)
    assert told.events("measured")[0]["keeps"]
    assert adviser.choice is None


def test_it_looks_again_when_times_have_moved_and_not_too_often(cache, monkeypatch):
    run = make(cache)
    adviser, looks, clock = advised(run, Told()), [], [0.0]
    monkeypatch.setattr(adviser, "_best", lambda where, now: looks.append(now))
    monkeypatch.setattr(adaptive.time, "perf_counter", lambda: clock[0])
    steps(adviser, 1.0, 50)
    assert looks == [1.0]
    steps(adviser, 1.2, 50)
    assert looks == [1.0], "20% more are not marked"
    steps(adviser, 2.0, 50)
    assert looks == [1.0, 2.0]
    adviser.last = 0.0, 0.1  # a look took 0.1 s: the next may come after 100
    steps(adviser, 1.0, 50)
    assert looks == [1.0, 2.0]
    clock[0] = 101.0
    steps(adviser, 1.0, 50)
    assert looks == [1.0, 2.0, 1.0]


def test_a_fault_of_the_planner_is_a_note(cache):
    run, told = make(cache), Told()
    adviser = advised(run, told)
    probe_path(cache).write_text("{")
    steps(adviser, 1.0, 50)
    (line,) = told.events("said")
    assert "no more advice" in line
    assert "cannot read the measurements" in line


def test_settings_of_a_pipeline_go_when_it_goes(cache):
    run = make(cache, "pp2", schedule="zbv", stages=[2, 1, 1, 2], recompute="full", recompute_stages=[1])
    plans = {str(plan.layout): plan for plan in rank(keeping_batch(explore(run, place(None, 2, run), 300)))}
    layout = in_layout(run, plans["tp2"]).layout
    assert (layout.axes, layout.schedule, layout.chunks, layout.stages, layout.recompute_stages) == (
        "tp2",
        "1f1b",
        0,
        (),
        (),
    )
    assert in_layout(run, None) == run
