"""From a run and a mesh to this rank's part of the model: the axes in one order, the same for every model."""

import torch

from lanewise.config import Run
from lanewise.models.base import LanguageModel
from lanewise.models.build import build
from lanewise.models.dense import Attention
from lanewise.models.freeze import freeze
from lanewise.models.linear import ApartHead, TiedHead
from lanewise.models.loss import Objective
from lanewise.parallel.boxes import box, cut_axes
from lanewise.parallel.fsdp import shard
from lanewise.parallel.mesh import Mesh
from lanewise.parallel.parts import here, keep, parts
from lanewise.parallel.recompute import recompute
from lanewise.parallel.spread import Spread
from lanewise.parallel.stages import cut, recomputes

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build_part(run: Run, mesh: Mesh) -> LanguageModel:
    """The model, its parameters being this rank's boxes, uninitialised. `table()` is still the whole model's.

    Nothing larger than this rank's part is ever allocated.
    """
    with torch.device("meta"):
        model = build(run.model)
    model.objective = Objective(run.train.label_smoothing, run.train.z_loss)
    if mesh.size["pp"] > 1:
        mine, cuts = here(run, mesh), cut(run, mesh.size["pp"])
        keep(model, [index for stage in mine for index in cuts[stage]], 0 in mine, len(cuts) - 1 in mine)
    _cut_parameters(model, mesh)
    freeze(model, model.table(), run.train.freeze)
    if model.starts and model.ends and isinstance(model.head, TiedHead):
        model.head = ApartHead(model.embed)
    model.stages = parts(run, mesh, model)
    for stage, part in model.stages.items():
        if recomputes(run.layout, stage):
            for block in part.blocks():
                recompute(block, run.layout.recompute)
        if mesh.size["fsdp"] > 1:
            shard(part, mesh, PRECISIONS[run.train.precision], run.layout.offload)
        part.to_empty(device=mesh.world.device)
    for buffer in model.buffers():
        buffer.zero_()
    if mesh.layout.size > 1:
        seams = Spread(mesh, run.batch, run.model.vocab_size)
        for module in (module for part in model.stages.values() for module in part.modules()):
            if hasattr(module, "seams"):
                module.seams = seams  # type: ignore[assignment]
    return model


def _cut_parameters(model: LanguageModel, mesh: Mesh) -> None:
    here = {name for name, _ in model.named_parameters()}
    for spec in model.table():
        if spec.name not in here:
            continue
        path, _, name = spec.name.rpartition(".")
        module = model.get_submodule(path)
        if cut_axes(spec, mesh.size):
            shape = box(spec, mesh.size, mesh.at).shape
            setattr(module, name, torch.nn.Parameter(torch.empty(shape, device="meta")))
    for module in model.modules():
        if isinstance(module, Attention):
            _serve(module, mesh)


def _serve(attention: Attention, mesh: Mesh) -> None:
    """Where all ranks hold all key/value heads, tell each which of them its queries need."""
    q, k = attention.q.specs["weight"], attention.k.specs["weight"]
    if cut_axes(q, mesh.size) and not cut_axes(k, mesh.size):
        mine = box(q, mesh.size, mesh.at)
        neighbours = q.shape[0] // k.shape[0]
        first = mine.offsets[0] // attention.width
        attention.serving = [head // neighbours for head in range(first, first + mine.shape[0] // attention.width)]
