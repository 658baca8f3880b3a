"""May each rank of tp compute its part alone between the layers of a group? Tried, not guessed.

A block is run with random weights on the values that it met in the module. Then each rank is played: the columns'
outputs are cut to its share. If the row's input comes out as that rank's share of what it was, what lies between may be
computed part by part, whatever it is. Code that counts heads or widths by numbers of its own gets its share of them.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from lanewise.parallel.own.flow import Call
from lanewise.parallel.own.plan import Group

CLOSE = 1e-4  # relative to the largest element; a wrong share is off by about 1
MOST_NUMBERS = 8  # of a module that are tried out


class Experiment:
    """One block, copied and filled with random weights (trained or freshly made ones may be zero)."""

    def __init__(self, block: nn.Module, call: Call, tp: int) -> None:
        self.tp = tp
        self.block = copy.deepcopy(block).float().eval()
        random = torch.Generator().manual_seed(0)
        for parameter in self.block.parameters():
            fan_in = parameter.shape[-1] if parameter.dim() > 1 else 1
            noise = torch.randn(parameter.shape, generator=random) / fan_in**0.5
            parameter.data.copy_(noise if parameter.dim() > 1 else 1 + 0.3 * noise)
        self.call = _floats(call)

    def local(self, group: Group, widths: dict[str, int]) -> Group | None:
        """`group` with the pieces and numbers that make it work part by part; None if nothing does.

        widths: of the columns' outputs and of the row's input, by path. What the group declares is not looked for.
        """
        if widths[group.row] % self.tp:
            return None
        right = self._run(group, (), None)
        every = [group.pieces] if group.pieces else list(_pieces(group, widths))
        for divided in [group.divided] if group.divided else self._divisions(group):
            for pieces in every:
                each = [pieces or (widths[path],) for path in group.columns]
                if any(piece % self.tp for widths_of in each for piece in widths_of):
                    continue
                if all(self._holds(group, each, divided, rank, right) for rank in range(self.tp)):
                    return replace(group, pieces=pieces, divided=divided)
        return None

    def _holds(
        self, group: Group, each: list[tuple[int, ...]], divided: tuple[str, ...], rank: int, right: Any
    ) -> bool:
        shares = [share(pieces, self.tp, rank) for pieces in each]
        before = [(*owner(self.block, path), path) for path in divided]
        for module, name, _ in before:
            setattr(module, name, getattr(module, name) // self.tp)
        try:
            given, made = self._run(group, tuple(shares), right[0])
        except Exception:  # whatever foreign code says when its shapes do not fit
            return False
        finally:
            for module, name, _ in before:
                setattr(module, name, getattr(module, name) * self.tp)
        mine = [whole.chunk(self.tp, -1)[rank] for whole in right[0]]
        return _close(given, mine) and _close([made], [right[1]])

    @torch.no_grad()
    def _run(
        self, group: Group, shares: tuple[Tensor, ...], inputs: list[Tensor] | None
    ) -> tuple[list[Tensor], Tensor]:
        """What the row was given, call by call, and what the block returned; the row goes on with `inputs`, if any."""
        given: list[Tensor] = []

        def note(_: nn.Module, args: Any) -> Any:
            given.append(args[0])
            return None if inputs is None else (inputs[len(given) - 1],)

        handles = [self.block.get_submodule(group.row).register_forward_pre_hook(note)]
        for path, kept in zip(group.columns, shares, strict=False):
            handles.append(self.block.get_submodule(path).register_forward_hook(_cut(kept)))
        try:
            result = self.block(*self.call[0], **self.call[1])
        finally:
            for handle in handles:
                handle.remove()
        return given, result if isinstance(result, Tensor) else result[0]

    def _divisions(self, group: Group) -> Iterator[tuple[str, ...]]:
        """None, then single numbers, pairs and triples of the module that holds the group."""
        parts = [path.split(".")[:-1] for path in (*group.columns, group.row)]
        common = ".".join(_common(parts))
        numbers = [
            f"{common}.{name}" if common else name
            for name, value in vars(self.block.get_submodule(common)).items()
            if type(value) is int and not name.startswith("_") and value > 1 and value % self.tp == 0
        ]
        for count in range(4):
            yield from combinations(numbers[:MOST_NUMBERS], count)


def share(pieces: tuple[int, ...], tp: int, rank: int) -> Tensor:
    """Indices of a rank's outputs: its share of each piece, one after the other."""
    starts = torch.tensor((0, *pieces)).cumsum(0)
    return torch.cat([start + torch.arange(n).tensor_split(tp)[rank] for start, n in zip(starts, pieces, strict=False)])


def _pieces(group: Group, widths: dict[str, int]) -> Iterator[tuple[int, ...]]:
    """Of what a single column may be fused: nothing, two or three alike, queries with narrower keys and values."""
    yield ()
    if len(group.columns) == 1:
        out, row = widths[group.columns[0]], widths[group.row]
        for count in (2, 3):
            if out % count == 0:
                yield (out // count,) * count
        if out > row and (out - row) % 2 == 0:
            yield row, (out - row) // 2, (out - row) // 2


def _cut(kept: Tensor) -> Callable[..., Tensor]:
    return lambda module, args, result: result[..., kept]


def owner(block: nn.Module, path: str) -> tuple[nn.Module, str]:
    parent, _, name = path.rpartition(".")
    return block.get_submodule(parent), name


def _common(paths: list[list[str]]) -> list[str]:
    found = []
    for names in zip(*paths, strict=False):
        if len(set(names)) > 1:
            break
        found.append(names[0])
    return found


def _close(found: list[Tensor], right: list[Tensor]) -> bool:
    return len(found) == len(right) and all(
        a.shape == b.shape and (not b.numel() or bool((a - b).abs().max() <= CLOSE * b.abs().max()))
        for a, b in zip(found, right, strict=True)
    )


def _floats(value: Any) -> Any:
    """Tensors in fp32, as the copied block; all else as it is."""
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(map(_floats, value))
    return {key: _floats(each) for key, each in value.items()} if type(value) is dict else value
