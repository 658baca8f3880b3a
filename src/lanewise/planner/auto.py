"""`layout.axes = "auto"`: the best layout for this machine, chosen at launch. The batch is left alone, and so are the
bits but for the sums inside a replica.

A run that goes on keeps the layout it had while that is possible, so that plans which change their minds with every
measurement do not change a run; `layout.adaptive` takes a better one. To switch costs nothing beyond the start: any
layout reads a checkpoint of any other.
"""

from dataclasses import replace

import numpy as np

from lanewise.config import Run
from lanewise.errors import UserError
from lanewise.parallel.layout import Layout
from lanewise.planner.explain import against, nothing_fits
from lanewise.planner.machine import is_probed, place
from lanewise.planner.replay import judged
from lanewise.planner.search import Plan, Space, explore, rank

AUTO = "auto"


def settle(run: Run, workers: int, before: Run | None = None) -> tuple[Run, list[str]]:
    """The run with axes, schedule, recomputation and ZeRO stage chosen, and why, in a few lines.

    before: the same run as it was started last, if it goes on. Raises UserError: none fits.
    """
    batch = run.batch
    space = explore(run, place(None, workers, run, guess=True), run.model.vocab_size or run.data.vocab_size)
    plans = judged(space, rank(keeping_batch(space)))
    if not plans:
        if not space.fits.any():
            raise UserError(nothing_fits(space))
        raise UserError(
            f"layout.axes=auto: no layout keeps batch.lanes={batch.lanes} and batch.size={batch.size} on {workers} "
            f"workers: see `lanewise plan --workers {workers}`, which may change them"
        )
    first = plans[0]
    settings = first.settings()
    had = None if before is None else Layout.parse(before.layout.axes)
    kept = next((plan for plan in plans if plan.layout == had), None)
    if before is not None and kept is not None and (kept is first or not run.layout.adaptive):
        settings = {key: getattr(before.layout, key) for key in (*settings, "schedule", "chunks")}
        lines = [_said(kept, "as before")]
        if kept is not first:
            lines.append(f"{against(first, kept)}; layout.adaptive=true takes it, at no cost but this start")
    else:
        lines = [_said(first, "planned"), *(against(first, rival) for rival in plans[1:2])]
        if kept is not None:
            lines[1:] = [f"as before, {against(first, kept)}; any layout reads the checkpoint"]
        elif had is not None:
            lines.append(f"{had or 'one rank a replica'}, as before, cannot be on {workers} workers")
    if not is_probed(run.data.cache):
        lines.append("this machine is not measured, these are a usual one's numbers: `lanewise probe` takes a minute")
    return run.model_copy(update={"layout": run.layout.model_copy(update=settings)}), lines


def keeping_batch(space: Space) -> Space:
    """Only candidates that leave the lanes and the size of a microbatch as they are."""
    c, batch = space.choice, space.run.batch
    same = (c.micro * c.fsdp * c.ep == batch.size) & (batch.lanes % np.maximum(space.replicas, 1) == 0)
    return replace(space, fits=space.fits & same)


def _said(plan: Plan, how: str) -> str:
    schedule = f", {plan.schedule}" if plan.layout.pp > 1 else ""
    return (
        f"{how}: {plan.name}{schedule}, recompute {plan.recompute}, ZeRO {plan.zero}: {plan.step:.3g} s a step "
        f"({plan.low:.3g} to {plan.high:.3g})"
    )
