"""Any nn.Module as the planner sees it: FLOPs, parameters and saved activations of each repeated block.

The module runs once on the meta device: shapes without numbers, no weights allocated. Attention has no fused kernel
there: where a device has one, the scores that are counted as saved are not.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from lanewise.errors import UserError


@dataclass(frozen=True)
class Traced:
    """A kind of block: its first one's path, how many there are like it, and per block: parameters, forward FLOPs, and
    bytes its backward needs that are not parameters, all for the traced inputs. `rest` is what is in no block."""

    path: str
    count: int
    parameters: int
    flops: int
    saved: int


def trace(
    module: nn.Module, inputs: tuple[Any, ...], declared: Mapping[str, tuple[int, int]] | None = None
) -> list[Traced]:
    """Repeated blocks first, then everything else as one with an empty path.

    module: built under `torch.device("meta")`, or it is moved there. inputs: of its forward, tensors on meta.
    declared: {path: (FLOPs, saved bytes)} of modules whose forward cannot run on meta; such a one must return a tensor
    of its first input's shape, and is replaced by a stand-in.
    Raises UserError that names the module that cannot be followed, and how to declare it.
    """
    module = module.to("meta")
    declared = declared or {}
    # a leaf's first saving place is counted: a tensor that two operators save is kept once
    saved: Counter[str] = Counter()
    stack: list[str] = []
    last = [""]
    own = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())}
    seen: set[int] = set()
    alive: list[Tensor] = []  # so that no storage's place is used twice while tracing

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen | own:
            seen.add(storage._cdata)
            alive.append(tensor)
            saved[stack[-1] if stack else ""] += storage.nbytes()
        return tensor

    handles = []
    for path, part in module.named_modules():
        handles.append(part.register_forward_pre_hook(_entering(path, stack, last)))
        handles.append(part.register_forward_hook(_leaving(stack), always_call=True))
    swapped = [(part, part.forward) for path, part in module.named_modules() if path in declared]
    for part, _ in swapped:
        part.forward = _stand_in
    try:
        with FlopCounterMode(display=False) as counter, saved_tensors_hooks(pack, lambda tensor: tensor):
            module(*inputs)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"module {last[0] or type(module).__name__!r} ({type(module.get_submodule(last[0])).__name__}) cannot be "
            f"followed on the meta device: {reason}; "
            f"declare it: trace(..., declared={{{last[0]!r}: (FLOPs, saved bytes)}}), or --declare "
            f"{last[0]}=FLOPS,BYTES"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
        for part, forward in swapped:
            part.forward = forward
    flops = _flops(module, counter)
    for path, (own_flops, own_saved) in declared.items():
        for prefix in _prefixes(path):
            flops[prefix] += own_flops
        saved[path] += own_saved
    return _group(module, flops, saved)


def _entering(path: str, stack: list[str], last: list[str]) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        stack.append(path)
        last[0] = path

    return hook


def _leaving(stack: list[str]) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        stack.pop()

    return hook


def _stand_in(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x + 0


def _prefixes(path: str) -> list[str]:
    parts = path.split(".") if path else []
    return ["", *(".".join(parts[: i + 1]) for i in range(len(parts)))]


def _flops(module: nn.Module, counter: FlopCounterMode) -> Counter[str]:
    """Forward FLOPs by path, of each module with all that is in it."""
    name = type(module).__name__
    found: Counter[str] = Counter()
    for full, operators in counter.get_flop_counts().items():
        if full != "Global":
            found[full.removeprefix(name).removeprefix(".")] += sum(operators.values())
    found[""] = counter.get_total_flops()
    return found


def _group(module: nn.Module, flops: Counter[str], saved: Counter[str]) -> list[Traced]:
    """Children of the containers that hold several of one class; like ones, by parameters and FLOPs, are one kind."""
    blocks: dict[tuple[str, int, int], list[str]] = {}
    for path, container in module.named_modules():
        children = list(container.named_children())
        kinds = Counter(type(child) for _, child in children)
        if isinstance(container, nn.ModuleList | nn.ModuleDict | nn.Sequential) and max(kinds.values(), default=0) > 1:
            if any(path.startswith(f"{inner}.") or path == inner for found in blocks.values() for inner in found):
                continue  # experts within a block are part of it
            for name, child in children:
                own = f"{path}.{name}" if path else name
                key = (type(child).__name__, _parameters(child), flops[own])
                blocks.setdefault(key, []).append(own)
    made = [
        Traced(paths[0], len(paths), parameters, flops[paths[0]], _within(saved, paths[0]))
        for (_, parameters, _), paths in blocks.items()
    ]
    inside = [path for paths in blocks.values() for path in paths]
    rest = Traced(
        "",
        1,
        _parameters(module) - sum(t.parameters * t.count for t in made),
        flops[""] - sum(flops[path] for path in inside),
        sum(saved.values()) - sum(_within(saved, path) for path in inside),
    )
    return [*made, rest]


def _within(saved: Counter[str], path: str) -> int:
    return sum(held for own, held in saved.items() if own == path or own.startswith(f"{path}."))


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
