"""Loss on text that is not trained on: each sequence once, the same bits on any number of replicas."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from lanewise.data.dataset import Slot
from lanewise.models.base import LanguageModel
from lanewise.parallel.mesh import Mesh


@torch.no_grad()
def evaluate(model: LanguageModel, batch: Callable[[int], Slot], batches: int, mesh: Mesh) -> tuple[float, int]:
    """(mean next-token loss in nats, valid labels) over `batch(0) ... batch(batches - 1)`.

    Batches have one fixed shape, the last one padded with ignored labels. Each batch's sum has its own place in one
    fp64 vector, so who computed it does not matter. Without a valid label the loss is NaN.
    """
    device, group = mesh.world.device, mesh.world.group
    sums = torch.zeros(2, batches, dtype=torch.float64, device=device)
    training = model.training
    model.eval()
    for i in range(mesh.replica, batches, mesh.replicas):
        slot = batch(i)
        tokens_BT = torch.from_numpy(slot.tokens_BT).to(device)
        labels_BT = torch.from_numpy(slot.labels_BT).to(device)
        nll = model(tokens_BT, labels_BT).nll_sum
        if mesh.speaks:
            sums[0, i], sums[1, i] = nll, slot.valid
    model.train(training)
    if group is not None:
        dist.all_reduce(sums, group=group)
    nll, valid = sums.sum(dim=1).tolist()
    return nll / valid if valid else float("nan"), int(valid)
