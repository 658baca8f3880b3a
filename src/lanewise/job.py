"""What a worker is asked to do."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lanewise.config import Run

if TYPE_CHECKING:
    from lanewise.elastic.status import Status
    from lanewise.elastic.world import World
    from lanewise.stop import StopRequest


@dataclass(frozen=True)
class Job:
    """data: the folder of prepared tokens; until: stop after this step and exit 0; display: 'auto' or 'json'."""

    run: Run
    data: Path
    out: Path
    resume: str = "auto"
    until: int | None = None
    display: str = "auto"

    def work(self, world: "World", status: "Status", stop: "StopRequest") -> int:
        """Train, as one rank of `world`; returns the exit code."""
        from lanewise.trainer import Trainer

        return Trainer(self, world, status, stop).train()
