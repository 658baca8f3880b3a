"""From a run and a mesh to this rank's part of the model: the axes in one order, the same for every model."""

import torch

from lanewise.config import Run
from lanewise.models.base import LanguageModel
from lanewise.models.build import build
from lanewise.models.deepseek import DeepSeek
from lanewise.models.dense import Attention
from lanewise.models.linear import TiedHead
from lanewise.models.loss import Objective
from lanewise.parallel.boxes import box, cut_axes
from lanewise.parallel.fsdp import shard
from lanewise.parallel.mesh import Mesh
from lanewise.parallel.recompute import recompute
from lanewise.parallel.spread import Spread
from lanewise.parallel.stages import stages

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build_part(run: Run, mesh: Mesh) -> LanguageModel:
    """The model, its parameters being this rank's boxes, uninitialised. `table()` is still the whole model's.

    Nothing larger than this rank's part is ever allocated.
    """
    with torch.device("meta"):
        model = build(run.model)
    model.objective = Objective(run.train.label_smoothing, run.train.z_loss)
    if mesh.size["pp"] > 1:
        _keep_stage(model, mesh, stages(run.model, mesh.size["pp"])[mesh.at["pp"]])
    _cut_parameters(model, mesh)
    if run.layout.recompute != "none":
        for block in model.blocks():
            recompute(block, run.layout.recompute)
    if mesh.size["fsdp"] > 1:
        shard(model, mesh, PRECISIONS[run.train.precision], run.layout.offload)
    model.to_empty(device=mesh.world.device)
    for buffer in model.buffers():
        buffer.zero_()
    if mesh.layout.size > 1:
        seams = Spread(mesh, run.batch, run.model.vocab_size)
        for module in model.modules():
            if hasattr(module, "seams"):
                module.seams = seams  # type: ignore[assignment]
    return model


def _keep_stage(model: LanguageModel, mesh: Mesh, layers: range) -> None:
    """Drop the layers of other stages. Tied embeddings stay at both ends."""
    model.whole = model.table()
    model.starts, model.ends = mesh.at["pp"] == 0, mesh.at["pp"] == mesh.size["pp"] - 1
    tied = isinstance(model.head, TiedHead)
    for index in [index for index in model.layers if int(index) not in layers]:
        del model.layers[index]
    if not model.starts and not (tied and model.ends):
        del model.embed
    if not model.ends:
        del model.norm, model.head
        if isinstance(model, DeepSeek):
            model.mtp.clear()


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
