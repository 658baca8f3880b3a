"""What a run may start from: a checkpoint of its own past, or imported weights."""

from typing import Any

from lanewise.checkpoint.pieces import State
from lanewise.config import Run, differences, parse
from lanewise.data.corpus import difference
from lanewise.errors import UserError

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


def what_it_holds(meta: dict[str, Any], state: State) -> State:
    """The part of a run's state that the checkpoint holds. Imported ones have no moments: those start at zero."""
    if "imported" not in meta:
        return state
    return {name: entry for name, entry in state.items() if name.startswith(("model/", "buffer/"))}
