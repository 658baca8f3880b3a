"""What this machine's own runs teach: each appends its features, prediction and measurement; plans learn from them."""

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lanewise.planner.correction import POINTS, Correction, fit

if TYPE_CHECKING:
    from lanewise.config import Run
    from lanewise.planner.machine import Where
    from lanewise.planner.search import Space

ENOUGH = 8  # runs before they say anything
SETTLED = 5  # steps that a run must have done


def runs_path(cache: str) -> Path:
    return Path(cache).expanduser() / "planner" / "runs.jsonl"


def learned(cache: str) -> Correction | None:
    """A correction from the latest runs of this machine, or None if there are too few. A line that is not whole (a
    process was killed while it wrote) is passed over."""
    try:
        lines = runs_path(cache).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return None
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
            rows.append((row["features"], float(np.log(row["measured_s"] / row["analytic_s"]))))
        except (ValueError, KeyError, TypeError):
            continue
    rows = [row for row in rows[-POINTS:] if len(row[0]) == len(rows[-1][0])]
    if len(rows) < ENOUGH:
        return None
    x = np.array([features for features, _ in rows])
    names = [str(i) for i in range(len(rows))]
    return fit(x, np.array([ratio for _, ratio in rows]), names, names, {"runs": len(rows)})


def record(run: "Run", workers: int, out: Path) -> dict[str, Any] | None:
    """What the run in `out` took in its last layout, beside what was predicted; kept if this machine is probed. None:
    too few steps, or a probe that cannot be read."""
    from lanewise.errors import UserError
    from lanewise.planner.machine import place

    measured = step_seconds(out / "metrics.jsonl", last_switch(out / "events.jsonl"))
    if measured is None:
        return None
    try:
        where = place(None, workers, run, guess=True)
    except UserError:  # a broken probe spoils a lesson, not a run that is done
        return None
    row = lesson(run, where, measured)
    keep(row, run.data.cache)
    return row


def as_it_is(run: "Run", where: "Where") -> "Space":
    """The run's own layout, its only candidate."""
    from lanewise.planner.search import fixed

    schedule = getattr(run.layout, "schedule", "1f1b")
    chunks = getattr(run.layout, "chunks", 0) or (1 if schedule in ("1f1b", "gpipe") else 2)
    return fixed(run, where, schedule, chunks)


def lesson(run: "Run", where: "Where", measured: float) -> dict[str, Any]:
    """What a step of a run took (seconds), beside what is predicted of its layout."""
    from lanewise.planner.features import features
    from lanewise.planner.search import cost_out

    space = as_it_is(run, where)
    time = space.time(space.choice)
    x = features(space.model, space.choice, run.batch.sequence_length, space.cluster, space.precision, time)[0]
    return {
        "features": x.tolist(),
        "analytic_s": float(np.atleast_1d(time.total)[0]),
        "predicted_s": cost_out(space, np.array([0]))[0].step,
        "measured_s": measured,
    }


def keep(row: dict[str, Any], cache: str) -> None:
    """For later plans, if this machine is probed: what was predicted from another one's numbers teaches nothing."""
    from lanewise.planner.machine import is_probed

    if not is_probed(cache):
        return
    path = runs_path(cache)
    with contextlib.suppress(OSError):  # a cache that cannot be written costs a lesson, not the run
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def step_seconds(metrics: Path, after: int = 0) -> float | None:
    """The median time between commits of the last start of a run, the first step left out (it warms up), of the steps
    after step `after`."""
    times: list[float] = []
    for line in metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else ():
        try:
            row = json.loads(line)
            if row["step"] > after:
                times.append(float(row["time"]))
        except (ValueError, KeyError, TypeError):
            continue
    apart = np.diff(times)[1:]
    return float(np.median(apart)) if len(apart) >= SETTLED else None


def last_switch(events: Path) -> int:
    """The step after which a run last changed its layout; 0: never."""
    step = 0
    for line in events.read_text(encoding="utf-8").splitlines() if events.is_file() else ():
        try:
            event = json.loads(line)
            step = int(event["step"]) if event["event"] == "switched" else step
        except (ValueError, KeyError, TypeError):
            continue
    return step
