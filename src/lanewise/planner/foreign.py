"""A module of the user's as the planner's `Transformer`: traced on the meta device, so that no weight is allocated.

What the trace tells (parameters and FLOPs of each repeated block, and of the rest) is kept exactly; how a block's
parameters divide into attention and feed-forward matters to the cost model only through its shapes, and is derived.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lanewise.errors import UserError
from lanewise.parallel.layout import Layout
from lanewise.parallel.own.source import HF, made
from lanewise.planner.model import Transformer
from lanewise.planner.trace import Traced, trace

WIDTH = 64  # of a head, where nothing tells: layouts divide heads


def describe_module(source: str, sequence: int, declared: Mapping[str, tuple[int, int]]) -> Transformer:
    """source: as for `prove --module`; one sequence of tokens is its input unless the function gives a batch. declared:
    {path: (FLOPs of a sequence, saved bytes)} of modules that cannot be followed. Raises UserError."""
    with torch.device("meta"):
        module, batch = made(source, Layout(), full=True)
        inputs: Any = torch.zeros(1, sequence, dtype=torch.int64) if batch is None else _on_meta(batch[0])
    if source.startswith(HF):  # what looks at a mask's numbers to leave it out cannot run on meta
        module.set_attn_implementation("eager")  # type: ignore[operator]
        inputs = {"input_ids": inputs, "attention_mask": torch.ones_like(inputs)}
    ids = next(iter(inputs.values())) if isinstance(inputs, dict) else inputs
    tokens, length = ids.shape[:2].numel(), ids.shape[:2][-1]
    if isinstance(inputs, dict):
        module = _Named(module)
        declared = {f"module.{path}": told for path, told in declared.items()}
    return described(module, trace(module, (inputs,), declared), tokens, length)


class _Named(nn.Module):
    """Takes a batch's named inputs as one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.config = getattr(module, "config", None)

    def forward(self, inputs: dict[str, Any]) -> Any:
        return self.module(**inputs)


def _on_meta(value: Any) -> Any:
    return {k: _on_meta(v) for k, v in value.items()} if isinstance(value, dict) else value.to("meta")


def described(module: nn.Module, traced: list[Traced], tokens: int, length: int) -> Transformer:
    """traced: of `tokens` tokens in sequences of `length`; the whole scores count there, of which a causal mask leaves
    half."""
    *blocks, rest = traced
    layers = sum(kind.count for kind in blocks)
    if not layers:
        raise UserError("--module: it has no repeated blocks (several of one class in a ModuleList): nothing to spread")
    parameters = sum(kind.count * kind.parameters for kind in blocks) / layers
    flops = sum(kind.count * kind.flops for kind in blocks) / layers / tokens
    tables = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    table = max(tables, key=lambda part: part.weight.numel(), default=None)
    hidden = table.embedding_dim if table is not None else max(round((parameters / 12) ** 0.5), 1)
    vocabulary = table.num_embeddings if table is not None else max(round(rest.parameters / 2 / hidden), 1)
    inner = max((flops - 2 * parameters) / 4 / length, 0.0)  # width of all heads
    config = getattr(module, "config", None)
    heads = getattr(config, "num_attention_heads", None) or max(round(inner / WIDTH), 1)
    width = max(round(inner / heads), 1)
    ffn = max(round((parameters - 4 * hidden * heads * width) / (3 * hidden)), 0)
    plain = Transformer(
        layers,
        hidden,
        heads,
        heads,
        width,
        width,
        ffn,
        vocabulary,
        tied=rest.parameters < 1.5 * vocabulary * hidden,
    )
    return Transformer(**{**vars(plain), "extra_active": parameters - plain.block_dense})
