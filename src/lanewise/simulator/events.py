"""When each action of a pipeline begins and ends: every rank does its next one as soon as what it needs is there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lanewise.simulator.schedules import Action, Order


class Event(NamedTuple):
    """One action on a rank (F, B, I or W, as in `schedules`), in seconds from the start of the step. The same fields as
    an event that a running pipeline records."""

    rank: int
    action: str
    stage: int
    microbatch: int
    start: float
    end: float


@dataclass(frozen=True)
class Durations:
    """Seconds of each stage's forward and of the two halves of its backward, by stage; of handing a state on."""

    forward: Sequence[float]
    inputs: Sequence[float]
    weights: Sequence[float]
    hop: float = 0.0

    def of(self, action: Action) -> float:
        if action.kind == "F":
            return self.forward[action.stage]
        whole = self.inputs[action.stage] * (action.kind in "BI") + self.weights[action.stage] * (action.kind in "BW")
        return whole


def simulate(order: Order, durations: Durations) -> list[Event]:
    """Events by start. A backward waits for the next stage's, and a W for its own I."""
    last = max(action.stage for actions in order for action in actions)
    home = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
    ended: dict[tuple[str, int, int], float] = {}
    free, place = [0.0] * len(order), [0] * len(order)
    events: list[Event] = []
    left = sum(len(actions) for actions in order)
    while left:
        before = left
        for rank, actions in enumerate(order):
            while place[rank] < len(actions):
                action = actions[place[rank]]
                needs = _needs(action, last)
                if any(need not in ended for need in needs):
                    break
                ready = [ended[n] + (durations.hop if home[n[1]] != rank else 0.0) for n in needs]
                start = max([free[rank], *ready])
                end = start + durations.of(action)
                kind = "I" if action.kind == "B" else action.kind  # what a neighbour waits for
                ended[kind, action.stage, action.microbatch] = free[rank] = end
                events.append(Event(rank, *action, start, end))
                place[rank] += 1
                left -= 1
        assert left < before, "the order waits for itself"
    return sorted(events, key=lambda event: (event.start, event.rank))


def _needs(action: Action, last: int) -> list[tuple[str, int, int]]:
    stage, m = action.stage, action.microbatch
    if action.kind == "F":
        return [("F", stage - 1, m)] if stage else []
    if action.kind == "W":
        return [("I", stage, m)]
    return [("F", stage, m)] + ([("I", stage + 1, m)] if stage < last else [])


def span(events: Sequence[Event]) -> float:
    """Seconds from the first action's start to the last one's end."""
    return max(event.end for event in events) - min(event.start for event in events)


def bubble(events: Sequence[Event]) -> float:
    """Share of the ranks' time in which they do nothing."""
    ranks = len({event.rank for event in events})
    return 1 - sum(event.end - event.start for event in events) / (span(events) * ranks)


def out_of_order(events: Sequence[Event], recorded: Sequence[Event]) -> list[str]:
    """How the order of a recorded run differs from the simulated one, rank by rank; empty: it is the same."""
    found = []
    for rank in sorted({event.rank for event in events}):
        ours, theirs = (
            [e[1:4] for e in sorted(es, key=lambda e: e.start) if e.rank == rank] for es in (events, recorded)
        )
        if ours != theirs:
            at = next(
                (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
            )
            a, b = (side[at] if at < len(side) else None for side in (ours, theirs))
            found.append(f"rank {rank}, action {at}: simulated {a}, recorded {b}")
    return found
