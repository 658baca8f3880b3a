"""What the tests of this folder run on ranks, and the small models they run it with."""

import torch
import torch.distributed as dist

from lanewise.config import Run
from lanewise.elastic.world import World
from lanewise.parallel.layout import Layout
from lanewise.parallel.mesh import Mesh
from lanewise.parallel.stages import turns_back
from lanewise.parallel.trace import MadeUp, Trace, reference, trace

# fp32 sums in another order. A missing or doubled sum is off by 0.02 and more in the parameter it belongs to.
TOLERANCE = 2e-5

DENSE = {
    "preset": "tiny-dense",
    "family": "dense",
    "vocab_size": 67,
    "layers": 2,
    "hidden": 36,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "ffn_hidden": 50,
    "qk_norm": True,
    "qkv_bias": True,
}
DEEPSEEK = {
    "preset": "tiny",
    "family": "deepseek",
    "vocab_size": 67,
    "layers": 3,
    "hidden": 36,
    "heads": 4,
    "ffn_hidden": 50,
    "q_lora_rank": 12,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "experts": 8,
    "experts_per_token": 2,
    "expert_hidden": 14,
    "expert_groups": 2,
    "groups_per_token": 1,
    "balance_loss": 0.01,
    "mtp_layers": 1,
}


def make(model, lanes=2, microbatches=2, size=2, length=16, layout=None, train=None, **overrides):
    return Run.model_validate(
        {
            "model": model | overrides,
            "batch": {"lanes": lanes, "microbatches": microbatches, "size": size, "sequence_length": length},
            "layout": {"bucket_mb": 0.05} | (layout or {}),
            "train": train or {},
            "optimizer": {"clip": 0.05, "lr": 1e-3, "eps": 1e-5},
        }
    )


def traced(rank, size, run, axes):
    """The trace of `run` in the layout, on the first rank; None elsewhere."""
    world = World(rank, size, torch.device("cpu"), dist.group.WORLD if size > 1 else None)
    return trace(run, Mesh(world, Layout.parse(axes), turns_back(run.layout)), MadeUp(run))[0]


def all_traced(rank, size, runs, axes):
    """`traced` of several runs, one after the other in the same processes."""
    return [traced(rank, size, run, axes) for run in runs]


def alone(run):
    return reference(run, MadeUp(run))


def error(a, b):
    """Largest difference relative to the largest element: what a missing or doubled sum cannot hide below."""
    a, b = torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item()


def errors(found: Trace, right: Trace) -> dict[str, float]:
    assert found.gradients.keys() == right.gradients.keys()
    assert found.weights.keys() == right.weights.keys()
    out = {f"gradient {name}": error(g, right.gradients[name]) for name, g in found.gradients.items()}
    out |= {name: error(w, right.weights[name]) for name, w in found.weights.items()}
    out |= {f"loss {i}": error(a, b) for i, (a, b) in enumerate(zip(found.losses, right.losses, strict=True))}
    out |= {f"norm {i}": error(a, b) for i, (a, b) in enumerate(zip(found.norms, right.norms, strict=True))}
    return out | {"held out": error(found.held_out, right.held_out)}


def same_bits(a: Trace, b: Trace) -> bool:
    return (
        a.losses == b.losses
        and a.norms == b.norms
        and a.held_out == b.held_out
        and a.gradients.keys() == b.gradients.keys()
        and all(torch.equal(a.gradients[name], b.gradients[name]) for name in a.gradients)
        and all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)
    )
