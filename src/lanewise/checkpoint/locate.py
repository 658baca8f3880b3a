"""From what a person types (a run's folder, its checkpoints, one checkpoint) to the checkpoint that is meant."""

from pathlib import Path

from lanewise.checkpoint import manifest
from lanewise.errors import UserError


def locate(path: Path) -> Path:
    """The checkpoint at `path`, or the newest one under it that verifies.

    Raises UserError if `path` holds no checkpoint, or none that verifies: which file is damaged, and how.
    """
    if (path / manifest.NAME).exists():
        candidates = [path]
    else:
        candidates = manifest.checkpoints_in(path / "checkpoints") or manifest.checkpoints_in(path)
    if not candidates:
        raise UserError(f"{path}: holds no checkpoint; name a run's folder or a folder step-... in its checkpoints")
    damages = []
    for candidate in candidates:
        damage = manifest.verify(candidate)
        if damage is None:
            return candidate
        damages.append(damage)
    raise UserError(f"{damages[0]}; restore it from a copy, or name another checkpoint")
