"""Another layout in the middle of a run, at a commit, with the same state.

In memory if the state of both fits, else through a checkpoint of this very step. The run's folder learns of it when all
ranks have the whole state: if one dies before, the run goes on from its last checkpoint, as after any other death.
"""

import gc
import time
from typing import TYPE_CHECKING

from lanewise.checkpoint.store import Found
from lanewise.config import Run
from lanewise.parallel.reshard import BUCKET, reshard
from lanewise.runfolder import rewrite

if TYPE_CHECKING:
    from lanewise.trainer import Trainer


def switch(trainer: "Trainer") -> None:
    """Called by all ranks after the same commit: on in the layout that the first one's adviser chose."""
    trainer.status.enter("switch")
    started = time.perf_counter()
    trainer.checkpoints.wait()
    adviser, world = trainer.adviser, trainer.world
    choice = world.gather(adviser.choice if adviser is not None else None)[0]
    assert choice is not None
    how = "memory"
    if choice.bytes + 2 * BUCKET < world.room(host=choice.run.layout.offload):
        _in_memory(trainer, choice.run)
    elif (found := _saved(trainer)) is not None:
        how = "a checkpoint"
        _through(found, trainer, choice.run)
    else:
        if adviser is not None:
            adviser.refused("both layouts do not fit into memory, and no checkpoint could be written")
        return
    trainer.replica.loaded()
    trainer.run, trainer.feed.lanes = choice.run, trainer.replica.reducer.mine
    world.gather(None)  # all are there
    if adviser is not None:
        adviser.switched(time.perf_counter() - started, how)
        try:
            rewrite(trainer.run, trainer.job.out)
        except OSError as error:
            trainer.events.alarm("run_file_not_written", {"reason": str(error), "layout": trainer.run.layout.axes})


def _in_memory(trainer: "Trainer", run: Run) -> None:
    old, trainer.replica = trainer.replica, trainer.make_replica(run, initialise=False)
    reshard(old.state(share=False), trainer.replica.state(share=False), trainer.world)
    old.reducer.close()
    del old
    gc.collect()  # modules point at each other


def _saved(trainer: "Trainer") -> Found | None:
    """The checkpoint of this step."""
    trainer.save()
    found = trainer.checkpoints.find() if trainer.checkpoints.wait() else None
    return found if found is not None and found.step == trainer.progress.step else None


def _through(found: Found, trainer: "Trainer", run: Run) -> None:
    trainer.replica.reducer.close()
    del trainer.replica
    gc.collect()
    trainer.replica = trainer.make_replica(run, initialise=False)
    trainer.checkpoints.load(found, trainer.replica.state(share=False))
