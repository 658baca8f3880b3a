"""Which box of a parameter a rank holds, as its `cuts` say, and who holds the same one."""

from collections.abc import Mapping
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
    """The axes, of those `size` gives degrees of, that really cut the parameter."""
    return tuple(axis for axis, cut in spec.cuts.items() if size[axis] > 1 and units_of(cut, size[axis]))


def box(spec: ParamSpec, size: Mapping[str, int], at: Mapping[str, int]) -> Box:
    """What the rank at coordinates `at` holds. Where units do not divide, the ranks' boxes differ by one unit."""
    offsets, shape = [0] * len(spec.shape), list(spec.shape)
    for axis in cut_axes(spec, size):
        cut = spec.cuts[axis]
        ranks, units = size[axis], units_of(cut, size[axis])
        assert units >= ranks, f"{spec.name}: {units} units for {ranks} ranks of {axis}"
        start, stop = (at[axis] * units // ranks, (at[axis] + 1) * units // ranks)
        width = spec.shape[cut.dim] // units
        offsets[cut.dim], shape[cut.dim] = start * width, (stop - start) * width
    return Box(tuple(offsets), tuple(shape))


def numels(spec: ParamSpec, size: Mapping[str, int]) -> list[int]:
    """Elements of each box the parameter is cut into, in the order of `Held.index`."""
    axes = [axis for axis in size if axis in cut_axes(spec, size)]
    places = product(*(range(size[axis]) for axis in axes))
    return [prod(box(spec, size, dict(zip(axes, place, strict=True))).shape) for place in places]


def held(spec: ParamSpec, mesh: Mesh) -> Held:
    """What this rank holds of the parameter, and with whom. Every rank must ask for its parameters in one order."""
    axes = cut_axes(spec, mesh.size)
    index, boxes = mesh.position(axes)
    shared = [axis for axis in (*WORK, "tp") if axis not in axes]
    part, parts = mesh.position(shared)
    copies = Copies(mesh.group(("replica", *shared), "exchange"), mesh.replicas, mesh.replica, parts, part)
    return Held(box(spec, mesh.size, mesh.at).offsets, index, boxes, copies)
