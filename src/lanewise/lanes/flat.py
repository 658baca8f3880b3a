"""Flat buckets: parameters laid end to end in a few long vectors, cut in equal chunks, one for each replica.

Everything between backward and the next forward (lane sums, exchange, norm, optimizer) then works on long contiguous
vectors. Every parameter starts at a multiple of `block` elements and every chunk is a whole number of blocks, so

- the norm's partial sums (one per block) are the same whoever owns them, and
- elementwise kernels meet each element at the same place of a vector register, whatever the chunk.

Where a parameter lies in a bucket depends on the model and `layout.bucket_mb`, not on the number of replicas.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lanewise.models.spec import ParamSpec

MIN_BLOCK = 1024
MOST_BLOCKS = 2**20  # the vote carries one fp64 number per block: 8 MB at most


def block_size(numel: int) -> int:
    """Elements per block for a model of `numel` parameters: a power of two, at least 1024, at most 2^20 blocks."""
    block = MIN_BLOCK
    while numel > block * MOST_BLOCKS:
        block *= 2
    return block


@dataclass(frozen=True)
class Place:
    """Where a parameter lies in its bucket."""

    spec: ParamSpec
    parameter: nn.Parameter
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.parameter.numel()


class Bucket:
    """One flat vector of weights, its parameters' places in it, and this replica's chunk of it.

    weights: [size] in the compute dtype, size = replicas * chunk; the parameters become views of it.
    """

    def __init__(self, places: Sequence[Place], dtype: torch.dtype, block: int, replicas: int, replica: int) -> None:
        self.places = places
        self.block = block
        self.used = _round_up(places[-1].stop, block)
        self.chunk = -(-self.used // (block * replicas)) * block
        self.size = self.chunk * replicas
        self.own = slice(replica * self.chunk, (replica + 1) * self.chunk)
        self.weights = torch.zeros(self.size, dtype=dtype, device=places[0].parameter.device)
        for place in places:
            place.parameter.data = self.weights[place.start : place.stop].view(place.spec.shape)

    def overlaps(self, start: int, stop: int) -> Iterator[tuple[Place, int, int]]:
        """(place, from, to) of each parameter that has elements in [start, stop) of the bucket; in bucket positions."""
        for place in self.places:
            a, b = max(start, place.start), min(stop, place.stop)
            if a < b:
                yield place, a, b


def lay_out(
    named: Sequence[tuple[str, nn.Parameter]],
    table: Sequence[ParamSpec],
    dtype: torch.dtype,
    bucket_mb: float,
    replicas: int,
    replica: int,
) -> list[Bucket]:
    """Buckets of about `bucket_mb` MB (fp32), filled in the reverse of `named`: backward's order, roughly.

    dtype: what the model computes in; its parameters become views of the buckets' weights of that dtype.
    """
    specs = {spec.name: spec for spec in table}
    block = block_size(sum(p.numel() for _, p in named))
    most = int(bucket_mb * 2**20 / 4)
    buckets: list[Bucket] = []
    places: list[Place] = []
    start = 0
    for name, parameter in reversed(named):
        places.append(Place(specs[name], parameter, start))
        start = _round_up(start + parameter.numel(), block)
        if start >= most:
            buckets.append(Bucket(places, dtype, block, replicas, replica))
            places, start = [], 0
    if places:
        buckets.append(Bucket(places, dtype, block, replicas, replica))
    return buckets


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def norm_positions(buckets: Sequence[Bucket]) -> tuple[list[Tensor], int]:
    """For each bucket the model-wide position of each of its blocks [size // block] (-1: padding), and their number.

    The order is by parameter name, so that it does not depend on how parameters are grouped into buckets or stages.
    """
    places = sorted((p.spec.name, i, p) for i, bucket in enumerate(buckets) for p in bucket.places)
    positions = [torch.full((bucket.size // bucket.block,), -1, dtype=torch.int64) for bucket in buckets]
    total = 0
    for _, i, place in places:
        block = buckets[i].block
        count = -(-place.parameter.numel() // block)
        first = place.start // block
        positions[i][first : first + count] = torch.arange(total, total + count)
        total += count
    return positions, total
