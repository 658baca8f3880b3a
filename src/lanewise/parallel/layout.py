"""The layout inside a replica: axes with their degrees, written `pp2.tp2`. No torch is needed to read or check one."""

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from lanewise.config import DenseModel, Run
from lanewise.errors import UserError
from lanewise.lanes.assignment import lanes_of
from lanewise.parallel.stages import SINGLE, chunks, turns_back

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
    for axis, what, number in _dealt(run):
        if number < layout.degrees[axis]:
            raise UserError(f"layout {layout}: {axis} is more than {what} ({number}), of which each rank needs one")
    replicas = layout.replicas(workers)
    lanes = {len(lanes_of(replica, replicas, run.batch.lanes)) for replica in range(replicas)}
    _check_stages(layout, run)
    for count in sorted(lanes):
        _check_microbatches(layout, run, count * run.batch.microbatches)


def _check_stages(layout: Layout, run: Run) -> None:
    """How the layers are cut into stages, and what applies to some stages only."""
    model, settings = run.model, run.layout
    if layout.pp == 1:
        for key, default in (("schedule", "1f1b"), ("chunks", 0), ("stages", ())):
            if (value := getattr(settings, key)) != default:
                shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
                raise UserError(f"layout.{key} ({shown}) is for a pipeline: use a layout with pp, or leave it out")
    elif settings.schedule in SINGLE and settings.chunks > 1:
        raise UserError(
            f"layout.schedule {settings.schedule} has one stage on each worker: leave layout.chunks "
            f"({settings.chunks}) out, or choose interleaved or another with several"
        )
    elif turns_back(settings) and chunks(settings) != 2:
        raise UserError(
            f"layout.schedule {settings.schedule} has two stages on each worker: leave layout.chunks "
            f"({settings.chunks}) out, or choose interleaved or another with any number"
        )
    count = layout.pp * chunks(settings) if layout.pp > 1 else 1
    if settings.stages:
        if len(settings.stages) != count:
            raise UserError(
                f"layout.stages cuts {len(settings.stages)} stages, but layout {layout} with schedule "
                f"{settings.schedule} has {count}: give the layers of each"
            )
        if sum(settings.stages) != model.layers:
            raise UserError(
                f"layout.stages adds up to {sum(settings.stages)} layers, but model.layers is {model.layers}: "
                f"change one of them"
            )
    if count > model.layers:
        raise UserError(
            f"layout {layout}: {count} stages (pp times stages on each worker) are more than model.layers "
            f"({model.layers}): each stage needs one"
        )
    if settings.recompute_stages:
        if settings.recompute == "none":
            raise UserError("layout.recompute_stages says where, but layout.recompute is none: set it to full")
        if max(settings.recompute_stages) >= count:
            raise UserError(
                f"layout.recompute_stages: there is no stage {max(settings.recompute_stages)} in layout "
                f"{str(layout) or 'of one rank'}, whose stages are 0 to {count - 1}"
            )


def _check_microbatches(layout: Layout, run: Run, count: int) -> None:
    """What a schedule asks of the number of microbatches that a replica runs in a step."""
    schedule, pp = run.layout.schedule, layout.pp
    rule = ""
    if schedule in ("interleaved", "interleaved-zb") and count % max(count // pp, 1):
        rule = f"that go into its {count // pp} rounds of {pp} or more evenly"
    elif schedule == "dualpipev" and count < 2 * pp:
        rule = f"no fewer than its stages ({2 * pp})"
    if rule:
        raise UserError(
            f"layout {layout}: schedule {schedule} needs microbatches {rule}, but a replica has {count} in a step "
            f"(its lanes times batch.microbatches): change batch.microbatches or the workers, or use 1f1b"
        )


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
