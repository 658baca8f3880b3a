"""From what a person types (a run's folder, its checkpoints, one checkpoint) to the checkpoint that is meant."""

from pathlib import Path

from lanewise.checkpoint import manifest
from lanewise.errors import UserError


def candidates(path: Path) -> list[Path]:
    """The checkpoint at `path`, or those of the run at `path`, newest first. Raises UserError if there is none."""
    if (path / manifest.NAME).exists():
        return [path]
    found = path.is_dir() and (manifest.checkpoints_in(path / "checkpoints") or manifest.checkpoints_in(path))
    if not found:
        raise UserError(f"{path}: holds no checkpoint; name a run's folder or a folder step-... in its checkpoints")
    return found


def locate(path: Path) -> Path:
    """The checkpoint at `path`, or the newest one under it that verifies.

    Raises UserError if `path` holds no checkpoint, or none that verifies: which file is damaged, and how.
    """
    damages = []
    for candidate in candidates(path):
        damage = manifest.verify(candidate)
        if damage is None:
            return candidate
        damages.append(damage)
    raise UserError(f"{damages[0]}; restore it from a copy, or name another checkpoint")


def health(path: Path) -> str:
    """How many checkpoints are at `path`, and which are damaged and how, in one line."""
    found = candidates(path)
    damages = [damage for damage in map(manifest.verify, found) if damage is not None]
    count = f"{len(found)} checkpoint" + "s" * (len(found) != 1)
    return f"{count}, damaged: {'; '.join(map(str, damages))}" if damages else f"{count}, every byte verified"
