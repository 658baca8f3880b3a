"""Pipeline parallel: each rank has a stage of the layers, microbatches pass through, torch's schedules say when.

Every stage reads its tokens and labels from the data itself, a pure function of the slot: only hidden states travel.
Backward passes run in the order of the microbatches in every stage, so gradients add up as without a pipeline.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from lanewise.config import Run
from lanewise.lanes.reducer import Reducer
from lanewise.models.base import LanguageModel
from lanewise.models.spec import Output
from lanewise.parallel.mesh import Mesh

Schedule = ScheduleGPipe | Schedule1F1B


class Microbatch(NamedTuple):
    """lane, k: its slot; tokens, labels: [B, T]; valid: labels that count; key: of its dropout, or None; starts: of
    the documents, where rows have several."""

    lane: int
    k: int
    tokens_BT: Tensor
    labels_BT: Tensor
    valid: int
    key: Tensor | None
    starts_BT: Tensor | None = None


Report = Callable[[Microbatch, Tensor, Tensor | None], None]


class Pipeline:
    def __init__(self, model: LanguageModel, mesh: Mesh, run: Run, reducer: Reducer, dtype: torch.dtype) -> None:
        self.layers = _Layers(model)
        self.mesh, self.run, self.reducer, self.dtype = mesh, run, reducer, dtype
        self.ends = model.ends
        batch, layout = run.batch, mesh.layout
        tokens = batch.sequence_length // layout.cp // layout.tp
        state = torch.empty(
            batch.size // layout.fsdp // layout.ep, tokens, run.model.hidden, dtype=dtype, device="meta"
        ).requires_grad_()
        self.states = (state,) * model.handed_on
        self.trains: dict[int, Schedule] = {}
        self.evaluates: dict[int, Schedule] = {}

    def train(self, microbatches: Sequence[Microbatch], report: Report) -> None:
        """Forward and backward of all of them. report(microbatch, summed loss of its labels, experts' counts) is called
        after each forward, in order; the loss is that of the last stage, zero in the others."""
        count = len(microbatches)
        if count not in self.trains:
            # With fewer microbatches than stages there is no steady state; the same bits either way.
            schedule = Schedule1F1B if count >= self.mesh.size["pp"] else ScheduleGPipe
            stage = _Stage(microbatches, self.reducer, *self._stage_arguments(), **self._shapes())
            self.trains[count] = schedule(stage, count, loss_fn=lambda loss, _: loss, scale_grads=False)
        self._run(self.trains[count].step, microbatches, report)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Microbatch], report: Report) -> None:
        """Forward only."""
        count = len(microbatches)
        if count and count not in self.evaluates:
            stage = PipelineStage(*self._stage_arguments(), **self._shapes())
            self.evaluates[count] = ScheduleGPipe(stage, count)
        if count:
            self._run(self.evaluates[count].eval, microbatches, report)

    def _run(self, step: Callable[..., Any], microbatches: Sequence[Microbatch], report: Report) -> None:
        self.layers.microbatches, self.layers.report = microbatches, report
        numbers = torch.arange(len(microbatches))  # each stage is told which microbatch it is to look up
        step(number=numbers, target=numbers if self.ends else None, return_outputs=False)

    def _stage_arguments(self) -> tuple[Any, ...]:
        return self.layers, self.mesh.at["pp"], self.mesh.size["pp"], self.mesh.world.device

    def _shapes(self) -> dict[str, Any]:
        loss = torch.empty((), dtype=torch.float32, device="meta").requires_grad_()
        return {
            "input_args": () if self.mesh.at["pp"] == 0 else self.states,
            "output_args": (loss,) if self.ends else self.states,
            "group": self.mesh.group(("pp",)),
        }


class _Layers(nn.Module):
    """What torch's stage calls: the model's part, with the microbatch looked up by its number."""

    microbatches: Sequence[Microbatch]
    report: Report

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, *states: Tensor, number: Tensor) -> Tensor | tuple[Tensor, ...]:
        microbatch = self.microbatches[int(number)]
        made = self.model.part(states, microbatch.tokens_BT, microbatch.labels_BT, microbatch.key, microbatch.starts_BT)
        if isinstance(made, Output):
            self.report(microbatch, made.nll_sum, made.expert_counts)
            return made.loss_sum
        self.report(microbatch, microbatch.labels_BT.new_zeros((), dtype=torch.float32), made.expert_counts)
        return made.states


class _Stage(PipelineStage):
    """Tells the reducer which slot a backward pass belongs to."""

    def __init__(self, microbatches: Sequence[Microbatch], reducer: Reducer, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.slots = [(m.lane, m.k) for m in microbatches]
        self.reducer = reducer

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **named: Any) -> None:
        self.reducer.begin(*self.slots[bwd_chunk_id])
        super().backward_one_chunk(bwd_chunk_id, *arguments, **named)
        self.reducer.end()
