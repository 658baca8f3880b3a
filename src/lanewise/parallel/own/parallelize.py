"""`parallelize`: any module on any mix of pp, fsdp and tp, its own code unchanged."""

from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from lanewise.errors import UserError
from lanewise.parallel.layout import Layout
from lanewise.parallel.own.batches import Loss, next_token_loss
from lanewise.parallel.own.derive import observed
from lanewise.parallel.own.parallel import Parallel
from lanewise.parallel.own.place import Place
from lanewise.parallel.own.plan import Plan

REFUSED = {
    "cp": "attention in code that this project does not know cannot be told that a rank holds part of the sequence",
    "ep": "how experts are called is written in the module's own code; they stay whole, or are divided by fsdp",
}


def parallelize(
    module: nn.Module,
    layout: Layout | str,
    plan: Plan | None = None,
    *,
    example: Any = None,
    loss: Loss = next_token_loss,
    seed: int = 0,
    show: bool = True,
) -> Parallel:
    """Spread `module` over the processes of the default group, in place; what the layout leaves over are replicas.

    layout: as in `pp2.fsdp2.tp2`. plan: declared, or derived from the module and shown (rank 0 prints it).
    example: inputs of a small batch, a tensor or a dict of keyword arguments; default: a few token ids.
    loss(outputs, labels): a sum and the number of its terms; default: cross-entropy of the next token.
    seed: of dropout. Every rank calls it with the same weights. Raises UserError, with the rule, for what cannot work.
    """
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    for axis, why in REFUSED.items():
        if layout.degrees[axis] > 1:
            raise UserError(f"layout {layout}: {axis} is not for modules of your own: {why}")
    place = Place(layout)
    _same_everywhere(module)
    settings: Any = getattr(module, "config", None)
    if getattr(settings, "use_cache", False):
        settings.use_cache = False  # keys and values kept for generation: of no use in training
    completed, flow = observed(module, layout, example, plan)
    if layout.pp > 1 and completed.uncut:
        raise UserError(f"layout {layout}: pp cannot cut this module: {completed.uncut}")
    if layout.pp > completed.depth:
        raise UserError(
            f"layout {layout}: pp is more than the {completed.depth} blocks of {completed.blocks}: each stage needs one"
        )
    if show and place.rank == 0:
        print(completed)
    return Parallel(module, completed, flow.chain, place, loss, seed)


def _same_everywhere(module: nn.Module) -> None:
    if not dist.is_initialized():
        return
    digest = xxhash.xxh3_64()
    for _, parameter in sorted(module.named_parameters()):
        digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    for rank, other in enumerate(digests):
        if other != digests[0]:
            raise UserError(
                f"the module's weights differ on ranks 0 and {rank}: set the same seed before building it, "
                f"or load the same checkpoint"
            )
