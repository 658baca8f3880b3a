"""A run on live data: one rank seals what comes, all train on what is sealed, and wait together for more.

Offsets are committed to the source when a checkpoint has been published of a step that read them. Whatever dies before
finds its place in what was sealed, which is never sealed again.
"""

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lanewise.data import tokenizer
from lanewise.data.live import Live, sealing
from lanewise.data.stores import StoreAway
from lanewise.data.streams import Stream
from lanewise.elastic.world import World
from lanewise.job import Job

if TYPE_CHECKING:
    from lanewise.stop import StopRequest

PAUSE = 0.2  # seconds between two looks for more
LAST = 5.0  # seconds the sealing thread has for its last commit


class LiveData:
    """What a trainer needs besides its dataset if that is a stream. All ranks have one; rank 0 seals."""

    def __init__(self, job: Job, world: World, stop: "StopRequest", say: Callable[[str], None]) -> None:
        run, folder = job.run, job.out / "stream"
        self.world, self.stop, self.say, self.source = world, stop, say, run.data.source
        self.sealing: Sealing | None = None
        if world.rank == 0:
            self.sealing = Sealing(
                sealing(run.data, run.batch, tokenizer.load(job.data), folder, f"lanewise.{run.name}")
            )
        self.dataset = Live(job.data, folder, run.data, run.batch, run.train.seed, run.train.epochs)

    def ready(self, step: int) -> bool:
        """True once every rank has the rows of a step. False: asked to stop before they came. Called by all ranks."""
        dataset, told = self.dataset, False
        while step > dataset.last:
            least = torch.tensor([dataset.look(), -self.stop.asked], dtype=torch.int64, device=self.world.device)
            if self.world.group is not None:
                dist.all_reduce(least, dist.ReduceOp.MIN, group=self.world.group)
            dataset.last, stop = least.tolist()
            if step > dataset.last:
                if stop:
                    return False
                if self.sealing is not None and self.sealing.trouble is not None:
                    raise self.sealing.trouble
                if not told:
                    rows, needed = dataset.sealed.rows, step * dataset.batch.sequences
                    self.say(f"step {step} waits for data: {self.source} gave {rows:,} of {needed:,} sequences so far")
                    told = True
                time.sleep(PAUSE)
        return True

    def published(self, step: int) -> None:
        """There is a checkpoint of this step."""
        if self.sealing is not None:
            self.sealing.upto = self.dataset.read_by(step)

    def close(self) -> None:
        if self.sealing is not None:
            self.sealing.close()


class Sealing:
    """The one thread that has to do with the source. `trouble`: why it seals nothing at the moment, or at all.

    A source that is away is asked again and again: while sealed rows last, training needs to know nothing of it.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream, self.upto, self.committed = stream, 0, 0
        self.trouble: Exception | None = None
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, name="seal", daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.over.set()
        self.thread.join(LAST)

    def _run(self) -> None:
        while True:
            over = self.over.is_set()  # what was published before is committed before the end
            try:
                self._commit()
                if over:
                    self.stream.close()
                    return
                self.stream.poll()
                self.trouble = None
            except StoreAway as away:
                self.trouble = away
            except Exception as error:
                self.trouble = error
                return
            self.over.wait(PAUSE)

    def _commit(self) -> None:
        upto = self.upto
        if upto > self.committed:
            self.stream.commit(upto)
            self.committed = upto
