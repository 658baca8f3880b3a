"""What the sections of the run file are made of."""

import difflib
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


def free(default: Any, description: str, **limits: Any) -> Any:
    """A field that does not define the bits of the run: it may differ when the run is resumed."""
    return Field(default, description=description, json_schema_extra={"free": True}, **limits)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


def nearest(word: str, known: Sequence[str] | dict[str, Any]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(known))}"
