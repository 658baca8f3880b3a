"""Plans whose pipelines were replayed as events, against closed forms and whole replays."""

import pytest

from lanewise import config
from lanewise.parallel.layout import Layout
from lanewise.planner import replay, search
from lanewise.planner.machine import place
from lanewise.simulator.events import span

WORDS = [
    "model.preset=llama3-8b",
    "batch.lanes=8",
    "batch.size=1",
    "batch.sequence_length=8192",
    "train.precision=bf16",
]


def explored(*words):
    run = config.load(None, [*WORDS, *words])
    return search.explore(run, place("4x8 H100", None, run), 0)


def steady(plan):
    return sum(plan.time[name] for name in replay.STEADY)


def test_even_stages_wait_as_the_formula_says():
    """1F1B of p even stages idles for p - 1 of m + p - 1 turns (arXiv:2104.04473, section 2.2)."""
    space = explored("batch.microbatches=16")
    plan = search.best_of(space, Layout.parse("pp4.tp8"))
    told = replay.durations(space, plan)
    mean = [sum(part) / len(part) for part in (told.forward, told.inputs, told.weights)]
    even = type(told)(*([length] * plan.layout.pp for length in mean))
    plain = search.replace(plan, schedule="1f1b", chunks=1)
    events = replay.replay(plain, even, plan.count)
    assert span(events) == pytest.approx((plan.count + 3) * sum(mean), rel=1e-6)


def test_a_long_step_goes_on_as_its_middle(monkeypatch):
    space = explored("batch.microbatches=128")
    plan = search.best_of(space, Layout.parse("pp8.tp4"))
    short = replay.with_replay(space, plan)
    monkeypatch.setattr(replay, "MOST_ACTIONS", 10**9)
    whole = replay.with_replay(space, plan)
    assert short.step == pytest.approx(whole.step, rel=0.01)
    assert whole.time["bubble"] > 0
    assert {k: v for k, v in whole.time.items() if k != "bubble"} == {
        k: v for k, v in plan.time.items() if k != "bubble"
    }
    assert whole.low / plan.low == pytest.approx(whole.step / plan.step)


def test_the_ends_make_a_pipeline_wait():
    """A head as large as several layers, on a model of few: no cut is even, and events tell."""
    plan, space = {}, {}
    for vocabulary in (1024, 262144):
        space[vocabulary] = explored("batch.microbatches=32", "model.layers=8", f"model.vocab_size={vocabulary}")
        found = search.best_of(space[vocabulary], Layout.parse("pp4.tp8"))
        plan[vocabulary] = replay.with_replay(space[vocabulary], found)
    idle = {size: p.time["bubble"] / (steady(p) + p.time["bubble"]) for size, p in plan.items()}
    assert idle[262144] > 2 * idle[1024]


def test_those_in_front_have_been_replayed():
    space = explored("batch.microbatches=32")
    plans = search.rank(space)
    told = replay.judged(space, plans)
    assert [p.step for p in told[: replay.BEST]] == sorted(p.step for p in told[: replay.BEST])
    assert {p.name for p in told} == {p.name for p in plans}
    for p in told[: replay.BEST]:
        assert p.time["bubble"] == pytest.approx(replay.with_replay(space, p).time["bubble"])
