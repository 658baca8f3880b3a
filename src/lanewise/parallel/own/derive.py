"""From a module to its plan: groups from the flow of one example, checked by experiment; an entry per parameter."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lanewise.errors import UserError
from lanewise.parallel.layout import Layout
from lanewise.parallel.own.experiment import Experiment
from lanewise.parallel.own.flow import OWN, STREAM, Call, Flow, find_blocks
from lanewise.parallel.own.plan import Entry, Group, Plan, grouped_by_blocks

EXAMPLE = (2, 8)  # rows and tokens of the example, where the user gives none


def derive(module: nn.Module, layout: Layout | str = "", example: Any = None) -> Plan:
    """The plan for `layout`, read off one forward pass.

    example: the inputs of a small batch, a tensor or a dict of keyword arguments; default: a few token ids.
    Raises UserError that says what to declare.
    """
    return observed(module, layout, example)[0]


def observed(module: nn.Module, layout: Layout | str, example: Any, declared: Plan | None = None) -> tuple[Plan, Flow]:
    """The plan, derived or as declared, completed for its module; and the flow it was read off."""
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    blocks = find_blocks(module) if declared is None else declared.blocks
    flow = _watched(module, blocks, example)
    experiments = _Experiments(module, flow, layout.tp)
    if declared is None:
        plan = Plan(blocks, _groups(flow, experiments), tuple(sorted(flow.embeddings)), _heads(flow, module))
        plan = replace(plan, embeddings=tuple(path for path in plan.embeddings if _plain(module, path)))
    else:
        plan = replace(declared, groups=tuple(_checked(group, flow, experiments) for group in declared.groups))
    plan = replace(plan, layout=layout, depth=len(flow.chain.paths), uncut=flow.chain.broken)
    return replace(plan, table=tuple(_table(module, plan, flow))), flow


def arguments(inputs: Any) -> Call:
    """A forward call's positional and keyword arguments from a tensor, or a dict of them by name."""
    return ((), dict(inputs)) if isinstance(inputs, dict) else ((inputs,), {})


def _watched(module: nn.Module, blocks: str, example: Any) -> Flow:
    if example is None:
        sizes = [each.num_embeddings for each in module.modules() if isinstance(each, nn.Embedding)]
        example = torch.arange(EXAMPLE[0] * EXAMPLE[1]).reshape(EXAMPLE) % min(sizes, default=1)
    if any(parameter.is_meta for parameter in module.parameters()):
        raise UserError("the module is on the meta device: build it with weights, which the plan is tried out on")
    modes = {each: each.training for each in module.modules()}
    module.eval()  # nothing is to be drawn, or learned, from the example
    try:
        return Flow(module, blocks, arguments(example))
    except (TypeError, RuntimeError, IndexError) as error:
        raise UserError(
            f"{type(module).__name__} cannot be run on the example ({str(error).splitlines()[0]}): "
            f"give one, as in example={{'tokens': tokens}}"
        ) from error
    finally:
        for each, mode in modes.items():
            each.training = mode


# ---------------------------------------------------------------------------------------------------- groups


def _groups(flow: Flow, experiments: "_Experiments") -> tuple[Group, ...]:
    found = []
    for number, path in enumerate(flow.chain.paths):
        inside = {name: linear for name, linear in flow.linears.items() if name.startswith(f"{path}.")}
        # What lies between a linear layer and those it came from; empty if the block's own state is among its sources.
        between = {name: _inner(linear.sources) for name, linear in inside.items()}
        fed = {source for sources in between.values() for source in sources}
        for row, sources in between.items():
            columns = sorted(sources & inside.keys(), key=list(inside).index)
            if row in fed or not columns:
                continue
            sole = [name for name in columns if all(name not in s for other, s in between.items() if other != row)]
            group = Group(tuple(_within(path, sole)), _within(path, [row])[0], blocks=(number,))
            if sole == columns:
                found.append(experiments.settled(group))
            elif sole:
                others = ", ".join(_within(path, set(columns) - set(sole)))
                found.append(replace(group, local=False, why=f"{others} feeds it too, and another layer"))
    return grouped_by_blocks(found, len(flow.chain.paths))


def _inner(sources: set[str]) -> set[str]:
    return set() if STREAM in sources else sources


def _within(block: str, paths: Any) -> list[str]:
    return [path.removeprefix(f"{block}.") for path in paths]


class _Experiments:
    """Settles whether groups are local; blocks that look alike share the answer."""

    def __init__(self, module: nn.Module, flow: Flow, tp: int) -> None:
        self.module, self.flow, self.tp = module, flow, tp
        self.made: dict[Any, Experiment] = {}
        self.answers: dict[Any, Group] = {}

    def settled(self, group: Group) -> Group:
        """A group of one block, made local if it can be."""
        (number,) = group.blocks
        block = self.module.get_submodule(self.flow.chain.paths[number])
        looks = (type(block), tuple((name, p.shape) for name, p in block.named_parameters()))
        key = (looks, replace(group, blocks=()))
        if key not in self.answers:
            self.answers[key] = self._tried(group, looks, block)
        return replace(self.answers[key], blocks=group.blocks)

    def _tried(self, group: Group, looks: Any, block: nn.Module) -> Group:
        path = self.flow.chain.paths[group.blocks[0]]
        sources = _inner(self.flow.linears[f"{path}.{group.row}"].sources)
        used = {source.removeprefix(OWN) for source in sources if source.startswith(OWN)}
        for name in used:
            if not all(use <= sources for use in self.flow.uses[name]):
                return replace(group, local=False, why=f"{name} is used in and outside of it")
        group = replace(group, summed=tuple(_within(path, sorted(used))))
        if self.tp == 1:
            return group
        if looks not in self.made:
            self.made[looks] = Experiment(block, self.flow.chain.calls[group.blocks[0]], self.tp)
        widths = {name: self._width(f"{path}.{name}", inputs=False) for name in group.columns}
        widths[group.row] = self._width(f"{path}.{group.row}", inputs=True)
        local = self.made[looks].local(group, widths)
        if local is None:
            return replace(group, local=False, summed=(), why=f"cut in {self.tp}, the parts are not parts of the whole")
        return local

    def _width(self, path: str, inputs: bool) -> int:
        weight = self.module.get_submodule(path).weight
        assert isinstance(weight, Tensor)
        return weight.shape[self.flow.linears[path].out_dim ^ inputs]


def _checked(group: Group, flow: Flow, experiments: _Experiments) -> Group:
    """A declared group, as it holds in the first of its blocks. Raises UserError if it is not what it says."""
    number = next(iter(group.inside(1)))
    path = flow.chain.paths[number]
    for name in (*group.columns, group.row):
        if f"{path}.{name}" not in flow.linears:
            raise UserError(f"plan: {path}.{name} is not a linear layer of its own that the example runs through")
    if not group.local:
        return group
    found = replace(experiments.settled(replace(group, blocks=(number,))), blocks=group.blocks)
    if not found.local:
        raise UserError(
            f"plan: {', '.join(group.columns)} -> {group.row} cannot be computed part by part "
            f"({found.why}): declare it with local=False"
        )
    return found


def _heads(flow: Flow, module: nn.Module) -> tuple[str, ...]:
    """Linear layers after the blocks that widen the state: what they make is long, and their weight is large."""
    last = len(flow.chain.paths)
    found = []
    for path, linear in flow.linears.items():
        weight = module.get_submodule(path).weight
        assert isinstance(weight, Tensor)
        wide = weight.shape[linear.out_dim] > weight.shape[1 - linear.out_dim]
        if wide and last in flow.places[flow.names[id(weight)]]:
            found.append(path)
    return tuple(found)


def _plain(module: nn.Module, path: str) -> bool:
    each = module.get_submodule(path)
    return isinstance(each, nn.Embedding) and each.max_norm is None and not each.scale_grad_by_freq and not each.sparse


# ----------------------------------------------------------------------------------------------------- table


def _table(module: nn.Module, plan: Plan, flow: Flow) -> Iterator[Entry]:
    kinds = _kinds(module, plan, flow)
    aliases: dict[str, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        aliases.setdefault(flow.names[id(parameter)], []).append(name)
    for name, parameter in module.named_parameters():
        # A tied embedding and head are cut the same way: both by the vocabulary.
        kind, split_dim, pieces = next((kinds[alias] for alias in aliases[name] if alias in kinds), ("kept", None, ()))
        yield Entry(
            name,
            tuple(parameter.shape),
            kind,
            split_dim,
            pieces,
            tuple(sorted(flow.places[name])),
            tuple(alias for alias in aliases[name] if alias != name),
            parameter.requires_grad,
            _why_kept(name, kind, parameter, flow),
        )


def _kinds(module: nn.Module, plan: Plan, flow: Flow) -> dict[str, tuple[str, int | None, tuple[int, ...]]]:
    """Of the parameters that a plan speaks of: kind, dim split by tp, pieces. Raises UserError for unknown paths."""
    kinds: dict[str, tuple[str, int | None, tuple[int, ...]]] = {}

    def add(path: str, kind: str, weight_dim: int, pieces: tuple[int, ...] = ()) -> None:
        here = {name for name, _ in _module(module, path).named_parameters()}
        if "weight" in here:
            kinds[f"{path}.weight"] = (kind, weight_dim, pieces)
        if "bias" in here:
            kinds[f"{path}.bias"] = ("kept", None, ()) if kind == "row" else (kind, 0, pieces)

    for path in plan.embeddings:
        add(path, "embedding", 0)
    for path in plan.heads:
        if path not in flow.linears:
            raise UserError(f"plan: {path} is not a linear layer of its own that the example runs through")
        add(path, "head", flow.linears[path].out_dim)
    for group in plan.groups:
        for number in group.inside(len(flow.chain.paths)):
            block = flow.chain.paths[number]
            for name in group.columns:
                add(f"{block}.{name}", "column", flow.linears[f"{block}.{name}"].out_dim, group.pieces)
            add(f"{block}.{group.row}", "row", 1 - flow.linears[f"{block}.{group.row}"].out_dim)
            for name in group.summed:
                kinds[f"{block}.{name}"] = ("summed", None, ())
    return kinds


def _module(module: nn.Module, path: str) -> nn.Module:
    try:
        return module.get_submodule(path)
    except AttributeError as error:
        raise UserError(f"plan: {type(module).__name__} has no module {path!r}") from error


def _why_kept(name: str, kind: str, parameter: Tensor, flow: Flow) -> str:
    if kind != "kept" or parameter.dim() < 2:
        return ""
    path = name.rpartition(".")[0]
    if name not in flow.functions:
        return "the example does not run through it"
    if path in flow.linears:
        return "no second linear layer takes what it makes"
    return f"used by {flow.functions[name]}, not by a linear layer of its own"
