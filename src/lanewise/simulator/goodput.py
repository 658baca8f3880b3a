"""Days of a run: failures, checkpoints, restarts and stragglers, drawn from one seed."""

from dataclasses import dataclass

import numpy as np

DAY = 86400.0


@dataclass(frozen=True)
class Faults:
    """mtbf: seconds between failures of one device. restart: seconds until the run steps again after one. replicas:
    with more than one and `survives`, the others go on and redo only the lost lanes of a step. write: seconds a
    checkpoint holds the run up; every: steps between them. spread: of a rank's step time, as a share; stragglers:
    share of steps in which one rank takes `slow` times as long."""

    mtbf: float
    restart: float = 300.0
    replicas: int = 1
    survives: bool = True
    rejoin: float = 2.0
    write: float = 5.0
    every: int = 100
    spread: float = 0.01
    stragglers: float = 0.001
    slow: float = 2.0


def days(step: float, devices: int, faults: Faults, length: float = 7 * DAY, seed: int = 0) -> dict[str, float]:
    """Where the wall-clock of `length` seconds goes: seconds by cause, failures, committed steps and goodput.

    step: seconds of an undisturbed step, jitter left out. Goodput is the share of the time that undisturbed steps
    would have needed for what was committed.
    """
    random = np.random.default_rng(seed)
    most = int(length / step) + 1
    # the slowest of n normal ranks is about sqrt(2 ln n) deviations behind
    pace = 1 + faults.spread * np.sqrt(2 * np.log(max(devices, 2))) * (1 + 0.1 * random.standard_normal(most))
    pace[random.random(most) < faults.stragglers] *= faults.slow
    spent = {"steps": 0.0, "jitter": 0.0, "checkpoints": 0.0, "lost work": 0.0, "restarts": 0.0}
    clock, done, saved, failures = 0.0, 0, 0, 0
    next_failure = random.exponential(faults.mtbf / devices)
    survives = faults.survives and faults.replicas > 1
    while clock < length:
        taken = step * float(pace[done % most])
        if clock + taken > next_failure:
            failures += 1
            if survives:  # nothing of a step is committed before it is whole: only its lost lanes are done again
                again = taken / faults.replicas
                spent["lost work"] += again
                spent["restarts"] += faults.rejoin
                clock += faults.rejoin + again
            else:
                lost = (next_failure - clock) + (done - saved) * step
                spent["lost work"] += lost
                spent["steps"] -= (done - saved) * step
                spent["restarts"] += faults.restart
                done = saved
                clock = next_failure + faults.restart
            next_failure = clock + random.exponential(faults.mtbf / devices)
            continue
        clock += taken
        done += 1
        spent["steps"] += step
        spent["jitter"] += taken - step
        if done % faults.every == 0:
            saved = done
            clock += faults.write
            spent["checkpoints"] += faults.write
    return {**spent, "failures": failures, "committed": done, "seconds": clock, "goodput": done * step / clock}


def checkpoint_interval(step: float, devices: int, faults: Faults) -> int:
    """Steps between checkpoints that cost least: Young's sqrt(2 x write x time between failures) (CACM 17(9))."""
    return max(1, round(float(np.sqrt(2 * faults.write * faults.mtbf / devices)) / step))
