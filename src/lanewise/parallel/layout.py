"""The layout inside a replica: axes with their degrees, written `pp2.tp2`. No torch is needed to read or check one."""

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from lanewise.config import DenseModel, Run
from lanewise.errors import UserError
from lanewise.lanes.assignment import lanes_of

AXES = ("pp", "fsdp", "cp", "ep", "tp")  # outermost first: neighbours in the world share the innermost
ROWS = ("fsdp", "ep")  # divide the rows of a microbatch
WORK = ("fsdp", "cp", "ep")  # divide its tokens; the ranks of tp share theirs


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
    if run.layout.offload and layout.fsdp == 1:
        raise UserError("layout.offload: only what fsdp shards can be kept in host memory: add fsdpN to the layout")
    stretches = (2 * layout.cp if layout.cp > 1 else 1) * layout.tp
    if run.batch.sequence_length % stretches:
        raise UserError(
            f"layout {layout}: batch.sequence_length ({run.batch.sequence_length}) must be a multiple of {stretches} "
            f"({'twice cp, times tp' if layout.cp > 1 else 'tp'})"
        )
    rows = math.prod(layout.degrees[axis] for axis in ROWS)
    if run.batch.size % rows:
        raise UserError(
            f"layout {layout}: batch.size ({run.batch.size}) must be a multiple of {rows}, as the ranks of fsdp and ep "
            f"divide the sequences of a microbatch"
        )
    if layout.ep > 1 and isinstance(run.model, DenseModel):
        raise UserError(f"layout {layout}: the model has no experts to spread: leave ep out")
    if layout.pp > run.model.layers:
        raise UserError(f"layout {layout}: pp is more than model.layers ({run.model.layers}): each stage needs one")
    for axis, what, number in _dealt(run):
        if number < layout.degrees[axis]:
            raise UserError(f"layout {layout}: {axis} is more than {what} ({number}), of which each rank needs one")
    lanes_of(0, layout.replicas(workers), run.batch.lanes)


def _dealt(run: Run) -> Iterator[tuple[str, str, int]]:
    """What an axis deals out to its ranks, uneven if need be."""
    model = run.model
    yield "tp", "model.heads", model.heads
    yield "tp", "model.ffn_hidden", model.ffn_hidden
    if model.vocab_size:  # 0: the tokenizer's, known once the data is there
        yield "tp", "model.vocab_size", model.vocab_size
    if not isinstance(model, DenseModel):
        yield "tp", "model.expert_hidden", model.expert_hidden
        yield "ep", "model.experts", model.experts
