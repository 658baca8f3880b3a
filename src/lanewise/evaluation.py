"""Loss on text that is not trained on: each sequence once, the same bits on any number of replicas."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from lanewise.data.dataset import Slot
from lanewise.elastic.world import World
from lanewise.models.base import LanguageModel


@torch.no_grad()
def evaluate(model: LanguageModel, batch: Callable[[int], Slot], batches: int, world: World) -> tuple[float, int]:
    """(mean next-token loss in nats, valid labels) over `batch(0) ... batch(batches - 1)`.

    Batches have one fixed shape, the last one padded with ignored labels. Each batch's sum has its own place in one
    fp64 vector, so who computed it does not matter. Without a valid label the loss is NaN.
    """
    sums = torch.zeros(2, batches, dtype=torch.float64, device=world.device)
    training = model.training
    model.eval()
    for i in range(world.rank, batches, world.size):
        slot = batch(i)
        tokens_BT = torch.from_numpy(slot.tokens_BT).to(world.device)
        labels_BT = torch.from_numpy(slot.labels_BT).to(world.device)
        sums[0, i] = model(tokens_BT, labels_BT).nll_sum
        sums[1, i] = slot.valid
    model.train(training)
    if world.group is not None:
        dist.all_reduce(sums, group=world.group)
    nll, valid = sums.sum(dim=1).tolist()
    return nll / valid if valid else float("nan"), int(valid)
