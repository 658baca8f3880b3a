"""What a rank holds of a tensor: boxes of the global N-D tensor, so that any other layout can read them.

A ZeRO shard is a flat range of a parameter and may start and end in the middle of a row. Cut at row borders it becomes
a few boxes, and a box is what tensor, pipeline and FSDP layouts also hold. Nothing here copies memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """The box [offsets, offsets + tensor.shape) of a global tensor."""

    offsets: tuple[int, ...]
    tensor: Tensor


@dataclass(frozen=True)
class Entry:
    """A global tensor's shape and dtype, and the pieces of it that this rank holds (possibly none).

    No two ranks may hold the same element, and together they hold all of them.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Sequence[Piece] = ()

    def __post_init__(self) -> None:
        for piece in self.pieces:
            offsets, sizes = piece.offsets, piece.tensor.shape
            assert piece.tensor.dtype == self.dtype, f"a piece of {piece.tensor.dtype} in a tensor of {self.dtype}"
            assert len(offsets) == len(sizes) == len(self.shape), f"{offsets} + {tuple(sizes)} in {self.shape}"
            inside = all(o >= 0 and o + n <= size for o, n, size in zip(offsets, sizes, self.shape, strict=True))
            assert inside, f"piece at {offsets} of {tuple(sizes)} leaves the tensor of {self.shape}"

    @classmethod
    def whole(cls, tensor: Tensor) -> "Entry":
        """This rank holds all of the tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, (Piece((0,) * tensor.dim(), tensor),))

    @classmethod
    def flat(cls, shape: Sequence[int], start: int, part: Tensor) -> "Entry":
        """This rank holds elements [start, start + len(part)) of the row-major tensor of `shape`; `part` is 1-D."""
        assert part.dim() == 1, f"a flat range is 1-D, not {tuple(part.shape)}"
        pieces, at = [], 0
        for offsets, sizes in boxes(shape, start, start + part.numel()):
            pieces.append(Piece(offsets, part[at : at + prod(sizes)].view(sizes)))
            at += prod(sizes)
        return cls(tuple(shape), part.dtype, pieces)

    def inside(self, shape: Sequence[int], offsets: Sequence[int]) -> "Entry":
        """The same pieces, seen as pieces of the tensor of `shape` in which this one is the box at `offsets`."""
        moved = [Piece(tuple(a + b for a, b in zip(offsets, p.offsets, strict=True)), p.tensor) for p in self.pieces]
        return Entry(tuple(shape), self.dtype, moved)


State = Mapping[str, Entry]


def boxes(shape: Sequence[int], start: int, stop: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The flat range [start, stop) of a row-major tensor of `shape` as (offsets, sizes), in flat order.

    At most 2 * len(shape) - 1 boxes. An empty range has none; the only box of a 0-dim tensor is ((), ()).
    """
    assert 0 <= start <= stop <= prod(shape), f"[{start}, {stop}) is not a range of a tensor of {tuple(shape)}"
    if start == stop:
        return []
    if not shape:
        return [((), ())]
    inner = tuple(shape[1:])
    (first, head), (last, tail) = divmod(start, prod(inner)), divmod(stop, prod(inner))

    def within(row: int, start: int, stop: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        return [((row, *offsets), (1, *sizes)) for offsets, sizes in boxes(inner, start, stop)]

    if first == last:
        return within(first, head, tail)
    found = within(first, head, prod(inner)) if head else []
    first += head > 0
    if first < last:
        found.append(((first, *(0 for _ in inner)), (last - first, *inner)))
    return found + (within(last, 0, tail) if tail else [])


def snapshot(state: State) -> State:
    """The same pieces, copied to CPU memory of their own: what follows may change the originals."""

    def copy(piece: Piece) -> Piece:
        tensor = piece.tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        return Piece(piece.offsets, tensor)

    return {name: Entry(e.shape, e.dtype, [copy(p) for p in e.pieces]) for name, e in state.items()}
