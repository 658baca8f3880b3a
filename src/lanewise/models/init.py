"""Initial weights, keyed by (seed, parameter, block of rows): the same in every layout, and no rank has to generate
more than the blocks that hold its rows."""

import hashlib
import math

import torch
from torch import Tensor, nn

from lanewise.models.spec import ParamSpec, table

BLOCK = 2**20  # elements drawn from one generator: whole rows, at least one


def initial(spec: ParamSpec, seed: int, rows: slice | None = None) -> Tensor:
    """The parameter's initial values in fp32 on the CPU, or just its `rows` (a slice of step 1 of the leading dim)."""
    start, stop, step = (rows or slice(None)).indices(spec.shape[0])
    assert step == 1
    shape = (max(stop - start, 0), *spec.shape[1:])
    if spec.init != "normal":
        return torch.full(shape, float(spec.init == "ones"), device="cpu")
    height = max(BLOCK // max(math.prod(spec.shape[1:]), 1), 1)
    out = torch.empty(shape, device="cpu")
    for first in range(start - start % height, stop, height):
        last = min(first + height, spec.shape[0])
        a, b = max(start, first), min(stop, last)
        block = torch.empty((last - first, *spec.shape[1:]), device="cpu")
        block.normal_(0, spec.std, generator=_generator(seed, spec.name, first))
        out[a - start : b - start] = block[a - first : b - first]
    return out


def _generator(seed: int, name: str, first_row: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}/{first_row}".encode(), digest_size=8).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)


@torch.no_grad()
def fill(model: nn.Module, seed: int) -> None:
    """Give a whole model its initial values: parameters from `initial`, buffers zero."""
    for spec in table(model):
        model.get_parameter(spec.name).copy_(initial(spec, seed))
    for buffer in model.buffers():
        buffer.zero_()
