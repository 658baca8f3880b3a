"""Which layers each stage of a pipeline gets. No torch is needed."""

from functools import cache
from itertools import accumulate

from lanewise.config import DeepSeekModel, DenseModel


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
