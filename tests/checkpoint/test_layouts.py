"""Any number of ranks writes, any other reads, however each cuts the tensors: the same bits."""

import random
from itertools import pairwise
from math import prod

import pytest
import torch
from checkpoint_ranks import Alarms, run

from lanewise.checkpoint.pieces import Entry, Piece
from lanewise.checkpoint.store import Checkpoints
from lanewise.errors import UserError

FORMS = {
    "model/embedding": ((11, 7), torch.float32),
    "model/expert": ((3, 4, 5), torch.bfloat16),
    "model/norm": ((13,), torch.float32),
    "model/scale": ((), torch.float32),
    "model/none": ((0, 4), torch.float32),
    "buffer/count": ((6, 2), torch.int64),
    "buffer/seen": ((), torch.int64),
}


def full(name):
    """Bits that depend on the name only: any bit pattern, NaN payloads among them."""
    shape, dtype = FORMS[name]
    generator = torch.Generator().manual_seed(sum(name.encode()))
    raw = torch.randint(0, 256, (prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def zero_shards(rank, world, salt, fill):
    """Each tensor as one flat range per rank, cut at places that depend on the world size; some ranks own none."""
    state = {}
    for name, (shape, dtype) in FORMS.items():
        n = prod(shape)
        cuts = [0, *sorted(random.Random(f"{name}{world}{salt}").choices(range(n + 1), k=world - 1)), n]
        start, stop = list(pairwise(cuts))[rank]
        part = full(name).flatten()[start:stop].clone() if fill else torch.zeros(stop - start, dtype=dtype)
        state[name] = Entry.flat(shape, start, part)
    return state


def columns(rank, world):
    """A tensor-parallel layout: the last dim split, 0-dim tensors on every reader."""
    state = {}
    for name, (shape, dtype) in FORMS.items():
        if not shape:
            state[name] = Entry.whole(torch.zeros(shape, dtype=dtype))
            continue
        start, stop = shape[-1] * rank // world, shape[-1] * (rank + 1) // world
        piece = Piece((*(0 for _ in shape[1:]), start), torch.zeros((*shape[:-1], stop - start), dtype=dtype))
        state[name] = Entry(shape, dtype, [piece])
    return state


def assert_bits(state):
    for name, entry in state.items():
        for piece in entry.pieces:
            box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.tensor.shape, strict=True))
            got, right = (t.contiguous().view(-1).view(torch.uint8) for t in (piece.tensor, full(name)[box]))
            assert torch.equal(got, right), name


def checkpoints(root, group, background=False, alarm=None):
    return Checkpoints(root, keep=2, background=background, group=group, alarm=alarm or Alarms())


def write(rank, group, root, world):
    saver = checkpoints(root, group, background=True)
    saver.save(7, zero_shards(rank, world, "write", fill=True), {"world": world})
    assert saver.wait()


def read(rank, group, roots, world):
    for root in roots:
        saver = checkpoints(root, group)
        found = saver.find()
        assert (found.step, found.meta) == (7, {"world": int(root.name)})
        for state in (zero_shards(rank, world, "read", fill=False), columns(rank, world)):
            saver.load(found, state)
            assert_bits(state)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    roots = [folder / str(world) for world in (1, 2, 3, 5)]
    for root in roots:
        run(folder, int(root.name), write, root, int(root.name))
    return roots


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_written_on_1_2_3_5_ranks_read_on(world, written, tmp_path):
    run(tmp_path, world, read, written, world)


def test_a_process_without_a_group_reads_what_ranks_wrote(written):
    saver = checkpoints(written[-1], None)
    state = {name: Entry.whole(torch.zeros(shape, dtype=dtype)) for name, (shape, dtype) in FORMS.items()}
    saver.load(saver.find(), state)
    assert_bits(state)


def stages(rank, group, root):
    """A pipeline: each rank knows only its own tensors, and they need not be the same when reading."""
    names = sorted(FORMS)
    saver = checkpoints(root, group)
    saver.save(1, {name: Entry.whole(full(name)) for name in names[rank::2]}, {})
    mine = names[:2] if rank else names[2:]
    state = {name: Entry.whole(torch.zeros(FORMS[name][0], dtype=FORMS[name][1])) for name in mine}
    saver.load(saver.find(), state)
    assert_bits(state)


def test_ranks_that_know_different_tensors(tmp_path):
    run(tmp_path, 2, stages, tmp_path / "root")


def one(name="a", shape=(4,), dtype=torch.float32):
    return {name: Entry.whole(torch.ones(shape, dtype=dtype))}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (one() | one("b"), "no tensor 'b'"),
        (one(shape=(5,)), r"'a' is stored with shape \(4,\), this run has \(5,\)"),
        (one(dtype=torch.bfloat16), "'a' is stored with dtype torch.float32, this run has torch.bfloat16"),
        ({}, "no place for, such as 'a'"),
    ],
)
def test_another_model_is_named(tmp_path, asked, message):
    saver = checkpoints(tmp_path, None)
    saver.save(1, one(), {})
    with pytest.raises(UserError, match=message):
        saver.load(saver.find(), asked)


def test_loading_touches_nothing_but_the_pieces(tmp_path):
    saver = checkpoints(tmp_path, None)
    saver.save(1, one(), {})
    weight = torch.nn.Parameter(torch.full((3, 2), 5.0))
    saver.load(saver.find(), {"a": Entry((4,), torch.float32, [Piece((1,), weight.view(-1)[2:4])])})
    assert weight.tolist() == [[5, 5], [1, 1], [5, 5]]
    assert weight.requires_grad
    assert weight.grad is None


@pytest.mark.parametrize(
    "pieces",
    [
        [Piece((0,), torch.zeros(3))],
        [Piece((0,), torch.zeros(3)), Piece((2,), torch.zeros(2))],
        [Piece((0,), torch.zeros(2)), Piece((1,), torch.zeros(2))],
        [],
    ],
    ids=["hole", "overlap", "overlap and hole", "nothing"],
)
@pytest.mark.parametrize("background", [False, True])
def test_pieces_that_are_not_the_tensor_are_a_bug_and_raise(tmp_path, pieces, background):
    saver = checkpoints(tmp_path, None, background)

    def save_and_wait():
        saver.save(1, {"a": Entry((4,), torch.float32, pieces)}, {})
        saver.wait()

    with pytest.raises((AssertionError, ValueError)):
        save_and_wait()
    assert not list(tmp_path.iterdir())
    saver.save(2, one(), {})
    assert saver.wait()


def test_meta_that_is_not_json_raises_at_once(tmp_path):
    with pytest.raises(TypeError):
        checkpoints(tmp_path, None, background=True).save(1, one(), {"a": torch.float32})


def disagree(rank, group, root):
    saver = checkpoints(root, group)
    with pytest.raises(AssertionError, match="a: rank 1 says"):
        saver.save(1, one(shape=(4 + rank,)), {})
    with pytest.raises(AssertionError, match="8 of its 4 elements"):
        saver.save(1, one(), {})  # both ranks claim all of it


def test_ranks_that_disagree_are_a_bug_and_raise(tmp_path):
    run(tmp_path, 2, disagree, tmp_path / "root")
