"""Parameters that do not change, chosen by patterns on their names."""

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from lanewise.errors import UserError
from lanewise.models.spec import ParamSpec


def frozen(table: Sequence[ParamSpec], patterns: Sequence[str]) -> set[str]:
    """Names of those parameters that a pattern (`layers.0.*`) matches under any of their names.

    Raises UserError if a pattern matches none, or if nothing is left to train.
    """
    names = {name: spec.name for spec in table for name in (spec.name, *spec.aliases)}
    found: set[str] = set()
    for pattern in patterns:
        hits = {names[name] for name in names if fnmatchcase(name, pattern)}
        if not hits:
            near = ", ".join(difflib.get_close_matches(pattern, names, n=3, cutoff=0))
            raise UserError(f"train.freeze: no parameter is called {pattern!r}; the nearest are {near}")
        found |= hits
    if len(found) == len(table):
        raise UserError("train.freeze: every parameter is frozen: leave some to train")
    return found


def freeze(model: nn.Module, table: Sequence[ParamSpec], patterns: Sequence[str]) -> None:
    """Those of the model's parameters that the patterns match in the whole model's table need no gradient."""
    fixed = frozen(table, patterns)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in fixed)
