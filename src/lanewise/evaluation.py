"""Loss on text that is not trained on: each sequence once, the same bits on any number of replicas."""

from collections.abc import Callable, Iterable, Iterator
from itertools import tee

import torch
import torch.distributed as dist
from torch import Tensor

from lanewise.data.dataset import Slot
from lanewise.models.base import LanguageModel
from lanewise.parallel.mesh import Mesh


@torch.no_grad()
def evaluate(
    model: LanguageModel,
    losses: Callable[[Iterable[Slot]], Iterable[Tensor]],
    batch: Callable[[int], Slot],
    batches: int,
    mesh: Mesh,
) -> tuple[float, int]:
    """(mean next-token loss in nats, valid labels) over `batch(0) ... batch(batches - 1)`.

    losses: the model's summed loss of each of some batches, or of this rank's part of them.
    Batches have one fixed shape, the last one padded with ignored labels. Each sum over a batch, or over a rank's part
    of one, has its own place in an fp64 tensor, so who computed it does not matter. Without valid labels: NaN.
    """
    sums = torch.zeros(2, batches, mesh.parts, dtype=torch.float64, device=mesh.world.device)
    numbers = range(mesh.replica, batches, mesh.replicas)
    slots, given = tee(batch(i) for i in numbers)
    training = model.training
    model.eval()
    for i, slot, loss in zip(numbers, slots, losses(given), strict=True):
        if mesh.part is not None:
            sums[0, i, mesh.part] = loss
        if mesh.part == 0:
            sums[1, i, 0] = slot.valid
    model.train(training)
    if mesh.world.group is not None:
        dist.all_reduce(sums, group=mesh.world.group)
    nll, valid = sums.flatten(1).sum(dim=1).tolist()
    return nll / valid if valid else float("nan"), int(valid)


def losses(model: LanguageModel, slots: Iterable[Slot], device: torch.device) -> Iterator[Tensor]:
    """The summed next-token loss of each slot."""
    for slot in slots:
        yield model(**inputs(slot, device)).nll_sum


def inputs(slot: Slot, device: torch.device) -> dict[str, Tensor]:
    """What a model is given of a slot. Documents' starts stay on the CPU, which reads them."""
    given = {"tokens_BT": torch.from_numpy(slot.tokens_BT), "labels_BT": torch.from_numpy(slot.labels_BT)}
    given = {name: tensor.to(device) for name, tensor in given.items()}
    return given if slot.starts_BT is None else given | {"starts_BT": torch.from_numpy(slot.starts_BT)}
