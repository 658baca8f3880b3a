"""`train.check_sync`: equal copies pass, and the first that is not is named with its ranks."""

import pytest
import torch
import torch.distributed as dist
from spread_ranks import DEEPSEEK, make

from lanewise.elastic.world import World
from lanewise.parallel.build import build_part
from lanewise.parallel.layout import Layout
from lanewise.parallel.mesh import Mesh
from lanewise.parallel.sync import first_difference
from lanewise.parallel.trace import MadeUp
from lanewise.replica import Replica
from processes import on_ranks


def checked(rank, size, axes, spoilt):
    """After a step; then again with one bit of one rank's copy flipped."""
    run = make(DEEPSEEK | {"tie_embeddings": True})
    mesh = Mesh(World(rank, size, torch.device("cpu"), dist.group.WORLD), Layout.parse(axes))
    replica = Replica(run, build_part(run, mesh), mesh)
    ballot = replica.compute(1, MadeUp(run).slot, lambda phase: None)
    verdict, chunks = replica.voter.vote(ballot, replica.reducer.finish(), stop=False)
    replica.commit(verdict, chunks, 1e-3, 0)
    before = first_difference(replica)
    if rank == size - 1:
        tensor = dict(replica.model.named_parameters()) | replica.model.state_dict()
        bits = tensor[spoilt].detach().view(-1)[-1:].view(torch.uint8)
        bits ^= 1
    return before, first_difference(replica)


@pytest.mark.parametrize(
    ("axes", "spoilt", "holders"),
    [
        ("tp2", "layers.1.attention_norm.weight", "[0, 1, 2] differ from [3]"),
        ("tp2", "layers.1.ffn.shared.up.weight", "[1] differ from [3]"),  # each half is on two ranks
        ("pp2", "embed.weight", "[0, 1, 2] differ from [3]"),  # tied: at both ends of each replica
        ("ep2", "layers.1.ffn.router.expert_bias", "[0, 1, 2] differ from [3]"),
    ],
)
def test_a_flipped_bit_is_named(axes, spoilt, holders):
    for before, after in on_ranks(4, checked, axes, spoilt):
        assert before is None
        assert after == f"{spoilt}: ranks {holders}"
