"""The learning rate as a function of the number of updates already made."""

import math

from lanewise.config import Schedule


def learning_rate(schedule: Schedule, peak: float, update: int, updates: int) -> float:
    """Rate of update number `update` (from 0) of `updates`: linear warm-up, then the schedule's shape.

    Skipped steps make no update, so they do not move the schedule.
    """
    if update < schedule.warmup:
        return peak * (update + 1) / schedule.warmup
    span = max(1, updates - 1 - schedule.warmup)
    done = min(1.0, (update - schedule.warmup) / span)
    low = schedule.min_ratio
    match schedule.kind:
        case "constant":
            ratio = 1.0
        case "cosine":
            ratio = low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done))
        case "linear":
            ratio = 1 - (1 - low) * done
        case "wsd":
            start = 1 - schedule.decay_fraction
            ratio = 1.0 if done <= start else 1 - (1 - low) * (done - start) / schedule.decay_fraction
    return peak * ratio
