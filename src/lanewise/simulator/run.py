"""One layout of a run in detail: its waterfall, its pipeline as events, and days of it."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from lanewise.config import Run
from lanewise.errors import UserError
from lanewise.parallel.layout import Layout
from lanewise.planner.choice import SCHEDULES
from lanewise.planner.machine import Where
from lanewise.planner.replay import durations, replay, with_replay
from lanewise.planner.report import numbers, waterfall
from lanewise.planner.search import USABLE, Plan, Space, cost_out, fixed
from lanewise.simulator.events import Event, bubble, span
from lanewise.simulator.goodput import DAY, Faults, checkpoint_interval, days
from lanewise.simulator.picture import chrome_trace, svg


@dataclass(frozen=True)
class Simulated:
    space: Space
    plan: Plan
    events: list[Event]
    faults: Faults
    spent: dict[str, float]
    length: float

    def svg(self) -> str:
        return svg(self._events(), self._title())

    def trace(self) -> str:
        return chrome_trace(self._events())

    def _events(self) -> list[Event]:
        if not self.events:
            raise UserError(f"layout {self.plan.layout}: there is no pipeline to draw: give it pp2 or more")
        return self.events

    def _title(self) -> str:
        return f"{self.plan.schedule}, {self.plan.layout}, {self.plan.count} microbatches"

    def numbers(self) -> dict[str, Any]:
        found = numbers(self.space, self.plan)
        found["pipeline"] = {"span_s": span(self.events), "bubble": bubble(self.events)} if self.events else None
        found["days"] = {"length_days": self.length / DAY, **self.spent}
        return found

    def text(self) -> str:
        usable = self.space.cluster.device.memory * USABLE
        lines = [
            f"{self.space.cluster}: {self.plan.name}, {self.plan.micro}x{self.plan.count} sequences",
            waterfall(self.plan),
        ]
        if self.plan.bytes > usable:
            lines.append(f"it does not fit: {(self.plan.bytes - usable) / 1e9:.3g} GB too much")
        if self.events:
            lines.append(f"pipeline as events: {span(self.events):.4g} s, bubble {bubble(self.events):.1%}")
        s = self.spent
        causes = [name for name in ("jitter", "checkpoints", "lost work", "restarts") if s[name] > 0]
        lost = ", ".join(f"{name} {s[name] / s['seconds']:.2%}" for name in causes)
        lines.append(
            f"{self.length / DAY:g} days: {s['committed']:,.0f} steps, {s['failures']:.0f} failures, "
            f"goodput {s['goodput']:.1%}{f' ({lost})' if lost else ''}; a checkpoint every {self.faults.every} steps"
        )
        return "\n".join(lines)


def simulate_run(
    run: Run,
    where: Where,
    schedule: str | None = None,
    chunks: int | None = None,
    length_days: float = 7.0,
    seed: int = 0,
) -> Simulated:
    """Raises UserError if the layout cannot be, or the schedule."""
    schedule = schedule or getattr(run.layout, "schedule", "1f1b")
    if schedule not in SCHEDULES:
        raise UserError(f"schedule {schedule!r} is unknown: choose one of {', '.join(SCHEDULES)}")
    one = schedule in ("1f1b", "gpipe") or Layout.parse(run.layout.axes).pp == 1
    chunks = chunks or getattr(run.layout, "chunks", 0) or (1 if one else 2)
    space = fixed(run, where, schedule, chunks)
    cluster = where.cluster
    plan = cost_out(space, np.array([0]))[0]
    events = []
    if plan.layout.pp > 1:
        if plan.layout.pp * chunks > space.model.layers:
            raise UserError(
                f"{plan.layout.pp} ranks with {chunks} stages each: more than model.layers ({space.model.layers})"
            )
        events, plan = replay(plan, durations(space, plan), plan.count), with_replay(space, plan)
    faults = Faults(cluster.mtbf, replicas=plan.replicas)
    faults = Faults(cluster.mtbf, replicas=plan.replicas, every=checkpoint_interval(plan.step, cluster.devices, faults))
    pure = plan.step - plan.time["jitter"]
    length = length_days * DAY
    return Simulated(space, plan, events, faults, days(pure, cluster.devices, faults, length, seed), length)
