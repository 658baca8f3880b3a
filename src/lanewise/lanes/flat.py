"""Flat buckets: parameters laid end to end in a few long vectors, cut in equal chunks, one for each of their copies.

Everything between backward and the next forward (lane sums, exchange, norm, optimizer) then works on long contiguous
vectors. Every parameter starts at a multiple of `block` elements and every chunk is a whole number of blocks, so

- the norm's partial sums (one per block) are the same whoever owns them, and
- elementwise kernels meet each element at the same place of a vector register, whatever the chunk.

Where a parameter lies in a bucket depends on the model and `layout.bucket_mb`, not on the number of replicas.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import swap_tensors

from lanewise.lanes.copies import Copies
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
class Held:
    """What this rank holds of a parameter: one box of it, held by `copies`.

    offsets: where the box begins in the whole. index: its number among the `boxes` the parameter is cut into.
    """

    offsets: tuple[int, ...]
    index: int
    boxes: int
    copies: Copies


@dataclass(frozen=True)
class Place:
    """Where a parameter, or the part of it that this rank holds, lies in its bucket."""

    spec: ParamSpec
    parameter: nn.Parameter
    held: Held
    start: int

    @property
    def shape(self) -> torch.Size:
        return local(self.parameter).shape

    @property
    def stop(self) -> int:
        return self.start + local(self.parameter).numel()


def local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor: where FSDP has sharded it, the shard."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        shard: Tensor = tensor.to_local()
    return shard


class Bucket:
    """One flat vector of weights, its parameters' places in it, and this rank's chunk of it.

    weights: [size] in the compute dtype, size = copies * chunk; the parameters become views of it.
    number: among the buckets of the same copies, on all of which it is the same: it tags their messages.
    """

    def __init__(self, places: Sequence[Place], number: int, dtype: torch.dtype, block: int) -> None:
        self.places, self.number = places, number
        self.block = block
        self.copies = copies = places[0].held.copies
        self.used = _round_up(places[-1].stop, block)
        self.chunk = -(-self.used // (block * copies.size)) * block
        self.size = self.chunk * copies.size
        self.own = slice(copies.rank * self.chunk, (copies.rank + 1) * self.chunk)
        self.weights = torch.zeros(self.size, dtype=dtype, device=local(places[0].parameter).device)
        for place in places:
            _house(place.parameter, self.weights[place.start : place.stop].view(place.shape))

    def refresh(self) -> None:
        """Copy the weights to parameters that could not become views of them: FSDP pads shards of unequal sizes."""
        for place in self.places:
            here, values = local(place.parameter), self.weights[place.start : place.stop].view(place.shape)
            if here.data_ptr() != values.data_ptr():
                here.copy_(values)

    def overlaps(self, start: int, stop: int) -> Iterator[tuple[Place, int, int]]:
        """(place, from, to) of each parameter that has elements in [start, stop) of the bucket; in bucket positions."""
        for place in self.places:
            a, b = max(start, place.start), min(stop, place.stop)
            if a < b:
                yield place, a, b


def _house(parameter: nn.Parameter, values: Tensor) -> None:
    """Let the parameter live in `values` from now on."""
    if not isinstance(parameter, DTensor):
        parameter.data = values
        return
    moved = DTensor.from_local(
        values,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    swap_tensors(parameter, nn.Parameter(moved, requires_grad=parameter.requires_grad))


def lay_out(
    named: Sequence[tuple[str, nn.Parameter]],
    table: Sequence[ParamSpec],
    held: Callable[[ParamSpec], Held],
    dtype: torch.dtype,
    bucket_mb: float,
) -> list[Bucket]:
    """Buckets of about `bucket_mb` MB (fp32), filled in the reverse of `named`: backward's order, roughly.

    named: the parameters of this rank, which are its boxes of those in the whole model's `table`; `held` says which.
    What other copies hold goes into other buckets. Which parameters share a bucket is the same on all ranks that hold
    boxes of the same ones, even if their boxes are not of one size: they exchange in the same order.
    dtype: what the model computes in; its parameters become views of the buckets' weights of that dtype.
    """
    specs = {spec.name: spec for spec in table}
    block = block_size(sum(math.prod(spec.shape) for spec in table))
    most = int(bucket_mb * 2**20 / 4)
    buckets: list[list[Place]] = []
    filling: dict[Copies, tuple[list[Place], int]] = {}
    for name, parameter in reversed(named):
        spec, here = specs[name], held(specs[name])
        if here.copies not in filling:
            buckets.append([])
            filling[here.copies] = buckets[-1], 0
        places, size = filling[here.copies]
        places.append(Place(spec, parameter, here, _round_up(places[-1].stop, block) if places else 0))
        size += _round_up(math.prod(spec.shape) // here.boxes, block)
        filling[here.copies] = places, size
        if size >= most:
            del filling[here.copies]
    numbers: dict[Copies, Iterator[int]] = defaultdict(itertools.count)
    return [Bucket(places, next(numbers[places[0].held.copies]), dtype, block) for places in buckets]


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def norm_positions(buckets: Sequence[Bucket], numels: Mapping[str, Sequence[int]]) -> tuple[list[Tensor], int]:
    """For each bucket the model-wide position of each of its blocks [size // block] (-1: padding), and their number.

    The order is by parameter name and box, so that it does not depend on how they are grouped into buckets or stages.
    numels: the elements of each box of each parameter of the whole model.
    """
    block = buckets[0].block
    firsts: dict[tuple[str, int], int] = {}
    total = 0
    for name in sorted(numels):
        for index, numel in enumerate(numels[name]):
            firsts[name, index] = total
            total += -(-numel // block)
    positions = [torch.full((bucket.size // block,), -1, dtype=torch.int64) for bucket in buckets]
    for bucket, position in zip(buckets, positions, strict=True):
        for place in bucket.places:
            first, count = firsts[place.spec.name, place.held.index], -(-local(place.parameter).numel() // block)
            position[place.start // block :][:count] = torch.arange(first, first + count)
    return positions, total
