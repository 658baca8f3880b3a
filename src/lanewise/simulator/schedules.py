"""The order in which each rank of a pipeline works, for seven schedules.

F is a forward, B a backward, I and W its two halves: the gradient of the input, and of the weights. Sources: GPipe
(arXiv:1811.06965), 1F1B and its interleaved form (arXiv:2104.04473), looped breadth-first (arXiv:2211.05953), zero
bubble and ZBV (arXiv:2401.10241), DualPipeV (github.com/deepseek-ai/DualPipe). A test holds them against torch's own.
"""

from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from lanewise.errors import UserError


class Action(NamedTuple):
    """kind: F, B, I or W; of a microbatch, in a stage of the whole pipeline."""

    kind: str
    stage: int
    microbatch: int


Order = list[list[Action]]  # by rank


def stages_of(schedule: str, ranks: int, chunks: int) -> list[list[int]]:
    """The stages of each rank: one after another in loops, or down and up again in a V."""
    if schedule in ("zbv", "dualpipev"):
        return [[rank, 2 * ranks - 1 - rank] for rank in range(ranks)]
    return [[rank + ranks * chunk for chunk in range(chunks)] for rank in range(ranks)]


def order(schedule: str, ranks: int, microbatches: int, chunks: int = 1) -> Order:
    """What each rank does, in order. chunks: stages a rank holds. Raises UserError if the schedule cannot be."""
    make = SCHEDULES.get(schedule)
    if make is None:
        raise UserError(f"schedule {schedule!r} is unknown: choose one of {', '.join(SCHEDULES)}")
    if schedule in ("gpipe", "1f1b") and chunks != 1:
        raise UserError(f"schedule {schedule}: a rank has one stage, not {chunks}")
    if schedule in ("zbv", "dualpipev") and chunks != 2:
        raise UserError(f"schedule {schedule}: a rank has two stages, not {chunks}")
    if schedule == "dualpipev" and microbatches < 2 * ranks:
        raise UserError(f"schedule dualpipev needs {2 * ranks} microbatches on {ranks} ranks, not {microbatches}")
    rounds = max(1, microbatches // ranks)
    if schedule in ("interleaved", "interleaved-zb") and microbatches % rounds:
        raise UserError(f"schedule {schedule}: {microbatches} microbatches are no whole number of {rounds} rounds")
    return [make(rank, ranks, microbatches, chunks) for rank in range(ranks)]


def _gpipe(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    return [Action(kind, rank, m) for kind in "FB" for m in range(microbatches)]


def _one_f_one_b(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    ahead = min(microbatches, ranks - rank)  # forwards before the first backward
    made = [Action("F", rank, m) for m in range(ahead)]
    for m in range(microbatches):
        made.append(Action("B", rank, m))
        if ahead + m < microbatches:
            made.append(Action("F", rank, ahead + m))
    return made


def _breadth_first(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    mine = range(rank, ranks * chunks, ranks)
    forward = [Action("F", stage, m) for stage in mine for m in range(microbatches)]
    return forward + [Action("B", stage, m) for stage in reversed(mine) for m in reversed(range(microbatches))]


def _interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    return _loops(rank, ranks, microbatches, chunks, split=False)


def _interleaved_zero(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    return _loops(rank, ranks, microbatches, chunks, split=True)


def _loops(rank: int, ranks: int, microbatches: int, chunks: int, split: bool) -> list[Action]:
    """1F1B over several stages: microbatches go round in groups, a group through all of a rank's stages in turn."""
    group = microbatches // max(1, microbatches // ranks)
    total = microbatches * chunks
    ahead = min((chunks - 1) * group + (1 if split else 2) * (ranks - 1 - rank), total)
    nth: Counter[tuple[str, int]] = Counter()
    made: list[Action] = []
    owed: deque[int] = deque()  # stages whose weight gradients wait

    def add(kind: str, chunk: int) -> None:
        stage = rank + ranks * chunk
        made.append(Action(kind, stage, nth[kind, stage]))
        nth[kind, stage] += 1

    for step in range(total + ahead):
        if step < total:
            add("F", step // group % chunks)
        if step >= ahead:
            chunk = chunks - 1 - (step - ahead) // group % chunks
            add("I" if split else "B", chunk)
            owed.append(chunk)
            if split and step - ahead >= rank:  # later ranks put weights off for longer: their bubble is at the end
                add("W", owed.popleft())
    while split and owed:
        add("W", owed.popleft())
    return made


class _V:
    """What both V schedules do: number microbatches, and remember weight gradients that wait."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.down, self.up = rank, 2 * ranks - 1 - rank
        self.nth: Counter[tuple[str, int]] = Counter()
        self.made: list[Action] = []
        self.owed: deque[Action] = deque()

    def add(self, kind: str, stage: int) -> None:
        count = self.nth["F" if kind == "F" else "I", stage]
        self.nth["F" if kind == "F" else "I", stage] += 1
        self.made.append(Action(kind, stage, count))
        if kind == "I":
            self.owed.append(Action("W", stage, count))

    def weight(self, stage: int | None = None) -> None:
        """The oldest weight gradient that waits (of that stage)."""
        waiting = next((w for w in self.owed if stage in (None, w.stage)), None)
        if waiting is not None:
            self.owed.remove(waiting)
            self.made.append(waiting)


def _zbv(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    full = max(2 * ranks - 1, microbatches)  # the order is that of a full pipeline; what is too much falls out
    v = _V(rank, ranks)

    def whole(stage: int) -> None:
        v.add("I", stage)
        v.weight(stage)

    for _ in range(2 * (ranks - rank) - 1):
        v.add("F", v.down)
    for _ in range(rank):
        v.add("F", v.up)
        v.add("F", v.down)
    for _ in range(ranks - rank):
        v.add("F", v.up)
        whole(v.up)
    while v.nth["F", v.up] < full:
        if v.nth["F", v.down] < full:
            v.add("F", v.down)
        whole(v.down)
        v.add("F", v.up)
        whole(v.up)
    for _ in range(rank):
        v.add("I", v.down)
        v.add("I", v.up)
    for _ in range(ranks - rank):
        v.add("I", v.down)
        v.weight(v.down)
    for stage in (v.up, v.down):
        while any(w.stage == stage for w in v.owed):
            v.weight(stage)
    return [action for action in v.made if action.microbatch < microbatches]


def _dual_pipe_v(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    v, after = _V(rank, ranks), ranks - 1 - rank  # ranks further down the V
    for _ in range(2 * after):
        v.add("F", v.down)
    for _ in range(rank + 1):
        v.add("F", v.down)
        v.add("F", v.up)
    for _ in range(after):
        v.add("I", v.up)
        v.weight()
        v.add("F", v.up)
    for _ in range(microbatches - 2 * ranks + rank + 1):  # the two directions meet: each forward beside a backward
        v.add("F", v.down)
        v.add("B", v.up)
        v.add("F", v.up)
        v.add("B", v.down)
    for _ in range(after):
        v.add("B", v.up)
        v.add("F", v.up)
        v.add("B", v.down)
    for number in range(2 * (rank + 1)):  # from the middle on, halves: weights fill what would be idle
        v.add("I" if number > rank else "B", v.down if number % 2 else v.up)
    for _ in range(after):
        v.weight()
        v.add("I", v.down)
    while v.owed:
        v.weight()
    return v.made


SCHEDULES: dict[str, Callable[[int, int, int, int], list[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved": _interleaved,
    "looped-bfs": _breadth_first,
    "interleaved-zb": _interleaved_zero,
    "zbv": _zbv,
    "dualpipev": _dual_pipe_v,
}
