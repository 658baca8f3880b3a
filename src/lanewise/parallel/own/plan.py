"""A plan: how a module is divided, as data. Derived (`derive.py`) or declared by the user; shown before it is used."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise

from lanewise.parallel.layout import Layout

# What may happen to a parameter under tp, and to its gradient.
KINDS = {
    "column": "split by outputs",
    "row": "split by inputs",
    "embedding": "split by rows",
    "head": "split by outputs, which are gathered",
    "summed": "whole on every rank, its gradient summed over tp",
    "kept": "whole on every rank",
}


@dataclass(frozen=True)
class Group:
    """Linear layers whose outputs, and nothing else of the block, make up the input of one more.

    columns, row, divided, summed: paths inside a block.
    local: between them each rank computes its part alone (its heads, its width). Otherwise the weights are split
    all the same, but the columns' outputs are gathered and every rank computes all that lies between.
    pieces: widths of what a fused column consists of, each split by itself, such as (q, k, v); () if it is one.
    divided: whole numbers of modules that count a rank's share where the code reads them: `attn.num_heads`.
    blocks: numbers of the blocks it is found in; () for all.
    """

    columns: tuple[str, ...]
    row: str
    local: bool = True
    pieces: tuple[int, ...] = ()
    divided: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    blocks: tuple[int, ...] = ()
    why: str = ""  # not local

    def inside(self, count: int) -> Iterable[int]:
        return self.blocks or range(count)


@dataclass(frozen=True)
class Entry:
    """A parameter. split_dim: of tp, or None; pieces: as in Group; places: the stages' cuts it belongs to, as in Flow;
    tied: other names of the same parameter; why: it stays whole."""

    name: str
    shape: tuple[int, ...]
    kind: str
    split_dim: int | None
    pieces: tuple[int, ...]
    places: tuple[int, ...]
    tied: tuple[str, ...]
    trained: bool
    why: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Plan:
    """blocks: path of the list of repeated blocks; embeddings, heads: paths of modules split by the vocabulary.

    The rest is filled in when a plan meets its module: one entry per parameter, and where and why pp cannot cut.
    """

    blocks: str
    groups: tuple[Group, ...] = ()
    embeddings: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    depth: int = field(default=0, compare=False)
    table: tuple[Entry, ...] = field(default=(), compare=False, repr=False)
    uncut: str = field(default="", compare=False)
    layout: Layout = field(default=Layout(), compare=False)

    def stage_of(self, place: int) -> int:
        """The pipeline stage that holds a place (see `Flow.places`)."""
        block = min(max(place, 0), self.depth - 1)
        return next(stage for stage, held in enumerate(self.stages()) if block in held)

    def stages(self) -> list[range]:
        """Blocks by stage, as even as they come; the later stages have the shorter ones, and the head."""
        count, more = divmod(self.depth, self.layout.pp)
        starts = [stage * count + min(stage, more) for stage in range(self.layout.pp + 1)]
        return [range(a, b) for a, b in pairwise(starts)]

    def holders(self, entry: Entry) -> tuple[int, ...]:
        """The stages that hold a parameter, in order; more than one for tied ones."""
        return tuple(sorted({self.stage_of(place) for place in entry.places or (BEFORE_ALL,)}))

    def __str__(self) -> str:
        return "\n".join((*self._groups(), "", *self._parameters(), "", *self._axes()))

    # --------------------------------------------------------------------------------------------------- showing

    def _groups(self) -> Iterable[str]:
        yield f"blocks      {self.blocks}: {self.depth}"
        for group in self.groups:
            where = "" if not group.blocks else f"  [blocks {', '.join(map(str, group.blocks))}]"
            yield f"{'split' if group.local else 'gathered':11} {', '.join(group.columns)} -> {group.row}{where}"
            if group.pieces:
                yield f"{'':11}   pieces of the column: {' + '.join(map(str, group.pieces))}"
            if group.divided:
                yield f"{'':11}   divided by tp: {', '.join(group.divided)}"
            if group.summed:
                yield f"{'':11}   gradients summed over tp: {', '.join(group.summed)}"
            if group.why:
                yield f"{'':11}   every rank computes what lies between: {group.why}"
        for what, paths in (("embeddings", self.embeddings), ("heads", self.heads)):
            yield f"{what:11} {', '.join(paths) or 'none'}"
        tied = [" = ".join((entry.name, *entry.tied)) for entry in self.table if entry.tied]
        yield f"{'tied':11} {', '.join(tied) or 'none'}"

    def _parameters(self) -> Iterable[str]:
        tp, inner = self.layout.tp, self.layout.tp * self.layout.fsdp
        yield f"{'kind':11}{'parameters':>15}{'per tp rank':>15}{'per fsdp rank':>15}   under tp"
        for kind, what in KINDS.items():
            size = sum(entry.size for entry in self.table if entry.kind == kind)
            if size:
                whole = kind in ("summed", "kept")
                yield (
                    f"{kind:11}{size:15,}{size // (1 if whole else tp):15,}"
                    f"{size // (self.layout.fsdp if whole else inner):15,}   {what}"
                )
        reasons = Counter((_starred(entry.name, self.blocks), entry.why) for entry in self.table if entry.why)
        for (name, why), count in reasons.items():
            yield f"  whole: {name}{f' ({count})' if count > 1 else ''}: {why}"

    def _axes(self) -> Iterable[str]:
        if self.uncut:
            yield f"pp          not possible: {self.uncut}"
        for stage, held in enumerate(self.stages() if not self.uncut else ()):
            mine = [entry for entry in self.table if stage in self.holders(entry)]
            first, last = stage == 0, stage == self.layout.pp - 1
            ends = f"{'what comes before, ' * first}blocks {held[0]} to {held[-1]}{', what comes after' * last}"
            yield f"pp stage {stage}  {ends}: {sum(entry.size for entry in mine):,} parameters"


BEFORE_ALL = -1


def _starred(name: str, blocks: str) -> str:
    prefix = f"{blocks}." if blocks else ""
    if not name.startswith(prefix):
        return name
    number, _, rest = name[len(prefix) :].partition(".")
    return f"{prefix}*.{rest}" if number.isdigit() else name


def grouped_by_blocks(groups: Iterable[Group], depth: int) -> tuple[Group, ...]:
    """Groups of single blocks, those that are alike brought together."""
    found: dict[Group, list[int]] = {}
    for group in groups:
        found.setdefault(replace(group, blocks=()), []).extend(group.blocks)
    return tuple(
        replace(group, blocks=() if len(numbers) == depth else tuple(numbers)) for group, numbers in found.items()
    )
