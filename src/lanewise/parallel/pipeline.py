"""Pipeline parallel: each rank has some stages of the layers, microbatches pass through, torch's schedules say when.

Every stage reads its tokens and labels from the data itself, a pure function of the slot: only hidden states travel.
In every stage the weights get their gradients in the order of the microbatches, so they add up as without a pipeline.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from lanewise.config import Run
from lanewise.lanes.reducer import Reducer
from lanewise.models.base import LanguageModel
from lanewise.models.spec import Output
from lanewise.parallel.fsdp import drop_gathered
from lanewise.parallel.mesh import Mesh
from lanewise.parallel.stages import SINGLE, cut, recomputes, turns_back

CLASSES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "interleaved-zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}

# Where a rank fails, or sees that another has, torch logs the whole schedule: hundreds of lines above the reason.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)


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


class Event(NamedTuple):
    """What a rank of the pipeline did when. action: F, a forward; B, a backward, or its halves: I, down to the inputs,
    and W, the weights. microbatch: its number in the schedule. start, end: in seconds of `time.perf_counter`."""

    rank: int
    action: str
    stage: int
    microbatch: int
    start: float
    end: float


class Pipeline:
    """stages: those of this rank, by number. recorder: is told of every forward and backward, if set."""

    recorder: Callable[[Event], None] | None = None

    def __init__(
        self, stages: Mapping[int, LanguageModel], mesh: Mesh, run: Run, reducer: Reducer, dtype: torch.dtype
    ) -> None:
        self.stages, self.mesh, self.run, self.reducer = stages, mesh, run, reducer
        self.count = len(cut(run, mesh.size["pp"]))
        batch, layout = run.batch, mesh.layout
        tokens = batch.sequence_length // layout.cp // layout.tp
        state = torch.empty(
            batch.size // layout.fsdp // layout.ep, tokens, run.model.hidden, dtype=dtype, device="meta"
        ).requires_grad_()
        self.states = (state,) * next(iter(stages.values())).handed_on
        self.schedules: dict[tuple[str, int, bool], Any] = {}  # torch's: name, microbatches, with backward
        self.microbatches: Sequence[Microbatch] = ()  # of this step, as the schedule counts them
        self.made: list[tuple[Tensor, Tensor | None]] = []  # of each: summed loss, experts' counts

    def train(self, microbatches: Sequence[Microbatch], report: Report) -> None:
        """Forward and backward of all of them; then report(microbatch, summed loss of its labels, experts' counts) of
        each, in order; the loss is that of the last stage, zero where it is not."""
        name = self.run.layout.schedule
        if name == "1f1b" and len(microbatches) < self.mesh.size["pp"]:
            name = "gpipe"  # there is no steady state
        self._run(name, microbatches, report, train=True)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Microbatch], report: Report) -> None:
        """Forward only, by schedules that take any number of microbatches."""
        settings = self.run.layout
        name = "gpipe" if settings.schedule in SINGLE else "zbv" if turns_back(settings) else "looped-bfs"
        if microbatches:
            self._run(name, microbatches, report, train=False)

    def _run(self, name: str, microbatches: Sequence[Microbatch], report: Report, train: bool) -> None:
        for part in self.stages.values():
            part.train(train)
        # Looped BFS goes backward from the last microbatch to the first, so it is given them the other way round.
        order = -1 if name == "looped-bfs" else 1
        self.microbatches = microbatches[::order]
        count = len(microbatches)
        numbers = torch.arange(count)  # each stage is told which microbatch it is to look up
        zero = torch.zeros((), device=self.mesh.world.device)
        self.made = [(zero, None)] * count
        if (name, count, train) not in self.schedules:
            self.schedules[name, count, train] = self._schedule(name, count, train)
        target = numbers if any(part.ends for part in self.stages.values()) else None
        step = self.schedules[name, count, train].step
        step(number=numbers, target=target, return_outputs=False)
        for part in self.stages.values():
            drop_gathered(part)
        for microbatch, made in zip(microbatches, self.made[::order], strict=True):
            report(microbatch, *made)

    def _schedule(self, name: str, count: int, train: bool) -> Any:
        kind = get_schedule_class(CLASSES[name])
        stages = [_Stage(self, number, part) for number, part in self.stages.items()]
        loss = {"loss_fn": lambda loss, _: loss, "scale_grads": False} if train else {}
        return kind(stages[0] if name in SINGLE else stages, count, **loss)

    def made_by(self, part: LanguageModel, states: Sequence[Tensor], number: int) -> Tensor | tuple[Tensor, ...]:
        """What a stage makes of a microbatch: the loss to differentiate, or the states it hands on."""
        microbatch = self.microbatches[number]
        made = part.part(states, microbatch.tokens_BT, microbatch.labels_BT, microbatch.key, microbatch.starts_BT)
        nll_sum, counts = self.made[number]
        if made.expert_counts is not None:
            counts = made.expert_counts if counts is None else counts + made.expert_counts
        if isinstance(made, Output):
            self.made[number] = made.nll_sum, counts
            return made.loss_sum
        self.made[number] = nll_sum, counts
        return made.states


class _Layers(nn.Module):
    """What torch's stage calls."""

    def __init__(self, pipeline: Pipeline, part: LanguageModel) -> None:
        super().__init__()
        self.pipeline, self.part = pipeline, part

    def forward(self, *states: Tensor, number: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.pipeline.made_by(self.part, states, int(number))


class _Stage(PipelineStage):
    """Tells the reducer which slot the gradients of weights belong to, and the recorder what happens when.

    Zero-bubble schedules split a backward in two. Where that would cost more than it gains, the first half is all of
    it: halves of a recomputed block would each recompute it, a compiled one cannot be split, and FSDP takes a block's
    gradients when that of its input is there.
    """

    def __init__(self, pipeline: Pipeline, number: int, part: LanguageModel) -> None:
        mesh, states = pipeline.mesh, pipeline.states
        loss = torch.empty((), dtype=torch.float32, device="meta").requires_grad_()
        super().__init__(
            _Layers(pipeline, part),
            number,
            pipeline.count,
            mesh.world.device,
            input_args=() if part.starts else states,
            output_args=(loss,) if part.ends else states,
            group=mesh.group(("pp",)),
        )
        self.pipeline = pipeline
        whole = recomputes(pipeline.run.layout, number) or pipeline.run.train.compile or mesh.size["fsdp"] > 1
        self.splits = not whole

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **named: Any) -> Any:
        with self._recorded("F", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *arguments, **named)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not self.has_backward:
            return
        with self._recorded("B" if full_backward else "I", bwd_chunk_id):
            if full_backward or not self.splits:
                with self._slot(bwd_chunk_id):
                    super().backward_one_chunk(bwd_chunk_id, loss)
            else:
                super().backward_one_chunk(bwd_chunk_id, loss, full_backward=False)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if self.has_backward and self.splits:
            with self._recorded("W", bwd_chunk_id), self._slot(bwd_chunk_id):
                super().backward_weight_one_chunk(bwd_chunk_id)

    # Between two stages of one rank torch hands over gradients even where there is no backward.

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    @contextmanager
    def _slot(self, number: int) -> Iterator[None]:
        microbatch, reducer = self.pipeline.microbatches[number], self.pipeline.reducer
        reducer.begin(microbatch.lane, microbatch.k, self.stage_index)
        yield
        reducer.end(self.stage_index)

    @contextmanager
    def _recorded(self, action: str, number: int) -> Iterator[None]:
        started = time.perf_counter()
        yield
        if (recorder := self.pipeline.recorder) is not None:
            rank = self.pipeline.mesh.at["pp"]
            recorder(Event(rank, action, self.stage_index, number, started, time.perf_counter()))
