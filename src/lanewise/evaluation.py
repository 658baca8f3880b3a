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

    Batches have one fixed shape, the last one padded with ignored labels. Each sum over a batch, or over a rank's part
    of one, has its own place in an fp64 tensor, so who computed it does not matter. Without valid labels: NaN.
    """
    device, group = mesh.world.device, mesh.world.group
    losses = torch.zeros(batches, mesh.parts, dtype=torch.float64, device=device)
    valid = torch.zeros_like(losses)
    training = model.training
    model.eval()
    for i in range(mesh.replica, batches, mesh.replicas):
        slot = batch(i)
        tokens_BT = torch.from_numpy(slot.tokens_BT).to(device)
        labels_BT = torch.from_numpy(slot.labels_BT).to(device)
        nll = model(tokens_BT, labels_BT).nll_sum
        if mesh.part is not None:
            losses[i, mesh.part] = nll
        if mesh.part == 0:
            valid[i, 0] = slot.valid
    model.train(training)
    sums = torch.stack((losses, valid))
    if group is not None:
        dist.all_reduce(sums, group=group)
    total, tokens = sums.flatten(1).sum(dim=1).tolist()
    return total / tokens if tokens else float("nan"), int(tokens)
