"""What a run may start from: a checkpoint of its own past, or imported weights."""

from pathlib import Path
from typing import Any

from lanewise.checkpoint.locate import locate
from lanewise.checkpoint.manifest import Manifest
from lanewise.checkpoint.pieces import State
from lanewise.checkpoint.store import Checkpoints, Found
from lanewise.config import Run, differences, parse
from lanewise.data.corpus import difference
from lanewise.errors import UserError
from lanewise.job import Job

# Settings of a model that change how it is trained and not what it computes: imported weights say nothing about them.
TRAINING = {f"model.{key}" for key in ("dropout", "init_std", "bias_speed", "balance_loss", "mtp_weight")}


def check_origin(meta: dict[str, Any], run: Run, data: dict[str, Any]) -> None:
    """Refuse a checkpoint, known by its `meta`, whose future would not be this `run` on data of this identity.

    A run's own checkpoint binds every setting that defines the bits, and the data; an imported one only the model.
    """
    imported = "imported" in meta
    if not imported and (changed := difference(meta["data"], data)) is not None:
        raise UserError(
            f"{run.data.source}: the data has changed since the checkpoint was written ({changed}): "
            f"restore it, or start a new run with another --out"
        )
    for key, old, new in differences(parse(meta["run"]), run):
        if not imported:
            raise UserError(f"the checkpoint is of another run: {key} was {old!r}, now {new!r}: put it back")
        if key.startswith("model.") and key not in TRAINING:
            raise UserError(f"the imported model is another one: {key} is {old!r} there, {new!r} here: put it back")


def checkpoint_to_resume(job: Job, checkpoints: Checkpoints) -> Found | None:
    """A folder with checkpoints of its own goes on from them: a command that names another run's checkpoint can be
    given again after a preemption."""
    named = None if job.resume in ("auto", "never") else Path(job.resume)
    is_own = named is not None and named.absolute().is_relative_to(job.out.absolute())
    found = None if is_own else checkpoints.find()
    if found is None and named is not None:
        path = locate(named)
        found = Found(path, Manifest.read(path))
    return found


def what_it_holds(meta: dict[str, Any], state: State) -> State:
    """The part of a run's state that the checkpoint holds. Imported ones have no moments: those start at zero."""
    if "imported" not in meta:
        return state
    return {name: entry for name, entry in state.items() if name.startswith(("model/", "buffer/"))}
