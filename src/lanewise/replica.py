"""One copy of the model with all that keeps it equal to the others: buckets, reducer, optimizer, voter."""

import torch
import torch.distributed as dist

from lanewise.checkpoint.pieces import Entry, State
from lanewise.config import Run
from lanewise.lanes.adamw import ShardedAdamW
from lanewise.lanes.flat import lay_out
from lanewise.lanes.reducer import Reducer
from lanewise.lanes.vote import Voter
from lanewise.models.base import LanguageModel
from lanewise.models.init import initial

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Replica:
    """Takes a freshly built `model` (weights uninitialised), gives it its keyed initial weights and its reducer.

    group: the replicas' process group; None for one replica alone.
    """

    def __init__(
        self,
        run: Run,
        model: LanguageModel,
        device: torch.device,
        group: dist.ProcessGroup | None,
        replicas: int,
        replica: int,
    ) -> None:
        self.model = model.to(device)
        self.group, self.replicas, self.replica = group, replicas, replica
        named = list(self.model.named_parameters())
        self.parameter_names = {name for spec in self.model.table() for name in (spec.name, *spec.aliases)}
        dtype = PRECISIONS[run.train.precision]
        self.buckets = lay_out(named, model.table(), dtype, run.layout.bucket_mb, replicas, replica)
        self.reducer = Reducer(
            self.buckets, run.batch.lanes, run.batch.microbatches, group, replicas, replica, run.layout.zero == 2
        )
        self.optimizer = ShardedAdamW(run.optimizer, self.buckets, group, run.layout.zero)
        self.voter = Voter(self.buckets, group)
        self._initialise(run.train.seed)
        if run.train.compile:
            for module in self.model.blocks():
                module.compile()

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        """Weights keyed by (seed, name, block of rows): equal on every replica without a word between them."""
        for part in self.optimizer.parts:
            for place in part.bucket.places:
                values = initial(place.spec, seed).flatten().to(part.master.device)
                part.bucket.weights[place.start : place.stop] = values
                a, b = max(part.start, place.start), min(part.stop, place.stop)
                if a < b:
                    part.master[a - part.start : b - part.start] = values[a - place.start : b - place.start]

    def state(self, share: bool) -> State:
        """The run's tensors as pieces of global tensors: masters and moments by parameter, buffers by name.

        share=True: each element once among all replicas, for writing. False: all that this process holds, for reading.
        """
        state: dict[str, Entry] = {}
        for part in self.optimizer.parts:
            own = part.bucket.own
            start, stop = (own.start, own.stop) if share else (part.start, part.stop)
            for place in part.bucket.places:
                a = min(max(start, place.start), place.stop)
                b = max(min(stop, place.stop), a)
                for kind, tensor in part.tensors().items():
                    held = tensor[a - part.start : b - part.start] if a < b else tensor[:0]
                    state[f"{kind}/{place.spec.name}"] = Entry.flat(place.spec.shape, a - place.start, held)
        for name, buffer in self.model.state_dict().items():
            if name not in self.parameter_names:
                whole = Entry.whole(buffer)
                mine = not share or self.replica == 0
                state[f"buffer/{name}"] = whole if mine else Entry(whole.shape, whole.dtype)
        return state

    def loaded(self) -> None:
        """After new values were read into `state(share=False)`: bring the computing weights up to date."""
        self.optimizer.publish()
