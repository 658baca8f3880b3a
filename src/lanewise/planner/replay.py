"""One replica's pipeline as events, with each stage as long as its share of the layers: what the best few plans are
judged by. The stages are those that a run would cut."""

from dataclasses import replace
from math import ceil

import numpy as np

from lanewise.parallel.stages import recomputes, stages
from lanewise.planner.cost import hand_over
from lanewise.planner.search import Plan, Space
from lanewise.simulator.events import Durations, Event, simulate, span
from lanewise.simulator.schedules import order

BEST = 3  # plans that are judged so, at least
MOST_ACTIONS = 6_000  # of a pipeline that is replayed whole: some hundredths of a second
STEADY = (
    "products", "attention", "pointwise", "launches", "recompute", "head", "tensor", "expert", "context",
)  # fmt: skip


def judged(space: Space, plans: list[Plan]) -> list[Plan]:
    """Plans by step time, where those in front have had their bubble replayed."""
    plans, seen = list(plans), set[str]()
    for _ in range(2 * BEST):
        unseen = next((i for i, plan in enumerate(plans[:BEST]) if plan.name not in seen), None)
        if unseen is None:
            break
        seen.add(plans[unseen].name)
        plans[unseen] = with_replay(space, plans[unseen])
        plans.sort(key=lambda plan: (plan.step, plan.layout.size, str(plan.layout)))
    return plans


def with_replay(space: Space, plan: Plan) -> Plan:
    """The plan with its pipeline's idle time as events tell it; what is not a pipeline of a run's model, as it is."""
    if plan.layout.pp == 1 or space.foreign:
        return plan
    lengths = durations(space, plan)
    looped = plan.layout.pp if plan.chunks > 1 else 1  # goes round in whole rounds
    actions = 3 * plan.layout.pp * plan.chunks
    most = max(MOST_ACTIONS // actions, 2 * plan.layout.pp) // looped * looped
    if plan.count <= most:
        took = span(replay(plan, lengths, plan.count))
    else:  # a longer step goes on as the middle of a shorter one does
        short = ceil(most / 2 / looped) * looped
        spans = [span(replay(plan, lengths, count)) for count in (short, most)]
        took = spans[1] + (plan.count - most) * (spans[1] - spans[0]) / (most - short)
    bubble = max(took - sum(plan.time[name] for name in STEADY), 0.0)
    time = plan.time | {"bubble": bubble}
    ratio = sum(time.values()) / plan.step
    return replace(plan, time=time, low=plan.low * ratio, high=plan.high * ratio)


def replay(plan: Plan, lengths: Durations, count: int) -> list[Event]:
    """The events of `count` microbatches."""
    orders = [
        [a for a in actions if a.kind != "W" or lengths.weights[a.stage]]
        for actions in order(plan.schedule, plan.layout.pp, count, plan.chunks)
    ]
    return simulate(orders, lengths)


def durations(space: Space, plan: Plan) -> Durations:
    """How long each stage takes for a microbatch."""
    ranks, model, settings, train = plan.layout.pp, space.model, space.run.layout, space.run.train
    last = ranks * plan.chunks - 1
    one = {name: plan.time[name] / plan.count for name in STEADY}
    shared = one["tensor"] + one["expert"] + one["context"]
    forward = (
        one["products"] + one["attention"] / 3.5 * 3 + one["pointwise"] / 2.5 * 3 + one["launches"]
    ) / 3 + shared / 2
    backward = sum(one[k] for k in ("products", "attention", "pointwise", "launches", "recompute")) + shared - forward
    cut = stages(space.run.model, last + 1)
    blocks = [len(layers) + (model.ahead if stage == last else 0) for stage, layers in enumerate(cut)]
    f = [forward * n * ranks / model.blocks for n in blocks]
    whole = [backward * n * ranks / model.blocks for n in blocks]
    head = one["head"] * ranks  # all of it is in the last stage
    f[last], whole[last] = f[last] + head / 3, whole[last] + head * 2 / 3
    again = settings.model_copy(update={"recompute": plan.recompute})
    splits = [not (recomputes(again, s) or train.compile or plan.layout.fsdp > 1) for s in range(last + 1)]
    # a backward that does not split is all in its first half; the first stage's has no input to go down to
    i = [whole[s] * (0.0 if s == 0 else 0.5) if splits[s] else whole[s] for s in range(last + 1)]
    w = [all_of_it - first_half for all_of_it, first_half in zip(whole, i, strict=True)]
    hop = hand_over(
        model, plan.choice, space.run.batch.sequence_length, space.cluster, space.precision, space.where.rates
    )
    return Durations(f, i, w, float(np.ravel(hop)[0]))
