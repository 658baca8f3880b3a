"""What must be equal on several ranks, compared by hash: weights that replicas, tp, cp, ep or the ends of a pipeline
hold copies of, and buffers (the experts' biases). A debug check: it costs a pass over the weights."""

from collections import defaultdict
from collections.abc import Iterator

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from lanewise.replica import Replica


def first_difference(replica: Replica) -> str | None:
    """On every rank the first name, in their order, whose copies differ, and who holds which; None if all agree."""
    mesh = replica.mesh
    mine = dict(_hashes(replica))
    everyone: list[dict[tuple[str, int], str]] = [mine]
    if mesh.world.group is not None:
        everyone = [{}] * mesh.world.size
        dist.all_gather_object(everyone, mine, group=mesh.world.group)
    holders: dict[tuple[str, int], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, hashes in enumerate(everyone):
        for key, value in hashes.items():
            holders[key][value].append(rank)
    for (name, _), found in sorted(holders.items()):
        if len(found) > 1:
            return f"{name}: ranks " + " differ from ".join(str(ranks) for ranks in found.values())
    return None


def _hashes(replica: Replica) -> Iterator[tuple[tuple[str, int], str]]:
    """By name and box: of what this rank computes with, and of its buffers."""
    for bucket in replica.buckets:
        for place in bucket.places:
            yield (place.spec.name, place.held.index), _hash(bucket.weights[place.start : place.stop])
    for name, buffer in replica.model.state_dict().items():
        if name not in replica.parameter_names:
            yield (name, 0), _hash(buffer)


def _hash(tensor: Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
