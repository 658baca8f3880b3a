"""What a module does with one example: which values reach which linear layer, and which parameters are used where.

Structure is read off a run, not off names: every call of a torch function is seen, with the layers whose outputs its
inputs came from.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lanewise.errors import UserError

STREAM = "stream"  # a source: the state that comes into a block
OWN = "="  # before a parameter's name, where it is a source
BEFORE = -1  # a place: what runs before the blocks; those are numbered, and what runs after has the next number

Call = tuple[tuple[Any, ...], dict[str, Any]]

# Matrix products: function -> position of the weight among its arguments, and the weight's dim of outputs.
PRODUCTS: dict[Any, tuple[int, int]] = {
    nn.functional.linear: (1, 0),
    torch.addmm: (2, 1),
    torch.mm: (1, 1),
    torch.matmul: (1, 1),
    Tensor.matmul: (1, 1),
    Tensor.__matmul__: (1, 1),
}


@dataclass
class Linear:
    """A module that is one matrix product: its weight's dim of outputs, and the sources of what it was given."""

    path: str
    out_dim: int
    sources: set[str] = field(default_factory=set)


@dataclass
class Chain:
    """The repeated blocks, as they were called one after the other.

    state: where a block takes it (a position or a keyword); returned: 0 if a block returns the state alone, else the
    length of its tuple, the state first; broken: why it cannot be cut between blocks, or empty.
    """

    paths: list[str]
    state: int | str = 0
    returned: int = 0
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    calls: list[Call] = field(default_factory=list)
    broken: str = ""


class Flow(TorchFunctionMode):
    """One forward pass of `module`, watched. blocks: the path of the list of repeated blocks."""

    def __init__(self, module: nn.Module, blocks: str, inputs: Call) -> None:
        super().__init__()
        holder = module.get_submodule(blocks)
        self.module = module
        self.chain = Chain([f"{blocks}.{name}" if blocks else name for name, _ in holder.named_children()])
        self.names = {id(p): name for name, p in module.named_parameters()}
        self.linears: dict[str, Linear] = {}
        self.embeddings: set[str] = set()
        self.places: defaultdict[str, set[int]] = defaultdict(set)  # of a parameter: before, block numbers, after
        self.uses: defaultdict[str, list[set[str]]] = defaultdict(list)  # of a parameter: sources of each result
        self.functions: dict[str, str] = {}  # of a parameter: the last function that took it
        self._sources: dict[int, set[str]] = {}  # by memory: what is written into a view is in the whole
        self._kept: list[Tensor] = []  # so that no memory is used twice
        self._stack: list[str] = []
        self._place = BEFORE
        self._state: Tensor | None = None  # what the last block made
        self._given: Any = None  # the only argument of the module that was entered last
        handles = [hook for path, each in module.named_modules() for hook in self._hooks(path, each)]
        try:
            with self:
                module(*inputs[0], **inputs[1])
        finally:
            for handle in handles:
                handle.remove()
        if len(self.chain.calls) != len(self.chain.paths):
            self.chain.broken = "not every block is called exactly once"
        for name, _ in module.named_parameters():
            for number, path in enumerate(self.chain.paths):
                if name.startswith(f"{path}."):
                    self.places[name].add(number)
        self._kept.clear()

    # ------------------------------------------------------------------------------------------------- functions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        made = [args[0]] if func is Tensor.__setitem__ else list(tensors(result))
        if made:
            taken = list(tensors((args, kwargs)))
            linear = self._linear(func, args, made[0])
            sources = {linear.path} if linear else set[str]().union(*map(self.sources, taken))
            for tensor in made:
                self._mark(tensor, sources)
            for tensor in taken:
                if (name := self.names.get(id(tensor))) is not None:
                    self.places[name].add(self._place)
                    self.uses[name].append(sources)
                    self.functions[name] = getattr(func, "__name__", str(func))
            if linear:
                linear.sources |= self.sources(taken[1] if func is torch.addmm else taken[0])
            if func is nn.functional.embedding and self._stack and args[0] is self._given:
                self.embeddings.add(self._stack[-1])
        return result

    def _linear(self, func: Any, args: Any, result: Tensor) -> Linear | None:
        position, out_dim = PRODUCTS.get(func, (0, 0))
        if not position or len(args) <= position or not self._stack:
            return None
        module = self.module.get_submodule(self._stack[-1])
        own = {name for name, _ in module.named_parameters()}
        if not {"weight"} <= own <= {"weight", "bias"} or module.weight is not args[position]:
            return None
        if result.shape[-1] != args[position].shape[out_dim]:
            return None
        return self.linears.setdefault(self._stack[-1], Linear(self._stack[-1], out_dim))

    def sources(self, tensor: Tensor) -> set[str]:
        if (name := self.names.get(id(tensor))) is not None:
            return {OWN + name}
        return self._sources.get(_memory(tensor), set())

    def _mark(self, tensor: Tensor, sources: set[str]) -> None:
        self._sources[_memory(tensor)] = sources
        self._kept.append(tensor)

    # --------------------------------------------------------------------------------------------------- modules

    def _hooks(self, path: str, module: nn.Module) -> Iterator[Any]:
        number = self.chain.paths.index(path) if path in self.chain.paths else None

        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._stack.append(path)
            self._given = args[0] if len(args) == 1 and not kwargs else None
            if number is not None:
                self._enter_block(number, args, kwargs)

        def leave(_: nn.Module, args: Any, result: Any) -> None:
            self._stack.pop()
            if number is not None:
                self._leave_block(result)

        yield module.register_forward_pre_hook(enter, with_kwargs=True)
        yield module.register_forward_hook(leave)

    def _enter_block(self, number: int, args: Any, kwargs: Any) -> None:
        chain = self.chain
        given: dict[int | str, Tensor] = {
            key: value
            for key, value in [*enumerate(args), *kwargs.items()]
            if isinstance(value, Tensor) and value.is_floating_point()
        }
        if number == 0 and given:
            chain.state = next(iter(given))
        state = given.pop(chain.state, None)
        if number != len(chain.calls):
            chain.broken = chain.broken or "the blocks do not run in their order"
        elif state is None or (number and state is not self._state):
            chain.broken = chain.broken or f"block {number} is given something else than what block {number - 1} made"
        elif grown := [key for key, value in given.items() if value.requires_grad]:
            chain.broken = chain.broken or f"blocks also take {grown[0]!r}, which depends on parameters outside of them"
        if number == 0 and state is not None:
            chain.shape, chain.dtype = tuple(state.shape), state.dtype
        for tensor in tensors((args, kwargs)):
            if tensor is state or self.sources(tensor):
                self._mark(tensor, {STREAM})
        chain.calls.append(_detached((args, kwargs)))
        self._place = number

    def _leave_block(self, result: Any) -> None:
        self.chain.returned = 0 if isinstance(result, Tensor) else len(result)
        self._state = next(tensors(result), None)
        self._place = len(self.chain.paths) if self._place == len(self.chain.paths) - 1 else self._place


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def tensors(value: Any) -> Iterator[Tensor]:
    """Those in nested tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors(each)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for each in value:
            yield from tensors(each)


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if type(value) in (tuple, list):
        return type(value)(map(_detached, value))
    return {key: _detached(each) for key, each in value.items()} if type(value) is dict else value


def find_blocks(module: nn.Module) -> str:
    """The path of the repeated blocks: of all lists of modules of one class, the one with most parameters."""
    sizes = {
        path: sum(p.numel() for p in each.parameters())
        for path, each in module.named_modules()
        if isinstance(each, nn.ModuleList | nn.Sequential) and len({type(child) for child in each}) == 1
    }
    if not any(sizes.values()):
        raise UserError(
            f"{type(module).__name__} has no list of repeated blocks (a ModuleList or Sequential of one class): "
            f"declare it, as in Plan(blocks='encoder.layers')"
        )
    return max(sizes, key=lambda path: sizes[path])
