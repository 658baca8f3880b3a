"""This rank's part of a copy of the model, with all that keeps it in step: buckets, reducer, optimizer, voter."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lanewise.checkpoint.pieces import Entry, State
from lanewise.config import Run
from lanewise.data.dataset import Slot
from lanewise.evaluation import inputs, losses
from lanewise.lanes.adamw import ShardedAdamW
from lanewise.lanes.flat import Bucket, Place, lay_out
from lanewise.lanes.keys import slot_key
from lanewise.lanes.reducer import Reducer
from lanewise.lanes.vote import Ballot, Verdict, Voter
from lanewise.models.base import LanguageModel
from lanewise.models.init import initial
from lanewise.parallel import boxes
from lanewise.parallel.build import PRECISIONS
from lanewise.parallel.layout import WORK
from lanewise.parallel.mesh import Mesh
from lanewise.parallel.parts import uses
from lanewise.parallel.pipeline import Microbatch, Pipeline


class Replica:
    """Takes this rank's part of the model (`parallel.build`), and gives it its keyed initial weights, unless
    `initialise` is False: its state comes from elsewhere, and is zero till then."""

    def __init__(self, run: Run, model: LanguageModel, mesh: Mesh, initialise: bool = True) -> None:
        self.run, self.model, self.mesh = run, model, mesh
        table = self.model.table()
        self.parameter_names = {name for spec in table for name in (spec.name, *spec.aliases)}
        dtype = PRECISIONS[run.train.precision]
        stages = model.stages or {0: model}
        self.buckets = lay_out(
            list(self.model.named_parameters()),
            table,
            lambda spec: boxes.held(spec, mesh),
            torch.float32 if mesh.size["fsdp"] > 1 else dtype,
            run.layout.bucket_mb,
            uses(stages),
        )
        self.reducer = Reducer(
            self.buckets, run.batch.lanes, run.batch.microbatches, mesh.replicas, mesh.replica, run.layout.zero == 2
        )
        self.optimizer = ShardedAdamW(run.optimizer, self.buckets, run.layout.zero)
        numels = {spec.name: boxes.numels(spec, mesh.size) for spec in table}
        self.voter = Voter(self.buckets, numels, mesh.world.group)
        self.pipeline = Pipeline(stages, mesh, run, self.reducer, dtype) if mesh.size["pp"] > 1 else None
        shape = run.batch.lanes, run.batch.microbatches, mesh.parts
        losses = torch.zeros(shape, dtype=torch.float64, device=mesh.world.device)
        self.slot_losses = losses if run.data.record_losses else None
        if initialise:
            self._initialise(run.train.seed)
        if run.train.compile:
            for module in self.model.blocks():
                module.compile()

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        """Weights keyed by (seed, name, block of rows): equal on every copy without a word between them."""
        for part in self.optimizer.parts:
            for place in part.bucket.places:
                values = _initial(place, seed).to(part.master.device)
                part.bucket.weights[place.start : place.stop] = values
                a, b = max(part.start, place.start), min(part.stop, place.stop)
                if a < b:
                    part.master[a - part.start : b - part.start] = values[a - place.start : b - place.start]

    def compute(self, step: int, slot: Callable[[int, int, int], Slot], enter: Callable[[str], None]) -> Ballot:
        """Forward and backward of this replica's lanes, in order; changes nothing but gradient buffers.

        slot(step, lane, k) yields a microbatch; enter(phase) is told what comes next.
        """
        enter("data")
        slots = ((lane, k) for lane in self.reducer.mine for k in range(self.run.batch.microbatches))
        microbatches = (self._microbatch(slot(step, lane, k), step, lane, k) for lane, k in slots)
        ballot = Ballot(self.run.batch.lanes, self.mesh.world.device, self.mesh.parts, self.mesh.part)

        def report(microbatch: Microbatch, nll_sum: Tensor, counts: Tensor | None) -> None:
            ballot.add(microbatch.lane, nll_sum, microbatch.valid, counts)
            if self.slot_losses is not None and self.mesh.part is not None:
                self.slot_losses[microbatch.lane, microbatch.k, self.mesh.part] += nll_sum.detach().double()

        if self.slot_losses is not None:
            self.slot_losses.zero_()
        self.model.train()
        if self.pipeline is not None:
            enter("forward")
            self.pipeline.train(list(microbatches), report)
            return ballot
        for microbatch in microbatches:
            self.reducer.begin(microbatch.lane, microbatch.k)
            enter("forward")
            output = self.model(microbatch.tokens_BT, microbatch.labels_BT, microbatch.key, microbatch.starts_BT)
            enter("backward")
            output.loss_sum.backward()
            self.reducer.end()
            report(microbatch, output.nll_sum, output.expert_counts)
            enter("data")
        return ballot

    def losses_by_slot(self) -> list[list[float]]:
        """[lane][k]: the summed loss of each microbatch of the last step. All ranks take part."""
        assert self.slot_losses is not None
        if self.mesh.world.group is not None:
            dist.all_reduce(self.slot_losses, group=self.mesh.world.group)
        return self.slot_losses.sum(dim=-1).tolist()

    def losses(self, slots: Iterable[Slot]) -> Iterable[Tensor]:
        """The summed next-token loss of each, forward only (in a pipeline: zero but in the last stage)."""
        if self.pipeline is None:
            return losses(self.model, slots, self.mesh.world.device)
        found: list[Tensor] = []
        microbatches = [self._microbatch(slot) for slot in slots]
        self.pipeline.evaluate(microbatches, lambda microbatch, nll_sum, counts: found.append(nll_sum))
        return found

    def _microbatch(self, slot: Slot, step: int = 0, lane: int = 0, k: int = 0) -> Microbatch:
        device = self.mesh.world.device
        key = torch.tensor(slot_key(self.run.train.seed, step, lane, k), device=device)
        return Microbatch(lane, k, valid=slot.valid, key=key, **inputs(slot, device))

    def commit(self, verdict: Verdict, chunks: Sequence[Tensor], lr: float, update: int) -> None:
        """Update number `update`. Gradients are sums over tokens: one division here makes them means, and clips."""
        clip = self.run.optimizer.clip
        shrink = min(1.0, clip / (verdict.gradient_norm + 1e-6)) if clip else 1.0
        self.optimizer.step(chunks, verdict.tokens / shrink, lr, update)
        if verdict.counts is not None:
            self.model.balance(verdict.counts)

    def state(self, share: bool) -> State:
        """The run's tensors as pieces of global tensors: masters and moments by parameter, buffers by name.

        share=True: each element once among all ranks, for writing. False: all that this process holds, for reading.
        """
        state: dict[str, Entry] = {}
        for part in self.optimizer.parts:
            own = part.bucket.own if share else slice(part.start, part.stop)
            for kind, tensor in part.tensors().items():
                held = tensor[own.start - part.start : own.stop - part.start]
                state |= {f"{kind}/{name}": entry for name, entry in entries(part.bucket, own.start, held)}
        for name, buffer in self.model.state_dict().items():
            if name not in self.parameter_names:
                whole = Entry.whole(buffer)
                mine = not share or (self.mesh.replica == 0 and self.mesh.position((*WORK, "tp"))[0] == 0)
                state[f"buffer/{name}"] = whole if mine else Entry(whole.shape, whole.dtype)
        return state

    def loaded(self) -> None:
        """After new values were read into `state(share=False)`: bring the computing weights up to date."""
        self.optimizer.publish()


def entries(bucket: Bucket, start: int, held: Tensor) -> Iterator[tuple[str, Entry]]:
    """By parameter, what the range [start, start + len(held)) of a bucket holds of it."""
    for place in bucket.places:
        a = min(max(start, place.start), place.stop)
        b = max(min(start + len(held), place.stop), a)
        values = held[a - start : b - start] if a < b else held[:0]
        entry = Entry.flat(place.shape, a - place.start, values)
        yield place.spec.name, entry.inside(place.spec.shape, place.held.offsets)


def _initial(place: Place, seed: int) -> Tensor:
    """The keyed initial values of this rank's box of a parameter, flat, in fp32."""
    first, *offsets = place.held.offsets
    rows, *shape = place.shape
    values = initial(place.spec, seed, slice(first, first + rows))
    for dim, (offset, size) in enumerate(zip(offsets, shape, strict=True), start=1):
        values = values.narrow(dim, offset, size)
    return values.flatten()
