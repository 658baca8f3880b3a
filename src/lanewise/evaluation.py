"""Loss on held-out text: each sequence once, the same bits on any number of replicas."""

import torch
import torch.distributed as dist
from torch import nn

from lanewise.config import Run
from lanewise.data.dataset import Dataset
from lanewise.elastic.world import World


@torch.no_grad()
def evaluate(model: nn.Module, dataset: Dataset, run: Run, world: World) -> float:
    """Mean next-token loss over the held-out sequences (at most `eval.sequences` of them).

    Batches have one fixed shape, the last one padded with ignored labels. Each batch's sum has its own place in one
    fp64 vector, so who computed it does not matter.
    """
    size, limit = run.batch.size, run.eval.sequences
    batches = dataset.held_batches(size, limit)
    sums = torch.zeros(2, batches, dtype=torch.float64, device=world.device)
    model.eval()
    for i in range(world.rank, batches, world.size):
        slot = dataset.held(i, size, limit)
        tokens_BT = torch.from_numpy(slot.tokens_BT).to(world.device)
        labels_BT = torch.from_numpy(slot.labels_BT).to(world.device)
        sums[0, i] = model(tokens_BT, labels_BT).nll_sum
        sums[1, i] = slot.valid
    model.train()
    if world.group is not None:
        dist.all_reduce(sums, group=world.group)
    return (sums[0].sum() / sums[1].sum()).item()
