"""The stages of a pipeline that a rank has: each a model of its own over the modules of the rank's part."""

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import nn

from lanewise.config import Run
from lanewise.lanes.flat import Use
from lanewise.models.base import LanguageModel
from lanewise.models.build import build
from lanewise.models.deepseek import DeepSeek
from lanewise.models.linear import ApartHead, TiedHead
from lanewise.parallel.mesh import Mesh
from lanewise.parallel.stages import cut, dealt


def here(run: Run, mesh: Mesh) -> list[int]:
    """The numbers of this rank's stages, in order."""
    return dealt(run.layout, mesh.size["pp"])[mesh.at["pp"]] if mesh.size["pp"] > 1 else [0]


def parts(run: Run, mesh: Mesh, model: LanguageModel) -> dict[int, LanguageModel]:
    """By number, this rank's stages: models that hold those modules of `model`, the very same, that are theirs."""
    mine, cuts = here(run, mesh), cut(run, mesh.size["pp"])
    if len(mine) == 1:
        return {mine[0]: model}
    found = {}
    for stage in mine:
        with torch.device("meta"):
            part = build(run.model)
        keep(part, list(cuts[stage]), stage == 0, stage == len(cuts) - 1)
        for name, child in list(part.named_children()):
            ours = getattr(model, name)
            if isinstance(child, nn.ModuleDict):
                child.update({key: ours[key] for key in child})
            else:
                setattr(part, name, ours)
        if part.ends and isinstance(part.head, ApartHead):
            del part.embed  # it is another stage's
        part.seams, part.whole = model.seams, model.table()
        found[stage] = part
    return found


def keep(model: LanguageModel, layers: list[int], starts: bool, ends: bool) -> None:
    """Drop all other layers, and what belongs to the ends of the model if they are not here. Tied embeddings stay at
    both ends."""
    model.whole = model.table()
    model.starts, model.ends = starts, ends
    tied = isinstance(model.head, TiedHead)
    for index in [index for index in model.layers if int(index) not in layers]:
        del model.layers[index]
    if not starts and not (tied and ends):
        del model.embed
    if not ends:
        del model.norm, model.head
        if isinstance(model, DeepSeek):
            model.mtp.clear()


def uses(stages: Mapping[int, LanguageModel]) -> dict[str, list[Use]]:
    """By parameter, where the stages that are here read it: tied embeddings at both ends."""
    found = defaultdict(list)
    for stage, part in stages.items():
        names = {alias: spec.name for spec in part.table() for alias in spec.aliases}
        for name, leaf in part.named_parameters():
            found[names.get(name, name)].append(Use(stage, leaf))
    return found
