"""`layout.axes = "auto"`: the best layout for this machine, chosen at launch. The batch is left alone, and so are the
bits but for the sums inside a replica."""

from dataclasses import replace

import numpy as np

from lanewise.config import Run
from lanewise.errors import UserError
from lanewise.planner.explain import nothing_fits
from lanewise.planner.machine import place
from lanewise.planner.search import Plan, explore, rank

AUTO = "auto"


def settle(run: Run, workers: int) -> tuple[Run, Plan]:
    """The run with axes, recomputation and ZeRO stage chosen, and the plan. Raises UserError: not probed; none fits."""
    space = explore(run, place(None, workers, run), run.model.vocab_size or run.data.vocab_size)
    c, batch = space.choice, run.batch
    same = (c.micro * c.fsdp * c.ep == batch.size) & (batch.lanes % np.maximum(space.replicas, 1) == 0)
    plans = rank(replace(space, fits=space.fits & same))
    if not plans:
        if not space.fits.any():
            raise UserError(nothing_fits(space))
        raise UserError(
            f"layout.axes=auto: no layout keeps batch.lanes={batch.lanes} and batch.size={batch.size} on {workers} "
            f"workers: see `lanewise plan --workers {workers}`, which may change them"
        )
    first = plans[0]
    return run.model_copy(update={"layout": run.layout.model_copy(update=first.settings())}), first
