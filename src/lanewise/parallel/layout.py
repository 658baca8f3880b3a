"""The layout inside a replica: axes with their degrees, written `pp2.tp2`. No torch is needed to read or check one."""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from lanewise.config import DenseModel, Run
from lanewise.errors import UserError
from lanewise.lanes.assignment import lanes_of

AXES = ("pp", "fsdp", "cp", "ep", "tp")  # outermost first: neighbours in the world share the innermost
MISSING = ("pp", "fsdp", "cp", "ep")  # not in this version


@dataclass(frozen=True)
class Layout:
    """Degrees of the axes inside a replica; what is left of the workers becomes replicas."""

    pp: int = 1
    fsdp: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """From `tp2`, `pp2.fsdp2.tp2`, ...; the order does not matter, an empty text is one rank. Raises UserError."""
        degrees: dict[str, int] = {}
        for word in text.split(".") if text else ():
            match = re.fullmatch(r"([a-z]+)([1-9][0-9]*)", word)
            if match is None or match[1] not in AXES:
                raise UserError(
                    f"layout {text!r}: {word!r} is not an axis with its degree: join some of "
                    f"{', '.join(f'{axis}N' for axis in AXES)} with dots, as in pp2.tp2"
                )
            if match[1] in degrees:
                raise UserError(f"layout {text!r}: {match[1]} is there twice: give each axis once")
            degrees[match[1]] = int(match[2])
        return cls(**degrees)

    def __str__(self) -> str:
        return ".".join(f"{axis}{degree}" for axis, degree in self.degrees.items() if degree > 1)

    @property
    def degrees(self) -> dict[str, int]:
        """By axis, outermost first."""
        return asdict(self)

    @property
    def size(self) -> int:
        """Ranks in a replica."""
        return math.prod(self.degrees.values())

    def replicas(self, workers: int) -> int:
        """How many replicas `workers` make. Raises UserError if they do not divide."""
        if workers % self.size:
            raise UserError(
                f"{workers} workers do not divide into replicas of {self.size} ranks (layout {self}): "
                f"use {max(workers // self.size, 1) * self.size} workers"
            )
        return workers // self.size


def check(layout: Layout, run: Run, workers: int) -> None:
    """Raises UserError that names the first rule which the layout breaks for this model and batch on `workers`."""
    for axis in MISSING:
        if layout.degrees[axis] > 1:
            raise UserError(f"layout {layout}: the axis {axis} is not in this version: leave it out")
    for what, number, axis in _divided(layout, run):
        if number % layout.degrees[axis]:
            raise UserError(f"layout {layout}: {what} ({number}) does not divide by {axis}: change one of the two")
    for what, number in _cut_by_tp(run).items():
        if number < layout.tp:
            raise UserError(f"layout {layout}: tp is more than {what} ({number}), of which each rank needs one")
    lanes_of(0, layout.replicas(workers), run.batch.lanes)


def _divided(layout: Layout, run: Run) -> list[tuple[str, int, str]]:
    return [("batch.sequence_length", run.batch.sequence_length, "tp")]


def _cut_by_tp(run: Run) -> Mapping[str, int]:
    """What tensor parallelism deals out, uneven if need be."""
    model = run.model
    found = {"model.heads": model.heads, "model.ffn_hidden": model.ffn_hidden}
    if model.vocab_size:  # 0: the tokenizer's, known once the data is there
        found["model.vocab_size"] = model.vocab_size
    if not isinstance(model, DenseModel):
        found["model.expert_hidden"] = model.expert_hidden
    return found
