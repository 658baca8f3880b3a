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

# What published frameworks hold. No cell says which framework a run was of; the model's kind and the precision tell the
# time it is from.
# Plain feed-forwards and a head of keys for each of queries, as GPT: attention that keeps scores and the mask of their
# dropout, 5 bytes each (arXiv:2205.05198, equation 1).
GPT = Engine(logits=8.0, scores=5.0, spread=False, slack=0.0, short=True)
# Gated ones: norms, rotations and gates that each keep what they read, some of it in 32 bits.
LLAMA = Engine(logits=8.0, activations=1.5, spread=False, slack=0.0, short=True)
# Grouped queries: fused blocks, gradients added up in 16 bits.
FUSED = Engine(logits=8.0, gradient=2.0, slack=0.0, short=True)
# Experts: moments in 16 bits, too (arXiv:2412.19437, section 3.3.3).
MOE = replace(FUSED, optimizer=8.0)


def engine_of(case: Case) -> Engine:
    model = case.model
    if model.experts > 0:
        engine = MOE
    elif model.kv_heads < model.heads:
        engine = FUSED
    else:
        engine = GPT if model.matrices == 2 else LLAMA
    if case.precision == "fp16":  # so are the gradients
        engine = replace(engine, gradient=2.0)
    if case.precision in ("fp8", "fp4"):  # what products read is kept in 8 bits: half of it all
        engine = replace(engine, activations=0.75 * engine.activations)
    return engine


# What nvidia-smi sees beside the allocator's peak: blocks that are kept though free, contexts, buffers of collectives.
KEPT, BESIDE = 0.2, 5e9


def analytic(case: Case) -> Time:
    return step_time(case.model, case.choice, case.sequence, case.cluster, case.precision)


def described(case: Case, time: Time) -> Floats:
    """[F] features of a run."""
    row: Floats = features(case.model, case.choice, case.sequence, case.cluster, case.precision, time, case.told)[0]
    return row


def peak_memory(case: Case) -> float:
    """Peak bytes of the fullest rank, as the row says it was read: by the allocator, or by nvidia-smi. It ran, so it
    fitted: scores that are far too many were not kept, and more than the device has was not held."""
    engine, most = engine_of(case), case.cluster.device.memory

    def counted(engine: Engine) -> float:
        total = float(memory(case.model, case.choice, case.sequence, engine).total)
        return total * (1 + KEPT) + BESIDE if "smi" in case.memory_kind else total

    total = counted(engine)
    return min(total if total <= 1.5 * most else counted(replace(engine, scores=0.0)), most)


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
