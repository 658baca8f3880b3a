"""While a run goes on: would another layout be faster, now that its steps are measured?

Rank 0 has an adviser, which is told what each step took. Once enough steps are measured, and again when their time has
moved markedly, it ranks the layouts that leave lanes and batch alone. What it finds it proposes; with `layout.adaptive`
it chooses it if that pays in the steps that are left, and the trainer switches. Then the new layout is measured too,
and if it pays to go back, the run does so, once, and tries no more. Nothing here knows of processes: if the workers
become others, the next adviser is for those.

How measurements inform the ranking: log(measured / predicted) is a surprise, in part the machine's, which all layouts
share, and in part the layout's own (`Surprise`). So a layout that ran stands nearly at what it took, all others move
with it, but less, and where nobody has probed the machine nearly as much.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, log
from statistics import median
from typing import Any

import numpy as np

from lanewise.config import Run
from lanewise.errors import UserError
from lanewise.parallel.layout import Layout, check
from lanewise.planner.auto import keeping_batch
from lanewise.planner.choice import Floats
from lanewise.planner.correction import Corrected
from lanewise.planner.learning import SETTLED, as_it_is, keep, lesson
from lanewise.planner.machine import Where, is_probed, place
from lanewise.planner.search import Plan, explore, rank

GAIN = 0.1  # of a step must be saved: predictions are no better than that
MOVED = 1.25  # ratio of two measured step times that calls for another look
SHARE = 1e-3  # of the run's time may go into looks
BUILD = 0.5  # seconds to set up another layout, before its tensors are moved
# Variances of log(measured / predicted): what moves all layouts alike (load, clocks; without a probe, the kind of
# machine), what is a layout's own (set when predictions here had a median error of 12%, p90 34%), and that of a median
# of a few steps.
PROBED, UNPROBED, OWN, NOISE = 0.15, 2.5, 0.04, 0.002
PLAIN: dict[str, Any] = {"schedule": "1f1b", "chunks": 0, "stages": (), "recompute_stages": ()}


@dataclass(frozen=True)
class Surprise:
    """How far steps of this run were from what `where` predicts, as a correction on top of it.

    log_M: of measured / predicted of the layouts that ran, whose features are features_MF. Part of it is the machine's,
    of variance `machine`, and so any layout's; part a layout's own. What is known of the sum tells what to expect of
    each (the conditional mean of normal variables).
    """

    where: Where
    machine: float
    features_MF: Floats
    log_M: Floats

    def predict(self, features_NF: Floats) -> Corrected:
        told = self.where.correct(features_NF)
        known = self._shared(self.features_MF) + NOISE * np.eye(len(self.log_M))
        factor = np.exp(self._shared(features_NF) @ np.linalg.solve(known, self.log_M))
        return Corrected(told.factor * factor, told.low * factor, told.high * factor, np.zeros(len(factor), dtype=bool))

    def _shared(self, features_NF: Floats) -> Floats:
        """[N, M]: what layouts' surprises have in common with those measured."""
        same_NM = np.isclose(features_NF[:, None], self.features_MF[None]).all(axis=2)
        return np.asarray(self.machine + OWN * same_NM)


@dataclass(frozen=True)
class Switch:
    """What all ranks are to do at the next commit. bytes: of the weights and the optimizer on the new layout's fullest
    rank; back: to the layout left last."""

    run: Run
    bytes: float
    back: bool = False


class Adviser:
    """write(event, **details) and say(line) are for people and the run's records. choice: what to switch to, or None.

    A fault of the planner is said once, and ends the advice; it never ends the run.
    """

    def __init__(self, run: Run, workers: int, write: Callable[..., None], say: Callable[[str], None]) -> None:
        self.run, self.workers, self.write, self.say = run, workers, write, say
        self.choice: Switch | None = None
        self.over = False
        self.proposed: list[Run] = []
        self.seen: dict[str, dict[str, Any]] = {}  # by layout, the lesson of its steps
        self.left: tuple[Run, float] | None = None  # until the new layout is judged: what was left, and its step time
        self.cost: float | None = None  # seconds the last switch took
        self.last = time.perf_counter(), 0.0  # when it last looked, and how long that took
        self._anew()

    def _anew(self) -> None:
        """The layout's steps are measured from here on."""
        self.times: deque[float] = deque(maxlen=SETTLED + 1)  # the first warms up
        self.known: float | None = None  # step time at the last look

    def step(self, seconds: float, left: int) -> None:
        """After each step: the time it took, waiting for data left out, and how many are to come."""
        self.times.append(seconds)
        if self.over or self.choice is not None or len(self.times) <= SETTLED:
            return
        now = median(list(self.times)[1:])
        try:
            if self.left is not None:
                self._judge(now, left)
            elif self._is_due(now):
                self._look(now, left)
        except Exception as error:
            self.over = True
            self.say(f"no more advice on layouts: {type(error).__name__}: {error}")

    def _is_due(self, now: float) -> bool:
        if self.known is None:
            return True
        when, took = self.last
        moved = max(now / self.known, self.known / now) > MOVED
        return moved and time.perf_counter() - when >= took / SHARE

    def _look(self, now: float, left: int) -> None:
        started = time.perf_counter()
        if self.known is not None:
            self.seen.clear()  # what others took before times changed says nothing of now
        self.known = now
        where = place(None, self.workers, self.run, guess=True)
        best = self._best(where, now)
        if best is not None and now - best[0].step > GAIN * now:
            self._propose(*best, where, now, left)
        self.last = started, time.perf_counter() - started

    def _best(self, where: Where, now: float) -> tuple[Plan, Run] | None:
        """The fastest layout beside the present one, of which a step takes `now`, and the run in it."""
        self.seen[str(self.run.layout)] = lesson(self.run, where, now)
        surprises = [log(row["measured_s"] / row["predicted_s"]) for row in self.seen.values()]
        features = np.array([row["features"] for row in self.seen.values()])
        machine = PROBED if is_probed(self.run.data.cache) else UNPROBED
        informed = where._replace(correction=Surprise(where, machine, features, np.array(surprises)))
        vocabulary = self.run.model.vocab_size or self.run.data.vocab_size
        for plan in rank(keeping_batch(explore(self.run, informed, vocabulary))):
            run = in_layout(self.run, plan)
            try:
                check(plan.layout, run, self.workers)
            except UserError:
                continue
            if run.layout != in_layout(self.run, None).layout:
                return plan, run
        return None

    def _propose(self, plan: Plan, run: Run, where: Where, now: float, left: int) -> None:
        gain, size = now - plan.step, state_bytes(run, where)
        cost = BUILD + now + size / where.cluster.device.link if self.cost is None else self.cost
        pays = ceil(cost / gain)
        if run not in self.proposed:
            self.proposed.append(run)
            self.write(
                "proposed",
                **{"from": self.run.layout.axes, "to": run.layout.axes, "settings": plan.settings()},
                step_s=now,
                gain_s=gain,
                cost_s=cost,
                pays_after=pays,
                probed=is_probed(self.run.data.cache),
            )
            self.say(self._line(plan, now, cost, pays, left))
        if self.run.layout.adaptive and pays < left:
            self.choice = Switch(run, size)

    def _line(self, plan: Plan, now: float, cost: float, pays: int, left: int) -> str:
        text = (
            f"a better layout: {plan.name}, recompute {plan.recompute}, ZeRO {plan.zero}: about {plan.step:.3g} s a "
            f"step instead of {now:.3g}; to switch takes about {cost:.2g} s, paid back in {pays} steps"
        )
        if not is_probed(self.run.data.cache):
            text += " (a usual machine's numbers: `lanewise probe` measures this one)"
        if pays >= left:
            return f"{text}, but {left} are left"
        return text if self.run.layout.adaptive else f"{text}; layout.adaptive=true switches"

    # ------------------------------------------------------------------------------------------------- after a switch

    def switched(self, seconds: float, how: str) -> None:
        """The choice was carried out; it took all ranks so long."""
        assert self.choice is not None
        assert self.known is not None
        told = {"from": self.run.layout.axes, "to": self.choice.run.layout.axes, "seconds": seconds, "how": how}
        self.write("switched", **told, back=self.choice.back)
        self.say(f"switched to {named(self.choice.run)} in {seconds:.2g} s, from {how}")
        if (row := self.seen.get(str(self.run.layout))) is not None:
            keep(row, self.run.data.cache)
        self.cost, self.over = seconds, self.choice.back
        self.left = None if self.choice.back else (self.run, self.known)
        self.run, self.choice = self.choice.run, None
        self._anew()

    def refused(self, reason: str) -> None:
        """The choice could not be carried out; the run goes on as it was."""
        self.choice, self.over = None, True
        self.write("not_switched", reason=reason)
        self.say(f"the layout stays: {reason}")

    def _judge(self, now: float, left: int) -> None:
        assert self.left is not None
        assert self.cost is not None
        run, before = self.left
        self.left = None
        back = (now - before) * left > self.cost
        self.write("measured", layout=self.run.layout.axes, step_s=now, before_s=before, keeps=not back)
        if back:
            self.say(f"a step takes {now:.3g} s, and took {before:.3g} s before: back to {named(run)}")
            size = state_bytes(run, place(None, self.workers, run, guess=True))
            self.known, self.choice = now, Switch(run, size, back=True)
        else:
            self._look(now, left)


def named(run: Run) -> str:
    return f"layout {run.layout.axes}" if run.layout.axes else "replicas of one rank"


def state_bytes(run: Run, where: Where) -> float:
    """Weights and the optimizer's state on the fullest rank."""
    held = as_it_is(run, where).memory
    return float(np.max(np.atleast_1d(held.weights + held.optimizer)))


def in_layout(run: Run, plan: Plan | None) -> Run:
    """The run with a plan's layout, or with its own; what says nothing there is as by default."""
    settings = plan.settings() if plan is not None else {}
    plain = PLAIN if plan is not None or Layout.parse(run.layout.axes).pp == 1 else {}
    return run.model_copy(update={"layout": run.layout.model_copy(update={**plain, **settings})})
