"""The same model, small: every structure that a layout can get wrong stays, the sizes that only cost time go."""

import re
from typing import Any

from lanewise.config import DeepSeekModel, Run
from lanewise.model_settings import ModelBase
from lanewise.parallel.layout import Layout
from lanewise.parallel.stages import SINGLE, chunks

WIDTH = 64


def shrink(run: Run, layout: Layout, replicas: int = 1) -> Run:
    """Heads, groups, biases, ties, extra prediction depths and dropout are kept; so is whether sizes divide by tp.

    Layers, widths, experts, vocabulary, sequence, batch and lanes are cut down to what the layout needs; patterns of
    `train.freeze` that name a layer which is gone go with it.
    """
    model = run.model
    count = layout.pp * chunks(run.layout)
    sizes: dict[str, Any] = {
        "hidden": min(model.hidden, WIDTH + model.hidden % layout.tp),
        "ffn_hidden": min(model.ffn_hidden, WIDTH + model.ffn_hidden % layout.tp),
        "vocab_size": min(model.vocab_size or 259, 256 + model.vocab_size % layout.tp),
        "layers": min(model.layers, max(max(2 * layout.pp, count) + model.layers % layout.pp, 3)),
    }
    stages = tuple(min(layers, 2) for layers in run.layout.stages)
    if stages:
        sizes["layers"] = sum(stages)
    sizes |= _of_deepseek(model, layout) if isinstance(model, DeepSeekModel) else {"head_dim": 8}
    stride = 2 * layout.cp * layout.tp
    batch = run.batch.model_copy(
        update={
            "sequence_length": stride * -(-16 // stride),
            "lanes": min(run.batch.lanes, max(4, replicas)),
            # the other schedules have rules for their number
            "microbatches": min(run.batch.microbatches, 2) if run.layout.schedule in SINGLE else run.batch.microbatches,
            "size": layout.fsdp * layout.ep * min(run.batch.size, 2),
        }
    )
    cut = run.layout.model_copy(update={"stages": stages})
    named = ((pattern, re.match(r"layers\.(\d+)\.", pattern)) for pattern in run.train.freeze)
    freeze = tuple(pattern for pattern, layer in named if layer is None or int(layer[1]) < sizes["layers"])
    train = run.train.model_copy(update={"freeze": freeze})
    return run.model_copy(update={"model": _checked(model, sizes), "batch": batch, "layout": cut, "train": train})


def provable(settings: Run) -> Run:
    """fp32, and an epsilon that keeps Adam's update a smooth function of the gradient: with the usual one, a gradient
    that is zero but for rounding moves its weight by a whole learning rate in a random direction. For the same reason
    initial weights are not so small that the scores of all experts are nearly equal."""
    optimizer = settings.optimizer.model_copy(update={"eps": 1e-4})
    train = settings.train.model_copy(update={"precision": "fp32", "compile": False})
    model = settings.model.model_copy(update={"init_std": max(settings.model.init_std, settings.model.hidden**-0.5)})
    return settings.model_copy(update={"optimizer": optimizer, "train": train, "model": model})


def _of_deepseek(model: DeepSeekModel, layout: Layout) -> dict[str, Any]:
    groups = min(model.expert_groups, 4)
    group = min(model.experts // model.expert_groups, max(4, -(-2 * layout.ep // groups)))
    open_groups = min(model.groups_per_token, groups)
    return {
        "q_lora_rank": min(model.q_lora_rank, 24),
        "kv_lora_rank": min(model.kv_lora_rank, 16),
        "qk_nope_head_dim": min(model.qk_nope_head_dim, 8),
        "qk_rope_head_dim": min(model.qk_rope_head_dim, 4),
        "v_head_dim": min(model.v_head_dim, 8),
        "dense_layers": min(model.dense_layers, 1),
        "experts": groups * group,
        "expert_groups": groups,
        "groups_per_token": open_groups,
        "experts_per_token": min(model.experts_per_token, max(open_groups * group // 2, 1)),
        "expert_hidden": min(model.expert_hidden, 24 + model.expert_hidden % layout.tp),
    }


def _checked(model: ModelBase, sizes: dict[str, Any]) -> Any:
    return type(model).model_validate(model.model_dump() | sizes)
