"""From layout to layout in memory: the bits that a checkpoint, written in one and read in the other, brings."""

import gc
import weakref
from itertools import product

import pytest
import torch
import torch.distributed as dist
from spread_ranks import DEEPSEEK, DENSE, make

from lanewise.checkpoint.pieces import Entry, Piece
from lanewise.checkpoint.store import Checkpoints
from lanewise.elastic.world import World
from lanewise.parallel import reshard as module
from lanewise.parallel.boxes import Box
from lanewise.parallel.build import build_part
from lanewise.parallel.layout import Layout
from lanewise.parallel.mesh import Mesh
from lanewise.parallel.reshard import overlap, reshard
from lanewise.parallel.stages import turns_back
from lanewise.parallel.trace import MadeUp, trace
from lanewise.replica import Replica
from processes import on_ranks

BATCH = {"lanes": 4, "microbatches": 1, "size": 4}


def in_layout(model, words, **train):
    """The run in a layout written as `axes/zero/schedule`."""
    given = words.split("/")
    axes, zero, schedule = given + ["", "1", "1f1b"][len(given) :]
    run = make(model, **BATCH, layout={"zero": int(zero), "schedule": schedule}, train=train)
    return run, Layout.parse(axes)


def everything(replica):
    """All that a rank holds: masters and moments, buffers, and the weights it computes with."""
    found = {
        (name, piece.offsets): piece.tensor
        for name, entry in replica.state(share=False).items()
        for piece in entry.pieces
    }
    found |= {(place.spec.name, "computed with"): b.weights[place.start : place.stop] for b, place in places(replica)}
    return {key: tensor.detach().clone() for key, tensor in found.items()}


def places(replica):
    return [(bucket, place) for bucket in replica.buckets for place in bucket.places]


def empty(run, layout, world, meshes):
    key = layout, turns_back(run.layout)
    if key not in meshes:
        meshes[key] = Mesh(world, *key)
    return Replica(run, build_part(run, meshes[key]), meshes[key], initialise=False)


def compared(rank, size, root, model, layouts, train):
    """A few steps in the first layout, a checkpoint, and that read into each; then from each to each other in memory:
    names of tensors that differ, and the bytes this rank received."""
    module.BUCKET = 2**16  # a pair of ranks needs several
    world = World(rank, size, torch.device("cpu"), dist.group.WORLD, dist.new_group())
    meshes, read, differing, received = {}, {}, [], {}
    run, layout = in_layout(model, layouts[0], **train)
    meshes[layout, turns_back(run.layout)] = Mesh(world, layout, turns_back(run.layout))
    _, trained = trace(run, meshes[layout, turns_back(run.layout)], MadeUp(run))
    store = Checkpoints(root, keep=1, background=False, group=world.side, alarm=print)
    store.save(1, trained.state(share=True), {})
    found = store.find()
    for words in layouts:
        read[words] = empty(*in_layout(model, words, **train), world, meshes)
        store.load(found, read[words].state(share=False))
        read[words].loaded()
    right = {words: everything(replica) for words, replica in read.items()}
    moments = [t for held in right.values() for (name, _), t in held.items() if name.startswith("exp_avg_sq/")]
    assert any(moment.any() for moment in moments)
    for start, end in product(layouts, layouts):
        moved = empty(*in_layout(model, end, **train), world, meshes)
        received[start, end] = reshard(read[start].state(share=False), moved.state(share=False), world)
        moved.loaded()
        ours = everything(moved)
        assert ours.keys() == right[end].keys()
        differing += [(start, end, key) for key, tensor in ours.items() if not torch.equal(tensor, right[end][key])]
    for words, replica in read.items():
        left = everything(replica)
        differing += [(words, "left", key) for key in left if not torch.equal(left[key], right[words][key])]
    return differing, received


@pytest.mark.parametrize(
    ("model", "size", "layouts", "train"),
    [
        (DENSE | {"tie_embeddings": True}, 2, ["/0", "/2", "pp2", "tp2", "fsdp2", "cp2"], {}),
        (DEEPSEEK, 2, ["/0", "pp2", "fsdp2", "ep2"], {"precision": "bf16", "freeze": ["layers.0.*"]}),
        (DEEPSEEK, 4, ["/2", "pp2/0", "ep2.tp2", "fsdp2.cp2", "pp2.tp2"], {}),
        (DENSE | {"layers": 4, "tie_embeddings": True}, 4, ["pp2/1/zbv", "pp2/1/interleaved", "pp2.fsdp2", "tp4"], {}),
    ],
    ids=["dense", "experts in bf16, some frozen", "four ranks", "stages"],
)
def test_every_layout_to_every_other_brings_the_bits_of_a_checkpoint(tmp_path, model, size, layouts, train):
    for differing, received in on_ranks(size, compared, tmp_path, model, layouts, train, limit=100):
        assert not differing
        assert any(received.values())
        assert all(received[layout, layout] == 0 for layout in layouts), "what a rank has itself does not travel"


def holders_in_turn(rank, size):
    """Ranks 0 to 2 hold the same tensors, rank 3 nothing: it joins."""
    names = [f"t{i}" for i in range(30)]
    values = {name: torch.full((4,), float(i)) for i, name in enumerate(names)}
    have = {name: Entry.whole(value) for name, value in values.items()} if rank < 3 else {}
    want = {name: Entry.whole(torch.zeros(4)) for name in names} if rank == 3 else {}
    world = World(rank, size, torch.device("cpu"), dist.group.WORLD)
    sent = []
    original = module.exchange
    module.exchange = lambda sends, *rest: (sent.append(sum(m.tensor.numel() for m in sends)), original(sends, *rest))[
        1
    ]
    received = reshard(have, want, world)
    assert all(torch.equal(entry.pieces[0].tensor, values[name]) for name, entry in want.items())
    with pytest.raises(AssertionError, match="nobody holds 4 elements"):
        reshard({}, {"t0": Entry.whole(torch.zeros(4))}, world)
    return sum(sent), received


def test_holders_share_the_sending_and_a_newcomer_needs_nothing():
    found = on_ranks(4, holders_in_turn)
    assert [sent for sent, _ in found] == [160, 160, 160, 0]
    assert [received for _, received in found] == [0, 0, 0, 480]


def test_overlap():
    assert overlap(Box((0, 2), (3, 4)), Box((2, 0), (5, 3))) == Box((2, 2), (1, 1))
    assert overlap(Box((0,), (3,)), Box((3,), (2,))) is None
    assert overlap(Box((), ()), Box((), ())) == Box((), ())


def test_a_part_larger_than_a_bucket_is_cut(monkeypatch):
    monkeypatch.setattr(module, "BUCKET", 64)
    whole = torch.arange(3 * 50, dtype=torch.float32).view(3, 50)
    state = {"t": Entry((3, 50), torch.float32, [Piece((0, 0), whole)])}
    loads = list(module._loads([module.Part("t", Box((0, 0), (3, 50)), 4)]))
    assert all(sum(part.bytes for part in load) <= 64 for load in loads)
    assert sorted(v for load in loads for part in load for v in module._view(state, part).flatten().tolist()) == list(
        range(150)
    )


def left_alone(rank, size, axes):
    world = World(rank, size, torch.device("cpu"), dist.group.WORLD)
    run, layout = in_layout(DEEPSEEK, axes)
    mesh = Mesh(world, layout)
    _, old = trace(run, mesh, MadeUp(run))
    weights = [weakref.ref(bucket.weights) for bucket in old.buckets]
    old.reducer.close()
    del old
    gc.collect()
    return [reference() is None for reference in weights]


@pytest.mark.parametrize("axes", ["pp2", "fsdp2"])
def test_a_layout_that_was_left_gives_its_memory_back(axes):
    assert all(map(all, on_ranks(2, left_alone, axes)))
