"""Files that a person asked for by name."""

from pathlib import Path

from lanewise.errors import UserError


def write(path: Path, text: str) -> None:
    """Raises UserError, one line, where it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}): name another file") from None
