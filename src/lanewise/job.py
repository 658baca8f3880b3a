"""What a worker is asked to do."""

from dataclasses import dataclass
from pathlib import Path

from lanewise.config import Run


@dataclass(frozen=True)
class Job:
    """data: the folder of prepared tokens; until: stop after this step and exit 0; display: 'auto' or 'json'."""

    run: Run
    data: Path
    out: Path
    resume: str = "auto"
    until: int | None = None
    display: str = "auto"
