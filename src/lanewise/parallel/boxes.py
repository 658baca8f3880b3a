"""Which box of a parameter a rank holds, as its `cuts` say, and who holds the same one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from lanewise.lanes.copies import Copies
from lanewise.lanes.flat import Held
from lanewise.models.spec import Cut, ParamSpec
from lanewise.parallel.layout import WORK
from lanewise.parallel.mesh import Mesh


@dataclass(frozen=True)
class Box:
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def units_of(cut: Cut, ranks: int) -> int:
    """Between how many units `ranks` may cut; 0: not at all."""
    return cut.units if ranks <= cut.units else cut.finer


def cut_axes(spec: ParamSpec, size: Mapping[str, int]) -> tuple[str, ...]:
    """The axes, of those `size` gives degrees of, that really cut the parameter as the model meets it."""
    return tuple(axis for axis, cut in spec.cuts.items() if size[axis] > 1 and units_of(cut, size[axis]))


def box(spec: ParamSpec, size: Mapping[str, int], at: Mapping[str, int]) -> Box:
    """What the model at coordinates `at` computes with. Where units do not divide, ranks' boxes differ by one unit."""
    offsets, shape = [0] * len(spec.shape), list(spec.shape)
    for axis in cut_axes(spec, size):
        cut = spec.cuts[axis]
        ranks, units = size[axis], units_of(cut, size[axis])
        assert units >= ranks, f"{spec.name}: {units} units for {ranks} ranks of {axis}"
        start, stop = (at[axis] * units // ranks, (at[axis] + 1) * units // ranks)
        width = spec.shape[cut.dim] // units
        offsets[cut.dim], shape[cut.dim] = start * width, (stop - start) * width
    return Box(tuple(offsets), tuple(shape))


def shard_dim(shape: Sequence[int], ranks: int) -> int:
    """The dim that FSDP cuts a box of `shape` along: the first that divides, else the first, into unequal chunks."""
    return next((dim for dim, length in enumerate(shape) if length % ranks == 0), 0)


def shard(spec: ParamSpec, size: Mapping[str, int], at: Mapping[str, int]) -> Box:
    """Of that box, what the rank keeps: all of it, or FSDP's chunk, as torch cuts: the last ones shorter, or empty."""
    whole = box(spec, size, at)
    ranks, offsets, shape = size["fsdp"], list(whole.offsets), list(whole.shape)
    dim = shard_dim(shape, ranks)
    most = -(-shape[dim] // ranks)
    first = min(at["fsdp"] * most, shape[dim])
    offsets[dim], shape[dim] = offsets[dim] + first, min(most, shape[dim] - first)
    return Box(tuple(offsets), tuple(shape))


def _axes(spec: ParamSpec, size: Mapping[str, int]) -> list[str]:
    """All axes the parameter is dealt out along, in the mesh's order."""
    return [axis for axis in size if size[axis] > 1 and (axis == "fsdp" or axis in cut_axes(spec, size))]


def numels(spec: ParamSpec, size: Mapping[str, int]) -> list[int]:
    """Elements of each shard the parameter is cut into, in the order of `Held.index`."""
    axes = _axes(spec, size)
    places = product(*(range(size[axis]) for axis in axes))
    none = dict.fromkeys(size, 0)
    return [prod(shard(spec, size, none | dict(zip(axes, place, strict=True))).shape) for place in places]


def held(spec: ParamSpec, mesh: Mesh) -> Held:
    """What this rank holds of the parameter, and with whom."""
    axes = _axes(spec, mesh.size)
    index, boxes = mesh.position(axes)
    shared = [axis for axis in (*WORK, "tp") if axis not in axes]
    if spec.aliases:  # tied: the first and the last stage have one each
        shared.append("ends")
    part, parts = mesh.position(shared)
    copies = Copies(mesh.group(("replica", *shared), "exchange"), mesh.replicas, mesh.replica, parts, part)
    return Held(shard(spec, mesh.size, mesh.at).offsets, index, boxes, copies)
