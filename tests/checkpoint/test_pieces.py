from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lanewise.checkpoint.pieces import Entry, Piece, boxes, snapshot


@st.composite
def ranges(draw):
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    a, b = sorted(draw(st.tuples(st.integers(0, prod(shape)), st.integers(0, prod(shape)))))
    return shape, a, b


@given(ranges())
def test_boxes_hold_the_range_in_order_and_are_few(case):
    shape, start, stop = case
    numbers = torch.arange(prod(shape)).view(shape)
    found = boxes(shape, start, stop)
    inside = [numbers[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].flatten() for box in found]
    assert torch.cat([torch.empty(0, dtype=torch.long), *inside]).tolist() == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_boxes_of_a_range_that_cuts_rows():
    assert boxes((4, 3), 2, 11) == [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 2))]
    assert boxes((), 0, 1) == [((), ())]
    assert boxes((0, 4), 0, 0) == []


def test_flat_pieces_are_views():
    part = torch.arange(2.0, 11.0)
    entry = Entry.flat((4, 3), 2, part)
    for piece in entry.pieces:
        piece.tensor.mul_(-1)
    assert torch.equal(part, -torch.arange(2.0, 11.0))
    assert [p.offsets for p in entry.pieces] == [(0, 2), (1, 0), (3, 0)]
    assert entry.shape == (4, 3)


def test_a_snapshot_has_its_own_compact_memory():
    base = torch.arange(12.0).view(3, 4)
    state = {"a": Entry((3, 2), torch.float32, [Piece((0, 0), base[:, 1:3])])}
    copied = snapshot(state)["a"].pieces[0].tensor
    base.zero_()
    assert copied.tolist() == [[1, 2], [5, 6], [9, 10]]
    assert copied.untyped_storage().nbytes() == copied.nbytes


@pytest.mark.parametrize(
    ("offsets", "shape", "dtype"),
    [
        ((2,), (3,), torch.float32),
        ((-1,), (1,), torch.float32),
        ((0, 0), (2,), torch.float32),
        ((0,), (2,), torch.int8),
    ],
)
def test_a_piece_that_does_not_fit_its_tensor_is_refused(offsets, shape, dtype):
    with pytest.raises(AssertionError):
        Entry((4,), torch.float32, [Piece(offsets, torch.zeros(shape, dtype=dtype))])


def test_consecutive_ranges_cover_without_overlap():
    cuts = [0, 1, 7, 7, 19, 60]
    seen = torch.zeros(3, 4, 5, dtype=torch.int)
    for a, b in pairwise(cuts):
        for offsets, sizes in boxes((3, 4, 5), a, b):
            seen[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
    assert seen.eq(1).all()
