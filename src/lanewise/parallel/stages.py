"""Which layers each stage of a pipeline gets, and which rank each stage. No torch is needed.

A looped pipeline deals its stages to the ranks in turn: 0, 1, 0, 1. One in the shape of a V turns back at the last
rank, 0, 1, 1, 0, so that the first rank has the first stage and the last.
"""

from functools import cache
from itertools import accumulate, pairwise

from lanewise.config import DeepSeekModel, DenseModel, Layout, Run

SINGLE = ("gpipe", "1f1b")  # schedules of one stage a rank
V = ("zbv", "dualpipev")


def chunks(settings: Layout) -> int:
    """Stages on each rank."""
    return settings.chunks or (1 if settings.schedule in SINGLE else 2)


def turns_back(settings: Layout) -> bool:
    return settings.schedule in V


def recomputes(settings: Layout, stage: int) -> bool:
    return settings.recompute != "none" and (not settings.recompute_stages or stage in settings.recompute_stages)


def dealt(settings: Layout, ranks: int) -> list[list[int]]:
    """The numbers of each rank's stages, in order."""
    if turns_back(settings):
        return [[rank, 2 * ranks - 1 - rank] for rank in range(ranks)]
    return [list(range(rank, chunks(settings) * ranks, ranks)) for rank in range(ranks)]


def cut(run: Run, ranks: int) -> list[range]:
    """The layers of each stage of a pipeline of `ranks`: by hand (`layout.stages`), or else by cost."""
    if ranks == 1:
        return [range(run.model.layers)]
    if run.layout.stages:
        return [range(a, b) for a, b in pairwise((0, *accumulate(run.layout.stages)))]
    return stages(run.model, chunks(run.layout) * ranks)


def stages(model: DenseModel | DeepSeekModel, count: int) -> list[range]:
    """The layers of each stage, at least one: the evenest cut (least sum of squares) by the weights that a token meets,
    with the output head and the extra prediction depths in the last stage."""
    costs = [layer_cost(model, index) for index in range(model.layers)]
    costs[-1] += end_cost(model)
    ends = [0, *accumulate(costs)]

    @cache
    def best(first: int, left: int) -> tuple[int, tuple[int, ...]]:
        """(sum of squared costs, where each begins) of the best cut of layers from `first` into `left` stages."""
        if left == 1:
            return (ends[-1] - ends[first]) ** 2, (first,)
        options = []
        for stop in range(first + 1, model.layers - left + 2):
            rest, begins = best(stop, left - 1)
            options.append((rest + (ends[stop] - ends[first]) ** 2, (first, *begins)))
        return min(options)

    _, begins = best(0, count)
    return [range(a, b) for a, b in zip(begins, (*begins[1:], model.layers), strict=True)]


def layer_cost(model: DenseModel | DeepSeekModel, index: int) -> int:
    """Weights that a token is multiplied with in a layer."""
    H = model.hidden
    if isinstance(model, DenseModel):
        return 2 * H * model.head_size * (model.heads + model.kv_heads) + 3 * H * model.ffn_hidden
    key = model.qk_nope_head_dim + model.qk_rope_head_dim
    query = (H * model.q_lora_rank if model.q_lora_rank else 0) + (model.q_lora_rank or H) * model.heads * key
    value = H * (model.kv_lora_rank + model.qk_rope_head_dim) + model.heads * model.v_head_dim * H
    value += model.kv_lora_rank * model.heads * (model.qk_nope_head_dim + model.v_head_dim)
    experts = (model.shared_experts + model.experts_per_token) * model.expert_hidden
    return query + value + 3 * H * (model.ffn_hidden if index < model.dense_layers else experts)


def end_cost(model: DenseModel | DeepSeekModel) -> int:
    """The same for what follows the last layer."""
    head = model.hidden * model.vocab_size
    if isinstance(model, DenseModel):
        return head
    depth = layer_cost(model, model.layers) + 2 * model.hidden**2 + head
    return head + model.mtp_layers * depth
