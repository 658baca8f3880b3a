"""From one layout to another in memory: every rank's pieces of the run's tensors go straight to who will hold them.

Who holds what is what a checkpoint is written and read by (`Replica.state(share=False)`), so nothing here knows of
axes, ZeRO or buckets: both sides are boxes of global tensors. Each rank looks up who holds what it wants, takes what it
has itself, and asks one holder for each of the rest. A rank may have nothing yet, or want nothing any more.

Then all send in rounds: in round d each rank sends to the one d places after it and receives from the one d places
before it, `BUCKET` bytes at a time. Beside the two copies of the state a rank holds two buckets.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from lanewise.checkpoint.pieces import Entry, State
from lanewise.elastic.world import World
from lanewise.lanes.wire import Message, exchange
from lanewise.parallel.boxes import Box

BUCKET = 32 * 2**20  # bytes under way from a rank, and as many to it
ALIGN = 16  # bytes: where an element of any dtype may begin


class Part(NamedTuple):
    """A box of a global tensor, as it travels."""

    name: str
    box: Box
    itemsize: int

    @property
    def bytes(self) -> int:
        return -(-prod(self.box.shape) * self.itemsize // ALIGN) * ALIGN


@torch.no_grad()
def reshard(have: State, want: State, world: World) -> int:
    """Fill the pieces of `want`, on all ranks, from those of `have`; returns the bytes this rank received.

    Several ranks may hold an element, in pieces that are equal or have nothing in common. All ranks call it; it uses
    the main group. Raises AssertionError if an element is wanted that nobody holds.
    """
    wanted = _wanted(want, world.gather(_described(have)), world.rank)
    for part in wanted.pop(world.rank, []):
        _view(want, part).copy_(_view(have, part))
    asked = {rank: parts.get(world.rank, []) for rank, parts in enumerate(world.gather(wanted))}
    buckets = [torch.empty(BUCKET if world.size > 1 else 0, dtype=torch.uint8, device=world.device) for _ in range(2)]
    received = 0
    for distance in range(1, world.size):
        after, before = (world.rank + distance) % world.size, (world.rank - distance) % world.size
        for going, coming in zip_longest(_loads(asked[after]), _loads(wanted.get(before, [])), fillvalue=()):
            sent, arrived = (_laid_out(parts, bucket) for parts, bucket in zip((going, coming), buckets, strict=True))
            for part, place in sent:
                _as(place, have, part).copy_(_view(have, part))
            sizes = [sum(part.bytes for part in parts) for parts in (going, coming)]
            assert world.group is not None
            for work in exchange(
                [Message(buckets[0][: sizes[0]], after, 0)], [Message(buckets[1][: sizes[1]], before, 0)], world.group
            ):
                work.wait()
            for part, place in arrived:
                _view(want, part).copy_(_as(place, want, part))
            received += sizes[1]
    return received


# ------------------------------------------------------------------------------------------- who sends what to whom

Description = dict[str, tuple[tuple[int, ...], torch.dtype, list[Box]]]


def _described(state: State) -> Description:
    return {name: (e.shape, e.dtype, [box for box, _ in _boxes(e)]) for name, e in state.items()}


def _boxes(entry: Entry) -> Iterator[tuple[Box, Tensor]]:
    for piece in entry.pieces:
        if piece.tensor.numel():
            yield Box(piece.offsets, tuple(piece.tensor.shape)), piece.tensor


def _wanted(want: State, held: Sequence[Description], rank: int) -> dict[int, list[Part]]:
    """By holder, what this rank takes from it: from itself if it can, else from holders in turn."""
    found: dict[int, list[Part]] = defaultdict(list)
    turn = rank
    for name, entry in want.items():
        holders: dict[Box, list[int]] = defaultdict(list)
        for other, description in enumerate(held):
            shape, dtype, boxes = description.get(name, (entry.shape, entry.dtype, []))
            assert (shape, dtype) == (entry.shape, entry.dtype), f"{name}: rank {other} has {shape} of {dtype}"
            for box in boxes:
                holders[box].append(other)
        for mine, tensor in _boxes(entry):
            missing = tensor.numel()
            for box, ranks in holders.items():
                common = overlap(box, mine)
                if common is None:
                    continue
                missing -= prod(common.shape)
                turn += 1
                holder = rank if rank in ranks else ranks[turn % len(ranks)]
                found[holder].append(Part(name, common, entry.dtype.itemsize))
            assert missing == 0, f"{name}: nobody holds {missing} elements of {mine}"
    return dict(found)


def overlap(a: Box, b: Box) -> Box | None:
    """What two boxes have in common."""
    starts = tuple(map(max, a.offsets, b.offsets))
    stops = [min(x + n, y + m) for x, n, y, m in zip(a.offsets, a.shape, b.offsets, b.shape, strict=True)]
    shape = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    return Box(starts, shape) if all(length > 0 for length in shape) else None


# ------------------------------------------------------------------------------------------------------ its bytes


def _loads(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """In their order, in groups that fit into a bucket; both ends of a pair of ranks group alike."""
    load: list[Part] = []
    room = BUCKET
    for part in (piece for whole in parts for piece in _pieces(whole)):
        if load and part.bytes > room:
            yield load
            load, room = [], BUCKET
        load.append(part)
        room -= part.bytes
    if load:
        yield load


def _pieces(part: Part) -> Iterator[Part]:
    """The part, halved along its longest dim until it fits into a bucket."""
    if part.bytes <= BUCKET:
        yield part
        return
    offsets, shape = part.box.offsets, part.box.shape
    dim = shape.index(max(shape))
    for start, stop in ((0, shape[dim] // 2), (shape[dim] // 2, shape[dim])):
        half = Box(
            (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :]), (*shape[:dim], stop - start, *shape[dim + 1 :])
        )
        yield from _pieces(part._replace(box=half))


def _laid_out(parts: Sequence[Part], bucket: Tensor) -> list[tuple[Part, Tensor]]:
    """Each part with its bytes in the bucket."""
    places, at = [], 0
    for part in parts:
        places.append((part, bucket[at : at + prod(part.box.shape) * part.itemsize]))
        at += part.bytes
    return places


def _as(place: Tensor, state: State, part: Part) -> Tensor:
    return place.view(state[part.name].dtype).view(part.box.shape)


def _view(state: State, part: Part) -> Tensor:
    """The part, where this rank holds it."""
    for box, tensor in _boxes(state[part.name]):
        if overlap(box, part.box) == part.box:
            view = tensor
            for dim, (o, at, n) in enumerate(zip(part.box.offsets, box.offsets, part.box.shape, strict=True)):
                view = view.narrow(dim, o - at, n)
            return view
    raise AssertionError(f"{part} is not here")
