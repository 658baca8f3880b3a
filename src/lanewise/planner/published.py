"""Predictions for a table of runs, and how good they are: `lanewise simulate --runs`, `--memory` and the benchmark."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lanewise.planner.choice import Floats
from lanewise.planner.correction import shipped
from lanewise.planner.cost import Time, step_time
from lanewise.planner.features import features
from lanewise.planner.memory import Engine, memory
from lanewise.planner.table import Case, Refused, read_table

# What published frameworks hold: logits in 16 and 32 bits, and activations. No cell says which framework it was; models
# with grouped queries or experts, and runs in 8 bits, are of the time of fused blocks.
FUSED = Engine(logits=8.0, activations=0.6)
EAGER = Engine(logits=8.0, activations=1.5, spread=False, buffers=1e9)
HALF = replace(EAGER, gradient=2.0)  # in fp16 the gradients stay so
# What nvidia-smi sees beside the allocator's peak: contexts, buffers of collectives, freed blocks it keeps.
BESIDE = 11e9


def analytic(case: Case) -> Time:
    return step_time(case.model, case.choice, case.sequence, case.cluster, case.precision)


def described(case: Case, time: Time) -> Floats:
    """[F] features of a run."""
    row: Floats = features(case.model, case.choice, case.sequence, case.cluster, case.precision, time, case.told)[0]
    return row


def peak_memory(case: Case) -> float:
    """Peak bytes of the fullest rank, as the row says it was read: by the allocator, or by nvidia-smi."""
    fused = case.model.kv_heads < case.model.heads or case.model.experts > 0 or case.precision in ("fp8", "fp4")
    engine = FUSED if fused else HALF if case.precision == "fp16" else EAGER
    counted = float(memory(case.model, case.choice, case.sequence, engine).total)
    return counted + BESIDE * ("smi" in case.memory_kind)


def predict(path: str | Path, what: str) -> Iterator[dict[str, Any]]:
    """One object a row, then the summary. what: 'runs' or 'memory', which says what is scored. Raises UserError."""
    errors, inside, rows, refused = [], [], 0, 0
    for cells, case in read_table(path):
        rows += 1
        found = {"id": cells["id"], **_predicted(case)}
        yield found
        if isinstance(case, Refused) or found["refused"]:
            refused += 1
            continue
        step, gigabytes = found["predicted_step_s"], found["predicted_mem_GB"]
        if what == "runs" and case.step_time is not None:
            errors.append(abs(step / case.step_time - 1))
            inside.append(found["low"] <= case.step_time <= found["high"])
        if what == "memory" and case.memory_GB is not None:
            errors.append(abs(gigabytes / case.memory_GB - 1))
    yield {"summary": {"rows": rows, "refused": refused, **summary(errors, inside)}}


def _predicted(case: Case | Refused) -> dict[str, Any]:
    names = ("predicted_step_s", "low", "high", "predicted_mem_GB")
    blank = dict.fromkeys((*names, "extrapolates"))
    if isinstance(case, Refused):
        return {**blank, "ignored": [], "refused": str(case)}
    ignored = [f"{key} {text!r} is no such number" for key, text in case.ignored.items()]
    try:
        with np.errstate(all="ignore"):
            time = analytic(case)
            corrected = shipped().predict(described(case, time)[None])
            figures = [float(time.total) * float(f[0]) for f in (corrected.factor, corrected.low, corrected.high)]
            figures.append(peak_memory(case) / 1e9)
    except (OverflowError, ZeroDivisionError):
        figures = [np.inf]
    if not (np.isfinite(figures).all() and min(figures) > 0):
        return {**blank, "ignored": ignored, "refused": "the row's numbers together give no finite time or memory"}
    far = bool(corrected.far[0])
    return {**dict(zip(names, figures, strict=True)), "extrapolates": far, "ignored": ignored, "refused": None}


def summary(errors: Sequence[float], inside: Sequence[bool] = ()) -> dict[str, Any]:
    """Of absolute relative errors, and of whether each interval held."""
    if not len(errors):
        return {"scored": 0, "median": None, "p90": None, "worst": None, "inside": None}
    return {
        "scored": len(errors),
        "median": float(np.median(errors)),
        "p90": float(np.quantile(errors, 0.9)),
        "worst": float(np.max(errors)),
        "inside": float(np.mean(inside)) if len(inside) else None,
    }
