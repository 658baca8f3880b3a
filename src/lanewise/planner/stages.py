"""How our pipelines cut a model, in closed form for arrays of candidates (`parallel.stages` does one, exactly)."""

import numpy as np

from lanewise.planner.choice import Number
from lanewise.planner.model import Transformer


def cut(model: Transformer, count: Number) -> tuple[Number, Number, Number]:
    """(blocks of the fullest stage but the last, blocks of the last, how far the costliest exceeds the mean cost): the
    evenest cut, with the head and what predicts ahead in the last of `count` stages."""
    one = model.block_flops(0) / 2  # weights that a token meets in a block
    end = model.ahead + model.embedding * (1 + model.ahead) / one
    shape = np.shape(count)
    count, which = np.unique(np.asarray(count, dtype=float), return_inverse=True)  # candidates share few of them
    last = np.arange(1.0, model.layers + 1)[:, None]  # layers of the last stage
    others = np.ceil((model.layers - last) / np.maximum(count - 1, 1))
    cost = np.maximum(others, last + end)
    best = np.argmin(cost, axis=0)
    columns = np.arange(len(count))
    uneven = cost[best, columns] * count / (model.layers + end) - 1
    alone = count == 1
    most = np.where(alone, model.blocks, others[best, columns])
    ends = np.where(alone, model.blocks, last[best, 0] + model.ahead)
    found = (most, ends, np.where(alone, 0.0, uneven))
    most, ends, uneven = (part[which].reshape(shape) for part in found)
    return most, ends, uneven
